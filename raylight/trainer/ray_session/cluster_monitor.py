"""Watch over the processes of Ray without which a driver cannot go on: the GCS, and the raylet of its node.

Ray itself notices the end of a raylet after a quarter of a minute, and ends the whole driver process, without
an exception, a minute after the end of the GCS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TypeVar

import ray
import ray._private.worker as ray_worker

from raylight._utils.aio import cancel_all
from raylight.errors import ClusterLostError

T = TypeVar("T")
logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
RECONNECT_INTERVAL_S = 1.0
"""Interval between two attempts to connect to a GCS that may come back."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's setting of the time within which its processes reconnect to the GCS, in seconds."""
RECONNECT_TIMEOUT_S = 60
"""Ray's default of that time."""
NO_ANSWER_TIMEOUT_S = 60.0
"""Longest time for which connections may fail on this side, as while the limit on open files is reached."""
EXIT_TIMEOUT_S = 1.0
CLEAN_UP_TIMEOUT_S = 5.0
"""Longest wait for the clean-up of a run whose cluster is lost: nothing of it can be reached."""


def reconnect_timeout_s() -> float:
    """Return the seconds within which Ray reconnects to a GCS that is away."""
    return float(os.environ.get(RECONNECT_VARIABLE, RECONNECT_TIMEOUT_S))


@dataclass(frozen=True)
class RayProcess:
    """A process of Ray that the driver depends on."""

    name: str
    """Ray's name for its type, as in the names of log files: "gcs_server" or "raylet"."""
    host: str
    port: int
    patience_s: float
    """Seconds for which its port may be closed: 0 if nothing starts it again."""

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), CONNECT_TIMEOUT_S)

    def patience_after(self, error: OSError) -> float:
        """Return the seconds for which connections may fail with this error. Only a refused or reset one
        shows that no process listens."""
        if isinstance(error, ConnectionError):
            return self.patience_s
        return max(self.patience_s, NO_ANSWER_TIMEOUT_S)


def driver_processes(owns_cluster: bool) -> list[RayProcess]:
    """Return the processes that the connected driver depends on.

    Args:
        owns_cluster: True if this process started the cluster, whose GCS then never comes back.
    """
    context = ray.get_runtime_context()
    node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    host, _, port = context.gcs_address.rpartition(":")
    return [
        RayProcess("raylet", node["NodeManagerAddress"], node["NodeManagerPort"], 0.0),
        RayProcess("gcs_server", host.strip("[]"), int(port), 0.0 if owns_cluster else reconnect_timeout_s()),
    ]


def node_has_left() -> bool:
    """Return True if the connected driver's node has left the cluster."""
    node_id = ray.get_runtime_context().get_node_id()
    return not any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


