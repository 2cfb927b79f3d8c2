"""Run a coroutine from synchronous code: a script, a job, or a notebook cell with a running event loop.

The coroutine runs on an event loop in its own thread. Ctrl-C and SIGTERM cancel it and wait for its clean-up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import signal
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. On KeyboardInterrupt or SIGTERM, cancel it, wait for its clean-up,
    then raise."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = (
        concurrent.futures.Future()
    )

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await work

    def target() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:  # raised in the waiting thread
            result.set_exception(error)

    def cancel() -> None:
        loop, task = started.result()
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    with _sigterm_as_interrupt():
        thread = threading.Thread(target=target, name="raylight", daemon=True)
        try:
            thread.start()
            return result.result()
        except (KeyboardInterrupt, SystemExit):
            cancel()
            _wait_uninterrupted(result)
            raise
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """In the main thread, make SIGTERM end the run as Ctrl-C does, with the exit code of SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit_on_signal(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wait_uninterrupted(result: concurrent.futures.Future[Any]) -> None:
    """Wait for the clean-up. A second Ctrl-C is logged and does not interrupt it."""
    while not result.done():
        try:
            concurrent.futures.wait([result])
        except (KeyboardInterrupt, SystemExit):
            logger.warning("the run is still being cleaned up; please wait")
