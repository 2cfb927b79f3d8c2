"""The end of Ray's processes is noticed at once, and ends the work that depends on them."""

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Iterator

import pytest

from raylight.errors import ClusterLostError, RunnerLostError
from raylight.trainer.ray_session import cluster_monitor
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.trainer.ray_session.cluster_monitor import (
    ClusterMonitor,
    RayProcess,
    component_stack,
    is_cluster_lost,
    monitored_cluster,
    reconnect_timeout_s,
    until_lost,
    watch_loss,
)

WAIT_S = 20


class Listener:
    """A port that accepts connections, as a process of Ray does, until it ends."""

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self._accepted: list[socket.socket] = []
        self.connected = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._accepted.append(self._socket.accept()[0])
                self.connected.set()

    def drop_connections(self) -> None:
        """Close the connections of clients, as gRPC does after minutes of silence."""
        while self._accepted:
            self._accepted.pop().close()

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.drop_connections()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    with contextlib.suppress(OSError):
        listener.end()


@pytest.fixture(autouse=True)
def forget_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_monitor, "_current", None)


def watch(
    listener: Listener, patience_s: float = 0.0, messages: list[str] | None = None, left: bool = False
) -> ClusterMonitor:
    process = RayProcess("raylet", "127.0.0.1", listener.port, patience_s)
    return ClusterMonitor([process], lambda: left, (messages if messages is not None else []).append)


async def test_work_is_cancelled_and_the_loss_is_raised_with_the_way_to_continue(listener: Listener) -> None:
    stopped = []

    async def work() -> None:
        async with component_stack() as stack:
            stack.callback(stopped.append, "a component that cannot be reached")
            listener.end()
            try:
                await asyncio.Event().wait()
            finally:
                assert is_cluster_lost()

    message = rf"raylet at 127.0.0.1:{listener.port} has ended.*Try again"
    with monitored_cluster(watch(listener)):
        assert listener.connected.wait(WAIT_S)
        with pytest.raises(ClusterLostError, match=message):
            await asyncio.wait_for(until_lost(work(), "Try again"), WAIT_S)
    assert stopped == []


async def test_a_loss_while_components_are_stopped_drops_the_others(listener: Listener) -> None:
    stopped = []

    async def stop_first() -> None:
        listener.end()
        await asyncio.wait_for(lost.wait(), WAIT_S)
        stopped.append("first")

    monitor, lost, loop = watch(listener), asyncio.Event(), asyncio.get_running_loop()
    with monitored_cluster(monitor):
        assert listener.connected.wait(WAIT_S)
        async with component_stack() as stack:
            stack.callback(stopped.append, "a component that cannot be reached")
            stack.push_async_callback(stop_first)
            loop.call_soon(monitor.on_loss, lambda: loop.call_soon_threadsafe(lost.set))
    assert stopped == ["first"]


async def test_an_error_that_the_loss_causes_is_not_the_one_that_is_raised(listener: Listener) -> None:
    async def fail() -> None:
        listener.end()
        raise RunnerLostError("every runner died")

    with monitored_cluster(watch(listener)), pytest.raises(ClusterLostError):
        await asyncio.wait_for(until_lost(fail(), ""), WAIT_S)


async def test_a_connection_that_has_ended_without_a_loss_is_forgotten(listener: Listener) -> None:
    with monitored_cluster(watch(listener, left=True)):
        assert listener.connected.wait(WAIT_S)

    async def fail() -> None:
        raise RunnerLostError("no")

    with pytest.raises(RunnerLostError):
        await until_lost(fail(), "")


async def test_results_errors_and_cancellations_of_the_work_pass_through(listener: Listener) -> None:
    stopped = []

    async def answer() -> int:
        return 3

    async def fail() -> None:
        raise RunnerLostError("no")

    async def wait() -> None:
        async with component_stack() as stack:
            stack.callback(stopped.append, "component")
            waiting.set()
            await asyncio.Event().wait()

    assert await until_lost(answer(), "without a monitor") == 3
    waiting = asyncio.Event()
    with monitored_cluster(watch(listener)):
        assert await until_lost(answer(), "") == 3
        with pytest.raises(RunnerLostError):
            await until_lost(fail(), "")
        task = asyncio.create_task(until_lost(wait(), ""))
        await asyncio.wait_for(waiting.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert stopped == ["component"]
    assert not is_cluster_lost()


async def test_work_that_fails_as_its_node_leaves_the_cluster_ends_with_the_loss(listener: Listener) -> None:
    """The raylet kills its workers before it closes its port."""

    async def fail() -> None:
        raise RunnerLostError("runner-0 died")

    error = pytest.raises(ClusterLostError, match=r"its node has left the cluster.* Run it again\.")
    with monitored_cluster(watch(listener, left=True)), error:
        await until_lost(fail(), "Run it again.")


def test_a_closed_connection_is_not_the_end_of_the_process(listener: Listener) -> None:
    with monitored_cluster(watch(listener)):
        for _ in range(3):
            assert listener.connected.wait(WAIT_S)
            listener.connected.clear()
            listener.drop_connections()
        assert listener.connected.wait(WAIT_S)
        assert not is_cluster_lost()


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), TimeoutError("timed out")])
def test_a_connection_that_fails_on_this_side_is_not_the_end_of_the_process(
    error: OSError, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_monitor, "RECONNECT_INTERVAL_S", 0.01)
    messages: list[str] = []
    failed = threading.Event()

    def fail(process: RayProcess) -> socket.socket:
        failed.set()
        raise error

    monitor = watch(listener, messages=messages)
    with monitored_cluster(monitor):
        assert listener.connected.wait(WAIT_S)
        listener.connected.clear()
        with monkeypatch.context() as context:
            context.setattr(RayProcess, "connect", fail)
            monitor.check()
            failed.clear()
            listener.drop_connections()
            assert failed.wait(WAIT_S)
        assert listener.connected.wait(WAIT_S)
        assert not is_cluster_lost()
    assert f"does not respond ({error}); waiting for it for 60 s" in messages[0]


