"""Tools of MCP servers for any agent: OpenAI's tool schemas, a caller, and the connections to the servers.

A separate task opens and closes each connection, which may serve many rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.environments.shared_services import shared_service
from raylight.environments.tool_loop import MAX_RESULT, answer_calls, call_tool
from raylight.errors import ConfigError, EnvironmentServerError, EnvironmentUnavailableError
from raylight.sandboxes.local_program import ProcessGuard
from raylight.sandboxes.marked_processes import MARK_VARIABLE
from raylight.types import JsonObject

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""Time in which a server must list its tools after a call took too long; otherwise it is lost."""
CLOSE_S = 10.0
"""Time for closing a connection. The client itself kills a server that does not end within 4 s."""
HTTP_TIMEOUT_S = 300.0
"""Longest pause of an HTTP answer, whose stream a server may hold open. Calls have their own time limit."""
GUARD = ProcessGuard()


def require_mcp() -> None:
    """Import the package.

    Raises:
        ConfigError: it is missing or too old.
    """
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"mcp_tools needs the package mcp, version 2.3 or later ({error}): pip install 'raylight[mcp]'"
        ) from error


@dataclass(frozen=True)
class MCPServer:
    """Description of an MCP server: a command or a URL."""

    command: tuple[str, ...]
    """Program and arguments; empty for a URL."""
    url: str
    options: tuple[tuple[str, str], ...]
    """Environment variables of a command, or HTTP headers for a URL."""
    cwd: str | None
    start_timeout_s: float
    call_timeout_s: float

    @property
    def title(self) -> str:
        """Command line or URL, for messages."""
        return self.url or repr(" ".join(self.command))


class MCPConnection:
    """Connection to a server, begun when it is created.

    A separate task opens and closes it: MCP's client needs both in one task, and a rollout that is
    cancelled must not end what others use.
    """

    def __init__(self, server: MCPServer) -> None:
        self.title = server.title
        self.tools: list[Any] = []
        self._lost_by = ""
        """First error that lost the server. Later calls may get any error of a closed client."""
        self._server = server
        self._client: Any = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._holder = asyncio.create_task(self._hold())

    @property
    def is_usable(self) -> bool:
        """True unless the server did not start, was lost, or is being closed."""
        return not (self._closing.is_set() or self._holder.done())

    async def wait_until_open(self) -> None:
        """Return when the server has listed its tools.

        Raises:
            EnvironmentServerError: its program does not exist.
            EnvironmentUnavailableError: it did not start, or could not be reached.
        """
        await asyncio.shield(self._opened)

    async def close(self) -> None:
        """Close the connection, and end the server if it is a process."""
        self._closing.set()
        await asyncio.wait([self._holder], timeout=CLOSE_S)

    async def call(self, name: str, arguments: JsonObject) -> str:
        """Call a tool; return its result or its error as text.

        Raises:
            EnvironmentUnavailableError: the server died, or does not respond any more.
            EnvironmentServerError: its response is not a result of MCP.
        """
        from anyio import BrokenResourceError, ClosedResourceError
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            result = await self._client.call_tool(
                name, arguments, read_timeout_seconds=self._server.call_timeout_s
            )
            return text_of(result)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT and await self._responds():
                return f"error: the tool did not finish within {self._server.call_timeout_s:g} s"
            if error.code not in (REQUEST_TIMEOUT, CONNECTION_CLOSED) and self.is_usable:
                return f"error: {error.message}"
            self._lose(error)
        except Exception as error:
            if self.is_usable and not isinstance(error, BrokenResourceError | ClosedResourceError):
                raise EnvironmentServerError(
                    f"the MCP server {self.title} answered a call of {name!r} with something else than a "
                    f"result: {error!r:.400}; run it in a shell"
                ) from error
            self._lose(error)
        raise EnvironmentUnavailableError(
            f"the MCP server {self.title} was lost in a call: {self._lost_by}; the attempt is retried. If "
            "this recurs, run the server in a shell, or raise mcp_tools(call_timeout_s=...)"
        )

    async def _responds(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._client.list_tools(cache_mode="bypass")
        except Exception:  # whatever it is, the server does not list its tools
            return False
        return True

    def _lose(self, error: Exception) -> None:
        """Close the connection, whose server is lost."""
        self._lost_by = self._lost_by or repr(error)
        self._closing.set()

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.start_timeout_s):
                    await self._open(stack)
                self._opened.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if self._opened.done():
                logger.warning("closing the MCP server %s failed: %r", self.title, error)
            else:
                self._opened.set_exception(self._start_error(innermost(error)))
                self._opened.exception()  # mark as retrieved, because no task may wait for it
        finally:
            self._closing.set()
            self._opened.cancel()  # no effect on an established connection

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Open the client, and list the tools."""
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        transport: Any = process_of(self._server)
        if self._server.url:
            http = httpx2.AsyncClient(headers=dict(self._server.options), timeout=HTTP_TIMEOUT_S)
            transport = streamable_http_client(
                self._server.url, http_client=await stack.enter_async_context(http)
            )
        self._client = await stack.enter_async_context(Client(transport))
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            self.tools += page.tools
            if (cursor := page.next_cursor) is None:
                return

    def _start_error(self, error: BaseException) -> EnvironmentServerError:
        reason = f"{error!r:.400}"
        if isinstance(error, TimeoutError):
            reason = f"it did not list its tools within {self._server.start_timeout_s:g} s"
        elif isinstance(error, OSError) and not self._server.url:
            return EnvironmentServerError(
                f"the MCP server {self.title} cannot be started: {error}; install it on every machine with "
                "runners, or give the full path of its program"
            )
        return EnvironmentUnavailableError(
            f"the MCP server {self.title} did not start: {reason}; the attempt is retried. Run the server in "
            "a shell: its standard error is in the log of the runner"
        )


@contextlib.asynccontextmanager
async def process_of(server: MCPServer) -> AsyncIterator[object]:
    """Start a server's process, and yield the streams to it. Its process group ends with the block, or with
    this process, even if that is killed."""
    import psutil
    from mcp import StdioServerParameters, stdio_client

    mark = uuid.uuid4().hex
    command, *arguments = server.command
    env = {**dict(server.options), MARK_VARIABLE: mark}
    parameters = StdioServerParameters(command=command, args=arguments, env=env, cwd=server.cwd)
    GUARD.start()
    group = None
    try:
        async with stdio_client(parameters) as streams:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it has ended
                    if child.environ().get(MARK_VARIABLE) == mark:
                        group = child.pid
                        GUARD.add(group, mark)
            yield streams
    finally:
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)  # what the server left behind
            GUARD.remove(group, mark)


def text_of(result: Any) -> str:
    """Return a tool's result: its texts, else its structured content. Other parts are named by their type."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content)]
    text = "\n".join(parts)
    return f"error: {text}" if result.is_error else text


