"""Run a coroutine from synchronous code, and end it in order on Ctrl-C and SIGTERM."""

import asyncio
import os
import signal
import sys
import threading
import time
import traceback

import pytest

from raylight.trainer.ray_session import blocking
from raylight.trainer.ray_session.blocking import ignored_interrupts, run_blocking, single_interrupt


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


def signal_the_waiting_thread(number: int, waiting: int) -> None:
    """Send the signal once that thread waits for the result."""
    while [frame.name for frame in traceback.extract_stack(sys._current_frames()[waiting])[-2:]] != [
        "result",
        "wait",
    ]:
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def test_the_result_is_returned_and_the_work_runs_in_another_thread() -> None:
    async def where() -> int:
        return threading.get_ident()

    assert run_blocking(answer(3)) == 3
    assert run_blocking(where()) != threading.get_ident()


async def test_it_runs_while_another_event_loop_is_running() -> None:
    assert run_blocking(answer(4)) == 4


def test_it_runs_outside_the_main_thread() -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(run_blocking(answer(5))))
    thread.start()
    thread.join(10)
    assert results == [5]


def test_an_exception_passes_through() -> None:
    class OwnError(Exception):
        pass

    async def fail() -> None:
        raise OwnError("no")

    with pytest.raises(OwnError, match="no"):
        run_blocking(fail())


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_cancels_the_work_and_waits_for_its_clean_up(
    number: int, expected: type[BaseException]
) -> None:
    happened, here = [], threading.get_ident()

    async def endless() -> None:
        threading.Thread(target=signal_the_waiting_thread, args=(number, here)).start()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)  # a clean-up that takes its time
            happened.append("cleaned up")

    with pytest.raises(expected) as caught:
        run_blocking(endless())
    assert happened == ["cleaned up"]
    if expected is SystemExit:
        assert caught.value.code == 128 + signal.SIGTERM


def test_further_signals_do_not_end_the_clean_up() -> None:
    cleaned, here = [], threading.get_ident()

    def repeat() -> None:
        signal_the_waiting_thread(signal.SIGINT, here)
        cleaning.wait(10)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        repeated.set()

    cleaning, repeated = threading.Event(), threading.Event()

    async def endless() -> None:
        threading.Thread(target=repeat).start()
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            cleaned.append(await asyncio.to_thread(repeated.wait, 10))

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_blocking(endless())
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_clean_up_that_hangs_is_left_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "CLEAN_UP_TIMEOUT_S", 0.05)
    here, end = threading.get_ident(), threading.Event()

    async def endless() -> None:
        threading.Thread(target=signal_the_waiting_thread, args=(signal.SIGINT, here)).start()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(end.wait, 60)

    with pytest.raises(KeyboardInterrupt):
        run_blocking(endless())
    end.set()


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with single_interrupt(), ignored_interrupts("stopping"):
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_handler_of_sigterm_is_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_blocking(answer(1))
    assert signal.getsignal(signal.SIGTERM) is before


def test_work_that_cancels_itself_is_an_interruption() -> None:
    async def cancel() -> None:
        raise asyncio.CancelledError

    with pytest.raises(KeyboardInterrupt):
        run_blocking(cancel())