def test_a_process_that_never_responds_is_lost(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_monitor, "RECONNECT_INTERVAL_S", 0.01)
    monkeypatch.setattr(cluster_monitor, "NO_ANSWER_TIMEOUT_S", 0.05)
    lost = threading.Event()

    def fail(process: RayProcess) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(RayProcess, "connect", fail)
    monitor = watch(listener)
    monitor.on_loss(lost.set)
    with monitored_cluster(monitor):
        assert lost.wait(WAIT_S)


def test_a_gcs_that_comes_back_in_time_is_not_lost(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_monitor, "RECONNECT_INTERVAL_S", 0.01)
    messages: list[str] = []
    away, lost = threading.Event(), threading.Event()
    monitor = watch(listener, 300.0, messages)
    monitor.on_loss(lost.set)
    monkeypatch.setattr(monitor, "_show", lambda text: (messages.append(text), away.set()))
    with monitored_cluster(monitor):
        assert listener.connected.wait(WAIT_S)
        listener.end()
        assert away.wait(WAIT_S)
        away.clear()
        again = Listener(listener.port)
        assert away.wait(WAIT_S)
        again.end()
    assert not lost.is_set()
    assert "waiting for it for 300 s (RAY_gcs_rpc_server_reconnect_timeout_s)" in messages[0]
    assert messages[1] == "Ray's raylet responds again"


def test_a_gcs_that_stays_away_is_lost_after_ray_s_own_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_monitor, "RECONNECT_INTERVAL_S", 0.01)
    lost = threading.Event()
    monitor = watch(listener, 0.05)
    monitor.on_loss(lost.set)
    with monitored_cluster(monitor):
        assert listener.connected.wait(WAIT_S)
        listener.end()
        assert lost.wait(WAIT_S)
    late = threading.Event()
    monitor.on_loss(late.set)
    assert late.is_set()


def test_the_time_to_reconnect_is_ray_s_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    assert reconnect_timeout_s() == 60
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "7")
    assert reconnect_timeout_s() == 7


def test_a_call_of_ray_that_blocks_the_event_loop_does_not_keep_a_lost_run(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_monitor, "CLEAN_UP_TIMEOUT_S", 0.01)
    monkeypatch.setattr(cluster_monitor, "EXIT_TIMEOUT_S", 0.01)
    blocked = threading.Event()

    async def work() -> None:
        listener.end()
        blocked.wait(WAIT_S)

    with monitored_cluster(watch(listener)):
        assert listener.connected.wait(WAIT_S)
        try:
            with pytest.raises(ClusterLostError, match=r"has ended .* Start again"):
                run_blocking(until_lost(work(), "Start again"), watch_loss("Start again"))
        finally:
            blocked.set()


def test_blocking_work_ends_with_the_loss_that_cancels_it_or_that_its_error_comes_from(
    listener: Listener,
) -> None:
    cleaned = []

    async def wait() -> None:
        listener.end()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(is_cluster_lost())

    async def fail() -> None:
        raise RunnerLostError("runner-0 died")

    with monitored_cluster(watch(listener)):
        assert listener.connected.wait(WAIT_S)
        with pytest.raises(ClusterLostError, match=r"has ended .* Start again"):
            run_blocking(until_lost(wait(), "Start again"), watch_loss("Start again"))
        with pytest.raises(ClusterLostError):
            run_blocking(until_lost(fail(), "Start again"), watch_loss("Start again"))
    assert cleaned == [True]


def test_results_and_errors_of_blocking_work_pass_through_without_a_loss(listener: Listener) -> None:
    async def answer() -> int:
        return 3

    async def fail() -> None:
        raise RunnerLostError("no")

    assert run_blocking(until_lost(answer(), "without a monitor"), watch_loss("without a monitor")) == 3
    with monitored_cluster(watch(listener)):
        assert run_blocking(until_lost(answer(), ""), watch_loss("")) == 3
        with pytest.raises(RunnerLostError, match="no"):
            run_blocking(until_lost(fail(), ""), watch_loss(""))
