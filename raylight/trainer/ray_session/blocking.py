"""Run a coroutine from synchronous code: a script, a job, or a notebook cell with a running event loop.

The coroutine runs on an event loop in its own thread. The first Ctrl-C or SIGTERM cancels it and waits for
its clean-up; further ones only log a warning, so that none of them leaves processes behind. Work that can end
by itself is asked to do so at the first one, and cancelled at a later one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLEAN_UP_TIMEOUT_S = 90.0
"""Longest wait for the clean-up of interrupted work, in seconds. What remains ends with the connection to
Ray."""
LOOP_CLOSE_TIMEOUT_S = 5.0
"""Longest wait for the end of the event loop, which waits for its blocked threads, in seconds."""
INTERRUPT_AGAIN_S = 10.0
"""Seconds after which an interrupt that has not ended the run is raised again: Python drops an exception that
is raised in a destructor."""


def run_blocking(
    work: Coroutine[object, object, T],
    watch: Callable[[Callable[[BaseException], None]], None] | None = None,
    stop: Callable[[], None] | None = None,
) -> T:
    """Run `work` and return its result. On KeyboardInterrupt or SIGTERM, cancel it, wait for its clean-up,
    then raise.

    Args:
        watch: begins a watch. It receives a function that raises an error in the waiting thread at once, from
            any thread, even if the event loop is blocked.
        stop: asks the work to end by itself, in its event loop; called at the first interrupt instead.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]] = (
        concurrent.futures.Future()
    )

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        try:
            value = await work
        except BaseException as error:  # raised in the waiting thread
            fail(error)
        else:  # not after `asyncio.run`, whose end waits for every blocked thread of the loop
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                result.set_result(value)

    def fail(error: BaseException) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has ended already
            result.set_exception(error)

    def cancel() -> None:
        loop, task = started.result()
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    with single_interrupt():
        thread = threading.Thread(target=asyncio.run, args=(main(),), name="raylight", daemon=True)
        try:
            thread.start()
            if watch is not None:
                watch(fail)
            try:
                value = result.result()
            except (KeyboardInterrupt, SystemExit):
                if stop is None or result.done():
                    raise
                started.result()[0].call_soon_threadsafe(stop)
                value = result.result()
            thread.join(LOOP_CLOSE_TIMEOUT_S)
            return value
        except (KeyboardInterrupt, SystemExit):
            cancel()
            with ignored_interrupts("the components of the run are being stopped"):
                _, late = concurrent.futures.wait([result], CLEAN_UP_TIMEOUT_S)
            if late:
                logger.error(
                    "the components of the run did not stop within %g s; what is left ends with this "
                    "process's connection to Ray",
                    CLEAN_UP_TIMEOUT_S,
                )
            raise
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error


@contextlib.contextmanager
def single_interrupt() -> Iterator[None]:
    """In the main thread, raise KeyboardInterrupt on the first Ctrl-C and SystemExit, with the exit code of
    SIGTERM, on the first SIGTERM. Log a warning on further ones.

    Handlers of Ctrl-C that the program has installed, or an ignored Ctrl-C, are left as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _InterruptHandler()
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    with contextlib.ExitStack() as stack:
        for number in numbers:
            known = signal.getsignal(number)
            if known is not None and not isinstance(known, _InterruptHandler):  # None: a handler in C
                stack.callback(signal.signal, number, signal.signal(number, handler))
        yield


class _InterruptHandler:
    """Handler of SIGINT and SIGTERM that raises once. During the clean-up, `ignored_interrupts` replaces
    it."""

    def __init__(self) -> None:
        self._raised_at = -math.inf

    def __call__(self, number: int, frame: object) -> None:
        if time.monotonic() < self._raised_at + INTERRUPT_AGAIN_S:
            logger.warning("interrupted already; the run stops its components, please wait")
            return
        self._raised_at = time.monotonic()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


@contextlib.contextmanager
def ignored_interrupts(reason: str) -> Iterator[None]:
    """In the main thread, log a warning with `reason` on Ctrl-C and SIGTERM until the block ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def warn(number: int, frame: object) -> None:
        logger.warning("%s; please wait", reason)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.ExitStack() as stack:
        for number, handler in previous.items():
            if handler not in (signal.SIG_IGN, None):  # None: installed by a program in C
                stack.callback(signal.signal, number, handler)
                signal.signal(number, warn)
        yield
