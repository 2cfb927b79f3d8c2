"""Running a coroutine to its end from any place: a script, a notebook cell whose own event loop runs, a job.

The coroutine gets an event loop in a thread of its own. Ctrl-C and SIGTERM cancel it and wait for its clean-up.
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
    """Run `work` and return its result; on KeyboardInterrupt or SIGTERM cancel it first, let it clean up, then raise."""
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
        except BaseException as error:  # handed to the waiting thread
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
    """In the main thread, let SIGTERM end the run as Ctrl-C does, but with SIGTERM's exit code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_uninterrupted(result: concurrent.futures.Future[Any]) -> None:
    """Wait for the clean-up. An impatient second Ctrl-C is answered, and does not leave half of the run behind."""
    while not result.done():
        try:
            concurrent.futures.wait([result])
        except (KeyboardInterrupt, SystemExit):
            logger.warning("still cleaning up; a moment")
