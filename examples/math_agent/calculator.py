"""Client of the calculator: one MCP server for all rollouts of a process, restarted after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from anyio import BrokenResourceError, ClosedResourceError
from mcp import Client, MCPError, StdioServerParameters
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT, CallToolResult, TextContent, Tool

logger = logging.getLogger(__name__)

START_S = 60.0
"""Time limit for the start of a server; one that is downloaded first (`uvx`) takes long."""
CALL_S = 30.0
"""Time limit for one tool call."""
CLOSE_S = 10.0
C = TypeVar("C")


class CalculatorError(RuntimeError):
    """The MCP server did not start, died, or does not respond.

    The rollout fails without a reward, because the model is not at fault.
    """


class _SharedConnection(Generic[C]):
    """A connection that many tasks use.

    A separate task opens and closes it, because both must happen in the same task.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[C]], command: Sequence[str]) -> None:
        self.lost: BaseException | None = None
        """First error that lost the server. Other blocks may get any error of a closed client."""
        self._command = command
        self._connection: asyncio.Future[C] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._holder = asyncio.create_task(self._hold(make))

    async def get(self) -> C:
        return await asyncio.shield(self._connection)

    async def close(self) -> None:
        self._closing.set()
        await asyncio.wait([self._holder], timeout=CLOSE_S)

    async def _hold(self, make: Callable[[], AbstractAsyncContextManager[C]]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(START_S):
                    connection = await stack.enter_async_context(make())
                self._connection.set_result(connection)
                await self._closing.wait()
        except Exception as error:
            if self._connection.done():
                logger.warning("closing the MCP server %s failed: %r", " ".join(self._command), error)
                return
            start_error = CalculatorError(
                f"the MCP server {' '.join(self._command)!r} did not start: {_innermost(error)!r}; try it in "
                "a shell"
            )
            start_error.__cause__ = error
            self._connection.set_exception(start_error)
            self._connection.exception()  # mark as retrieved, because no task may wait for it
        finally:
            self._connection.cancel()  # no effect on an established connection


_OPEN: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, _SharedConnection[Any]]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.asynccontextmanager
async def shared(
    kind: str, command: Sequence[str], make: Callable[[], AbstractAsyncContextManager[C]]
) -> AsyncIterator[C]:
    """Yield a connection to the server that `command` starts; all blocks on this event loop share it.

    After a block that failed because the connection broke, the next block starts a new server. A server ends
    when its stdin is closed, so none outlives the runner.

    Args:
        kind: kind of the connection; different kinds have separate connections.
        make: opens the connection.

    Raises:
        CalculatorError: the server did not start, or was lost within the block.
    """
    connections = _OPEN.setdefault(asyncio.get_running_loop(), {})
    key = (kind, tuple(command))
    if key not in connections:
        connections[key] = _SharedConnection(make, command)
    entry = connections[key]
    try:
        yield await entry.get()
    except Exception as error:
        entry.lost = entry.lost or _lost_in(error)
        if entry.lost is None and not isinstance(error, CalculatorError):
            raise
        if connections.get(key) is entry:
            del connections[key]
        await entry.close()
        if isinstance(error, CalculatorError):
            raise
        raise CalculatorError(
            f"the MCP server {' '.join(command)!r} was lost in a call: {entry.lost}"
        ) from error


async def close_all() -> None:
    """Close the connections of this event loop."""
    for connection in _OPEN.pop(asyncio.get_running_loop(), {}).values():
        await connection.close()


def is_lost(error: BaseException) -> bool:
    """True if an error means that the connection to the server broke; False for an error of the tool."""
    return _lost_in(error) is not None


def _lost_in(error: BaseException) -> BaseException | None:
    for cause in _causes(error):
        if isinstance(cause, ClosedResourceError | BrokenResourceError):
            return cause
        if isinstance(cause, MCPError) and cause.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            return cause
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all its causes."""
    visited, pending = set[int](), [error]
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        pending.extend(current.exceptions if isinstance(current, BaseExceptionGroup) else ())
        pending.extend(cause for cause in (current.__cause__, current.__context__) if cause is not None)


def _innermost(error: BaseException) -> BaseException:
    """First plain error in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Calculator:
    """Tools of an MCP server, for client libraries without MCP support."""

    def __init__(self, client: Client, tools: list[Tool]) -> None:
        self._client = client
        self.tools = tools
        self._names = {tool.name for tool in tools}

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool; returns its result or its error as text for the model.

        Raises:
            MCPError: the server was lost.
        """
        if name not in self._names:
            return f"error: there is no tool {name!r}; there are: {', '.join(sorted(self._names))}"
        try:
            result: CallToolResult = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if is_lost(error):
                raise
            return f"error: {error.message}"
        text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
        return f"error: {text}" if result.is_error else text


def calculator(command: Sequence[str]) -> AbstractAsyncContextManager[Calculator]:
    """Connect to the MCP server that `command` starts; see `shared`."""

    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Calculator]:
        server = StdioServerParameters(command=command[0], args=list(command[1:]))
        async with Client(server, read_timeout_seconds=CALL_S) as client:
            yield Calculator(client, (await client.list_tools()).tools)

    return shared("mcp", command, make)
