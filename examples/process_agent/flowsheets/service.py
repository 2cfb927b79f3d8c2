"""The simulator as an HTTP service: python -m examples.process_agent.flowsheets.service --port 8700

    GET  /health                          {"status": "ok"} GET  /schema                          the flowsheet
    format POST /simulations                     a flowsheet -> {"run_id", "status": "converged" | "failed",
    ...}; 422 if malformed GET  /simulations/{run_id}?path=...   results, all or by dotted path; 404 if there
    are none

An error is `{"error": {"code", "message"}}`, with `unit` if a unit failed. The service has no authentication,
and listens on loopback by default.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from examples.process_agent.flowsheets.errors import FlowsheetError, SimulationError, UnknownRunError
from examples.process_agent.flowsheets.model import schema
from examples.process_agent.flowsheets.runs import Runs

MAX_BODY = 256 * 1024
"""Maximum size of a flowsheet, in bytes."""
KEEP_ALIVE_S = 75
"""Longer than the 5 s after which clients close an idle connection, so that none is closed under a request.
"""
READY = "simulator at "
"""Text that is printed before the URL once the service accepts requests."""


def make_app(runs: Runs | None = None) -> Starlette:
    """Return the service as an ASGI application."""
    runs = runs or Runs()

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def describe(request: Request) -> JSONResponse:
        return JSONResponse(schema())

    async def simulate(request: Request) -> JSONResponse:
        run = await run_in_threadpool(runs.simulate, await _json_body(request))
        return JSONResponse(run.as_json())

    async def result(request: Request) -> JSONResponse:
        found = await run_in_threadpool(
            runs.result, request.path_params["run_id"], request.query_params.getlist("path")
        )
        return JSONResponse(found)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, SimulationError)
        return JSONResponse(
            {"error": error.as_json()}, status_code=404 if isinstance(error, UnknownRunError) else 422
        )

    routes = [
        Route("/health", health),
        Route("/schema", describe),
        Route("/simulations", simulate, methods=["POST"]),
        Route("/simulations/{run_id}", result),
    ]
    return Starlette(routes=routes, exception_handlers={SimulationError: refuse})


async def _json_body(request: Request) -> Any:
    """Parse the body as JSON.

    Raises:
        FlowsheetError: it is malformed, or too large.
    """
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise FlowsheetError(f"the flowsheet is larger than {MAX_BODY} bytes; send a smaller one")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FlowsheetError(f"the body is not JSON: {error}") from None


class _Server(uvicorn.Server):
    """uvicorn server that prints its URL once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"{READY}http://{host}:{port}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the process simulator over HTTP.")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; there is no authentication, so keep it in your network",
    )
    parser.add_argument("--port", type=int, default=8700, help="0 for any free port")
    parser.add_argument("--until-eof", action="store_true", help="end when the standard input is closed")
    args = parser.parse_args()
    config = uvicorn.Config(
        make_app(), host=args.host, port=args.port, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S
    )
    server = _Server(config)
    if args.until_eof:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    server.run()


def _end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


if __name__ == "__main__":
    main()
