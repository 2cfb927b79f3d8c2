"""A Ray cluster in processes of its own, shared by all integration tests of one pytest process, and checks that nothing stays behind.

Every process that a test starts inherits SESSION from the environment, so the checks see the processes of this pytest process
only. Two pytest processes (`pytest -n 2`), or two checkouts, can therefore test on one machine at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
DEADLINE_S = 60.0
"""Seconds within which the processes of a run that is over have ended."""
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File in which Ray keeps the address of the cluster that `ray start` started last. Only `ray stop` would remove it."""
SESSION = {"RAYLIGHT_TEST_SESSION": str(os.getpid())}
"""Environment variable of all processes that this pytest process starts, directly or through others."""
CLUSTER_VARIABLE = "RAYLIGHT_TEST_CLUSTER"
"""Environment variable of all processes of a cluster that `ray_head` started."""
RAY_PROCESSES = ("raylet", "gcs_server", "haproxy", "ray::")
"""Parts of the command lines of Ray's and Serve's processes."""


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(check: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Poll a condition of other processes, for which no event exists.

    Raises:
        AssertionError: the condition did not hold within `deadline_s` seconds; `what` names it in the message.
    """
    end = time.monotonic() + deadline_s
    while not check():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.2)


def processes_with(environment: dict[str, str]) -> list[psutil.Process]:
    """Return the processes that have these environment variables. Orphans count: they inherited the environment too."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if environment.items() <= process.environ().items():
                processes.append(process)
    return processes


def ray_processes(names: tuple[str, ...] = RAY_PROCESSES) -> dict[int, str]:
    """Return the command lines of Ray's and Serve's processes that this pytest process started, by process ID.

    Those of the shared cluster are left out: it starts and ends idle workers at any time.
    """
    found = {}
    for process in processes_with(SESSION):
        with contextlib.suppress(psutil.NoSuchProcess):
            if CLUSTER_VARIABLE in process.environ():
                continue
            line = " ".join(process.cmdline())
            if any(name in line for name in names):
                found[process.pid] = line
    return found


@contextlib.contextmanager
def assert_no_new_ray_processes(deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Assert that Ray's and Serve's processes that start inside the block end within `deadline_s` seconds after it."""
    before = ray_processes()
    yield
    left: list[str] = []

    def clean() -> bool:
        left[:] = [line for pid, line in ray_processes().items() if pid not in before]
        return not left

    try:
        eventually(clean, deadline_s, "the end of all processes")
    except AssertionError as error:
        raise AssertionError(f"left on the machine: {left}") from error


@dataclass(frozen=True)
class Cluster:
    """A running Ray cluster of one node with two CPUs.

    Attributes:
        address: of the GCS, as HOST:PORT.
        dashboard: URL of the dashboard, which takes jobs.
        environment: variables in the environment of all processes of the cluster.
    """

    address: str
    dashboard: str
    environment: dict[str, str]

    def env(self) -> dict[str, str]:
        """Return the environment for a driver in another process that joins this cluster."""
        return {**os.environ, "RAY_ADDRESS": self.address}

    @contextlib.contextmanager
    def connected(self, import_path: Path | None = None, **env_vars: str) -> Iterator[None]:
        """Connect this process as a driver.

        Args:
            import_path: folder from which the workers import modules, besides that of this module.
            env_vars: further environment variables of the workers.
        """
        import ray

        paths = [import_path, Path(__file__).parent] if import_path else [Path(__file__).parent]
        env_vars["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        ray.init(address=self.address, log_to_driver=False, runtime_env={"env_vars": env_vars})
        try:
            yield
        finally:
            ray.shutdown()

    def leftovers(self) -> list[str]:
        """Return the named actors and placement groups on the cluster. Needs a connection to it."""
        from ray.util.state import list_actors, list_placement_groups

        actors = list_actors(filters=[("state", "!=", "DEAD")], limit=1000)
        groups = list_placement_groups(filters=[("state", "!=", "REMOVED")], limit=1000)
        return sorted([f"actor {a.name}" for a in actors if a.name] + [f"group {g.name}" for g in groups])

    def assert_clean(self, allowed: tuple[str, ...] = ()) -> None:
        """Assert that no run left a named actor, a placement group or HAProxy behind.

        Args:
            allowed: parts of the names of what may stay.
        """
        seen: list[str] = []

        def clean() -> bool:
            seen[:] = [item for item in self.leftovers() if not any(word in item for word in allowed)]
            return not seen

        with self.connected():
            try:
                eventually(clean, DEADLINE_S, "cleaning up")
            except AssertionError as error:
                self._clean()  # so that only this test fails
                raise AssertionError(f"left on the cluster: {seen}") from error
        if "haproxy" not in allowed:
            eventually(
                lambda: not self._proxies(), DEADLINE_S, "the end of HAProxy, whose ports the next one needs"
            )

    def stop_serve(self) -> None:
        """Shut down a Serve whose driver is gone."""
        from ray import serve

        with self.connected():
            serve.shutdown()

    def _clean(self) -> None:
        """Remove Serve and all named actors."""
        import ray
        from ray import serve

        serve.shutdown()
        for actor in ray.util.list_named_actors(all_namespaces=True):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(**actor))

    def _proxies(self) -> list[psutil.Process]:
        found = []
        for process in processes_with(self.environment):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "haproxy" in process.name():
                    found.append(process)
        return found


@contextlib.contextmanager
def ray_head() -> Iterator[Cluster]:
    """Run `ray start --head` with a dashboard until the block ends."""
    port, dashboard = free_port(), free_port()
    command = [
        str(BIN / "ray"),
        "start",
        "--head",
        "--block",
        "--num-cpus=2",
        f"--port={port}",
        f"--dashboard-port={dashboard}",
        "--include-dashboard=true",
        "--disable-usage-stats",
        f"--dashboard-agent-listen-port={free_port()}",
    ]
    subprocess.run([str(BIN / "ray"), "get-auth-token", "--generate"], check=True, capture_output=True)
    environment = {CLUSTER_VARIABLE: str(port)}
    head = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for_start(head)
        yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environment)
    finally:
        eventually(lambda: not _kill(processes_with(environment)), DEADLINE_S, "the end of the cluster")
        head.wait()
        if CURRENT_CLUSTER.exists() and CURRENT_CLUSTER.read_text().endswith(f":{port}"):
            CURRENT_CLUSTER.unlink()


def _wait_for_start(head: subprocess.Popen[str]) -> None:
    assert head.stdout
    output = ""
    for line in head.stdout:
        output += line
        if "--block" in line:
            return
    raise AssertionError(f"ray start failed: {output}")


def _kill(processes: list[psutil.Process]) -> list[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return processes


def kill_orphaned_proxies(before: dict[int, str]) -> None:
    """Kill the HAProxy processes that started after `before` was taken and whose parents are gone."""
    for pid in ray_processes(("haproxy",)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if pid not in before and process.ppid() == 1:
                process.kill()


def restore_interrupts() -> None:
    """Let SIGINT interrupt this process and its children. A shell starts background jobs with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
