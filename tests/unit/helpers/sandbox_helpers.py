"""Sandboxes that are stopped at the end of a test, and a model for their programs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil


@contextlib.asynccontextmanager
async def starting(make: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that makes a sandbox and starts it; all are stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*args: Any, **options: Any) -> Any:
            sandbox = make(*args, **options)
            stack.push_async_callback(sandbox.stop)
            await sandbox.start()
            return sandbox

        yield start


@contextlib.asynccontextmanager
async def served_model() -> AsyncIterator[int]:
    """Yield the port of a server that answers each request with "model"."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nmodel")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def alive(pid: int) -> bool:
    """Return True if a process runs; one that has ended may wait for its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
