"""The agent's side of the calculator: one MCP server for all rollouts of a process, and what happens when it dies."""

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
"""For a server to start: one that is fetched first, as by uvx, takes long."""
CALL_S = 30.0
"""For one call of a tool."""
CLOSE_S = 10.0
C = TypeVar("C")


class CalculatorError(RuntimeError):
    """The MCP server cannot be started, died, or does not answer. The rollout fails unscored: the model cannot help it."""


class _Shared(Generic[C]):
    """A connection that many tasks use. A task of its own opens and closes it, because both must happen in the same one."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[C]], command: Sequence[str]) -> None:
        self._command = command
        self._connection: asyncio.Future[C] = asyncio.get_running_loop().create_future()
        self._unwanted = asyncio.Event()
        self._holder = asyncio.create_task(self._hold(make))

    async def get(self) -> C:
        return await asyncio.shield(self._connection)

    async def close(self) -> None:
        self._unwanted.set()
        await asyncio.wait([self._holder], timeout=CLOSE_S)

    async def _hold(self, make: Callable[[], AbstractAsyncContextManager[C]]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(START_S):
                    connection = await stack.enter_async_context(make())
                self._connection.set_result(connection)
                await self._unwanted.wait()
        except Exception as error:
            if self._connection.done():
                logger.warning("the MCP server %s did not close well: %r", " ".join(self._command), error)
                return
            failed = CalculatorError(
                f"the MCP server {' '.join(self._command)!r} did not start: {_innermost(error)!r}; try it in a shell"
            )
            failed.__cause__ = error
            self._connection.set_exception(failed)
            self._connection.exception()  # whoever waited may be gone
        finally:
            self._connection.cancel()  # no effect where there is one


_OPEN: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, _Shared[Any]]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.asynccontextmanager
async def shared(
    kind: str, command: Sequence[str], make: Callable[[], AbstractAsyncContextManager[C]]
) -> AsyncIterator[C]:
    """A connection to the server that `command` starts, the same one for every block on this event loop.

    A block that fails because the connection broke has the next one start a new server. A server ends when its process's stdin
    does, so none outlives the runner.

    Args:
        kind: what is made; connections of different kinds are different.
        make: opens it.

    Raises:
        CalculatorError: the server cannot be started, or was lost within the block.
    """
    connections = _OPEN.setdefault(asyncio.get_running_loop(), {})
    key = (kind, tuple(command))
    if key not in connections:
        connections[key] = _Shared(make, command)
    mine = connections[key]
    try:
        yield await mine.get()
    except Exception as error:
        if not isinstance(error, CalculatorError) and not is_lost(error):
            raise
        if connections.get(key) is mine:
            del connections[key]
        await mine.close()
        if isinstance(error, CalculatorError):
            raise
        raise CalculatorError(
            f"the MCP server {' '.join(command)!r} was lost in a call: {_lost_in(error)}"
        ) from error


async def close_all() -> None:
    """Close the connections of this event loop."""
    for connection in _OPEN.pop(asyncio.get_running_loop(), {}).values():
        await connection.close()


def is_lost(error: BaseException) -> bool:
    """Whether an error means that the connection to a server broke, and not that the server refused something."""
    return _lost_in(error) is not None


def _lost_in(error: BaseException) -> BaseException | None:
    for cause in _causes(error):
        if isinstance(cause, ClosedResourceError | BrokenResourceError):
            return cause
        if isinstance(cause, MCPError) and cause.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            return cause
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and all that it came from."""
    seen, left = set[int](), [error]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left.extend(one.exceptions if isinstance(one, BaseExceptionGroup) else ())
        left.extend(cause for cause in (one.__cause__, one.__context__) if cause is not None)


def _innermost(error: BaseException) -> BaseException:
    """What a group of errors is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Calculator:
    """The tools of an MCP server, for client libraries that know nothing of MCP."""

    def __init__(self, client: Client, tools: list[Tool]) -> None:
        self._client = client
        self.tools = tools
        self._names = {tool.name for tool in tools}

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool returns or complains of, as text for the model.

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
    """The tools of the MCP server that `command` starts; see `shared`."""

    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Calculator]:
        server = StdioServerParameters(command=command[0], args=list(command[1:]))
        async with Client(server, read_timeout_seconds=CALL_S) as client:
            yield Calculator(client, (await client.list_tools()).tools)

    return shared("mcp", command, make)
