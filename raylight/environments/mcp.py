"""Tools of MCP servers for any agent: OpenAI's tool schemas, and a caller."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.environments.mcp_connection import MCPConnection, MCPServer, require_mcp
from raylight.environments.shared_services import shared_service
from raylight.environments.tool_loop import MAX_RESULT, answer_calls, call_tool
from raylight.errors import ConfigError


@dataclass(frozen=True)
class MCPTools:
    """Tools of one or several MCP servers; see `mcp_tools`."""

    servers: tuple[MCPServer, ...]
    scope: Literal["runner", "rollout"] = "runner"
    max_result: int = MAX_RESULT

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[OpenMCPTools]:
        """Yield the tools for one rollout. Start the servers that do not run yet.

        Raises:
            ConfigError: two servers have a tool of the same name.
            EnvironmentServerError: a server's program does not exist.
            EnvironmentUnavailableError: a server did not start, or could not be reached.
        """
        async with contextlib.AsyncExitStack() as stack:
            opened = OpenMCPTools(self.max_result)
            connections = [await self._connect(stack, server) for server in self.servers]
            for connection in connections:
                opened.add(connection)
            yield opened

    async def _connect(self, stack: contextlib.AsyncExitStack, server: MCPServer) -> MCPConnection:
        if self.scope == "runner":
            connection = shared_service(MCPConnection, server)
        else:
            connection = MCPConnection(server)
            stack.push_async_callback(connection.close)
        await connection.wait_until_open()
        return connection


@dataclass
class OpenMCPTools:
    """Tools that a rollout can call, from `MCPTools.open`."""

    max_result: int = MAX_RESULT
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """The tools in OpenAI's form, for the parameter `tools` of a model call."""
    _connection_of: dict[str, MCPConnection] = field(default_factory=dict)

    def add(self, connection: MCPConnection) -> None:
        """Add the tools of a server."""
        for tool in connection.tools:
            if tool.name in self._connection_of:
                raise ConfigError(
                    f"mcp_tools: the servers {self._connection_of[tool.name].title} and {connection.title} "
                    f"both have a tool {tool.name!r}; give the tools of one of them to mcp_tools"
                )
            self._connection_of[tool.name] = connection
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            self.schemas.append({"type": "function", "function": function})

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> str | list[Any]:
        """Call a tool; return its result, or its error as text for the model.

        Mistakes of the model (an unknown tool, arguments that are not a JSON object or that the tool rejects)
        and errors of the tool are returned as text that begins with "error:".

        Args:
            name: name of the tool.
            arguments: the arguments, or their JSON, as a model wrote it.

        Raises:
            EnvironmentUnavailableError: the server died or does not respond; the attempt is retried.
            EnvironmentServerError: what the server sent is no result of MCP.
        """

        async def execute(given: dict[str, Any]) -> str:
            return await self._connection_of[name].call(name, given)

        return await call_tool(self._connection_of, name, arguments, execute, self.max_result)

    async def answer(self, message: Any) -> list[dict[str, Any]]:
        """Execute the tool calls of an assistant message, all at once; return the tool messages in order.

        Args:
            message: the message of OpenAI's client.

        Raises:
            EnvironmentServerError: as `call`.
        """
        return await answer_calls(message, self.call)


def mcp_tools(
    *servers: str | Sequence[str | os.PathLike[str]],
    scope: Literal["runner", "rollout"] = "runner",
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    start_timeout_s: float = 60.0,
    call_timeout_s: float = 30.0,
    max_result: int = MAX_RESULT,
) -> MCPTools:
    """Describe the tools of MCP servers. `async with tools.open() as opened:` connects a rollout to them.

    Args:
        servers: each a command such as `["npx", "-y", "some-server"]`, started on every machine with runners,
            or the URL of a server that speaks streamable HTTP.
        scope: "runner": all rollouts of a runner share one server, which is started by the first and ends
            with the runner; one that died is started again for the next rollout. "rollout": each rollout
            starts servers of its own, and ends them, as tools with a state need it.
        env: further environment variables of commands. MCP's client passes on only a few of the runner's own,
            such as PATH and HOME.
        cwd: working directory of commands.
        headers: HTTP headers for URLs, such as an authorization.
        start_timeout_s: seconds for the start of a server and its list of tools.
        call_timeout_s: seconds for a tool call. The model then reads an error, if the server still responds.
        max_result: characters of a result that the model receives.

    Raises:
        ConfigError: the package mcp is missing, or an argument is of a wrong type.
    """
    require_mcp()
    if scope not in ("runner", "rollout"):
        raise ConfigError(f'mcp_tools: scope={scope!r:.80} is unknown; give "runner" or "rollout"')
    described = []
    for server in servers:
        is_url = isinstance(server, str) and server.startswith(("http://", "https://"))
        parts = [] if isinstance(server, str | bytes) else list(server)
        if not is_url and not (parts and all(isinstance(part, str | os.PathLike) for part in parts)):
            raise ConfigError(
                f"mcp_tools: the server {server!r:.80} is neither a command nor a URL; give a list such as "
                '["python", "server.py"], or an address that begins with http:// or https://'
            )
        described.append(
            MCPServer(
                command=tuple(os.fspath(part) for part in parts),
                url=str(server) if is_url else "",
                options=tuple(((headers if is_url else env) or {}).items()),
                cwd=None if cwd is None else os.fspath(cwd),
                start_timeout_s=start_timeout_s,
                call_timeout_s=call_timeout_s,
            )
        )
    if not described:
        raise ConfigError(
            'mcp_tools: no server is given; give a command such as ["python", "server.py"] or a URL'
        )
    return MCPTools(tuple(described), scope, max_result)
