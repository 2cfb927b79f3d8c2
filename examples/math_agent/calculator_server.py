"""A calculator as an MCP server over stdio: python examples/math_agent/calculator_server.py [--log FILE]

Its one tool, `calculate(expression)`, never executes its input: see expressions.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from examples.math_agent.expressions import ExpressionError, evaluate, parse, show


def build_server(log: Path | None) -> MCPServer:
    """Return the server; it appends a line of JSON to `log` for every call."""
    server = MCPServer("calculator", log_level="ERROR")

    @server.tool(structured_output=False)
    async def calculate(expression: str) -> str:
        """Evaluate an arithmetic expression, such as (3 + 4) * 2 ** 5 / 7 or sqrt(144); return its value."""
        try:
            result, error = show(evaluate(parse(expression))), None
        except ExpressionError as refusal:
            result, error = None, str(refusal)
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps({"expression": expression, "result": result, "error": error}) + "\n")
        if result is None:
            raise ToolError(error)
        return result

    return server


def main() -> None:
    parser = argparse.ArgumentParser(description="A calculator as an MCP server over stdio.")
    parser.add_argument("--log", type=Path, help="append a line of JSON to this file for every call")
    build_server(parser.parse_args().log).run("stdio")


if __name__ == "__main__":
    main()