def innermost(error: BaseException) -> BaseException:
    """Return the first plain error in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


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
    schemas: list[JsonObject] = field(default_factory=list)
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

    async def call(self, name: str, arguments: str | Mapping[str, object]) -> str | list[object]:
        """Call a tool; return its result, or its error as text for the model.

        Mistakes of the model (an unknown tool, arguments that are not a JSON object or that the tool rejects)
        and errors of the tool are returned as text that begins with "error:".

        Args:
            name: name of the tool.
            arguments: the arguments, or their JSON, as a model wrote it.

        Raises:
            EnvironmentUnavailableError: the server died or does not respond; the attempt is retried.
            EnvironmentServerError: the response is not a result of MCP.
        """

        async def execute(given: JsonObject) -> str:
            return await self._connection_of[name].call(name, given)

        return await call_tool(self._connection_of, name, arguments, execute, self.max_result)

    async def answer(self, message: object) -> list[JsonObject]:
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
            or the URL of a server with streamable HTTP.
        scope: "runner": all rollouts of a runner share one server, which is started by the first and ends
            with the runner; one that died is started again for the next rollout. "rollout": each rollout
            starts separate servers, and ends them, as tools with a state need it.
        env: further environment variables of commands. MCP's client passes on only a few of the runner's own,
            such as PATH and HOME.
        cwd: working directory of commands.
        headers: HTTP headers for URLs, such as an authorization.
        start_timeout_s: seconds for the start of a server and its list of tools.
        call_timeout_s: seconds for a tool call. The model then reads an error, if the server still responds.
        max_result: characters of a result that the model receives.

    Raises:
        ConfigError: the package mcp is missing, or an argument has the wrong type.
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