class ClusterMonitor:
    """Notices the end of processes of Ray, within milliseconds.

    It holds an idle connection to the port of each process: the kernel closes it when the process ends. A
    process that listens again within its `patience_s` is not lost.

    Args:
        processes: the raylet, then others.
        has_left: returns True if the raylet's node has left the cluster; called while all processes listen.
        show: receives a message about a process that is away and may come back, and about its return.
    """

    def __init__(
        self,
        processes: list[RayProcess],
        has_left: Callable[[], bool],
        show: Callable[[str], None] = logger.warning,
    ) -> None:
        self._processes = processes
        self._has_left = has_left
        self._show = show
        self._stopping, self._waking = socket.socketpair()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], object]] = []
        self.error: ClusterLostError | None = None
        """Set when a process is lost."""
        self._threads = [
            threading.Thread(target=self._watch, args=(process,), name=f"watch {process.name}", daemon=True)
            for process in processes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the watch. Processes that end later are not reported."""
        self._waking.close()
        for thread in self._threads:
            thread.join(CONNECT_TIMEOUT_S)

    def check(self) -> None:
        """Connect to the processes that never come back, and report the first that is not there.

        A raylet that ends by itself first leaves the cluster, then kills its workers, and listens until last.
        """
        reachable = True
        for process in self._processes:
            try:
                process.connect().close()
            except OSError as error:
                reachable = False
                if not process.patience_after(error):
                    self._report(process, error)
        if reachable and self._has_left():
            self._report(self._processes[0], "its node has left the cluster")

    def on_loss(self, listener: Callable[[], object]) -> None:
        """Call `listener`, in any thread, when a process is lost, or now if it is lost already."""
        with self._lock:
            self._listeners.append(listener)
            lost = self.error is not None
        if lost:
            listener()

    def _watch(self, process: RayProcess) -> None:
        away_since: float | None = None
        while not self._is_stopped():
            try:
                connection = process.connect()
            except OSError as error:
                now, patience_s = time.monotonic(), process.patience_after(error)
                if away_since is None:
                    away_since = now
                    if patience_s:
                        setting = f" ({RECONNECT_VARIABLE})" if patience_s == process.patience_s else ""
                        self._show(
                            f"Ray's {process.name} does not respond ({error}); waiting for it for "
                            f"{patience_s:g} s{setting}"
                        )
                if now - away_since >= patience_s:
                    self._report(process, error)
                    return
                self._is_stopped(RECONNECT_INTERVAL_S)
            else:
                if away_since is not None:
                    away_since = None
                    self._show(f"Ray's {process.name} responds again")
                with connection:
                    self._wait_for_end(connection)

    def _wait_for_end(self, connection: socket.socket) -> None:
        """Return when the other side has closed the connection, or this monitor stops."""
        with contextlib.suppress(OSError):
            while self._stopping not in select.select([connection, self._stopping], [], [])[0]:
                if not connection.recv(4096):
                    return

    def _is_stopped(self, timeout: float = 0.0) -> bool:
        return bool(select.select([self._stopping], [], [], timeout)[0])

    def _report(self, process: RayProcess, error: OSError | str) -> None:
        ray_worker._worker_logs_enabled = False  # Ray would print the last lines of the raylet's log
        with self._lock:
            if self.error is not None:
                return
            self.error = ClusterLostError(
                f"the run's Ray cluster is lost: its {process.name} at {process.host}:{process.port} has "
                f"ended ({_exit_of(process.name) or error}), and the run's actors with it"
            )
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


def _exit_of(name: str) -> str:
    """Return the exit and the logs of a process that this process has started; empty for another's."""
    node = ray_worker._global_node
    started = node.all_processes.get(name) if node is not None else None
    if not started:
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel closes its ports before it is a zombie
        started[0].process.wait(EXIT_TIMEOUT_S)
    status = started[0].process.returncode
    cause = "" if status is None else f"killed by signal {-status}; " if status < 0 else f"exit {status}; "
    return f"{cause}see {name}.out and {name}.err in {node.get_logs_dir_path()}"


_current: ClusterMonitor | None = None
"""Monitor of this process's only connection to Ray, and of the last one after its cluster was lost."""


@contextlib.contextmanager
def monitored_cluster(monitor: ClusterMonitor) -> Iterator[None]:
    """Watch the processes of Ray until the block ends."""
    global _current
    _current = monitor
    monitor.start()
    try:
        yield
    finally:
        monitor.stop()
        if monitor.error is None:
            _current = None


def is_cluster_lost() -> bool:
    """Return True if this process's Ray cluster is lost, so that nothing of the run can be reached."""
    return _current is not None and _current.error is not None


@contextlib.asynccontextmanager
async def component_stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    """A stack of callbacks that stop components. They are dropped if the cluster is lost."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            yield stack
        finally:
            drop_if_lost(stack)


def drop_if_lost(stack: contextlib.AsyncExitStack) -> None:
    """Before the callbacks of a stack are called: drop those that are left as soon as the cluster is lost."""
    if _current is not None:
        loop = asyncio.get_running_loop()
        _current.on_loss(lambda: loop.is_closed() or loop.call_soon_threadsafe(stack.pop_all))
    if is_cluster_lost():
        stack.pop_all()


def until_lost(work: Coroutine[object, object, T], remedy: str) -> Coroutine[object, object, T]:
    """Return the work of a run that is cancelled, and raises, if the cluster is lost meanwhile.

    Args:
        remedy: advice on how to continue, for the error.

    Raises:
        ClusterLostError: the cluster is lost, even if the work failed first because of that.
    """
    return work if _current is None else _until_lost(_current, work, remedy)


async def _until_lost(monitor: ClusterMonitor, work: Coroutine[object, object, T], remedy: str) -> T:
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    monitor.on_loss(lambda: loop.is_closed() or loop.call_soon_threadsafe(lost.set))
    working, losing = asyncio.ensure_future(work), asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait([working, losing], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not working.cancelled():
            if working.exception() is None:
                return working.result()
            await asyncio.to_thread(monitor.check)
    except asyncio.CancelledError:
        await cancel_all([working])
        raise
    finally:
        losing.cancel()
    if monitor.error is None:
        return working.result()
    working.cancel()
    await asyncio.wait([working], timeout=CLEAN_UP_TIMEOUT_S)
    raise ClusterLostError(f"{monitor.error}. {remedy}")


def watch_loss(remedy: str) -> Callable[[Callable[[BaseException], None]], None] | None:
    """Return the watch of `run_blocking` that raises the loss of the cluster if the event loop is blocked.

    A call of Ray may block it then, and ends the whole process after a minute.

    Args:
        remedy: as for `until_lost`.
    """
    if (monitor := _current) is None:
        return None

    def watch(fail: Callable[[BaseException], None]) -> None:
        def end() -> None:
            error = ClusterLostError(f"{monitor.error}. {remedy}")
            timer = threading.Timer(CLEAN_UP_TIMEOUT_S + EXIT_TIMEOUT_S, fail, [error])
            timer.daemon = True
            timer.start()

        monitor.on_loss(end)

    return watch
