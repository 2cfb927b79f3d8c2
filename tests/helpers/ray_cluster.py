"""Ray cluster shared by the tests of one pytest process, and checks that tests leave nothing behind.

Every process that a test starts inherits SESSION from the environment, so the checks see only processes of
this pytest process. Two pytest processes (`pytest -n 2`) or two checkouts can therefore test on one machine
in parallel.
"""

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
STARTS = 4
"""Starts of a cluster before a test fails."""
DEADLINE_S = 60.0
"""Seconds within which the processes of a finished run must end."""
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File with the address of the cluster that `ray start` started last. Only `ray stop` removes it."""
SESSION = {"RAYLIGHT_TEST_SESSION": str(os.getpid())}
"""Environment variable of all processes that this pytest process starts, directly or indirectly."""
CLUSTER_VARIABLE = "RAYLIGHT_TEST_CLUSTER"
"""Environment variable of all processes of a cluster that several tests share."""
RAY_PROCESSES = ("raylet", "gcs_server", "haproxy", "ray::")
"""Parts of the command lines of Ray's and Serve's processes."""


def free_port() -> int:
    """Return a free port of the loopback interface. Nothing reserves it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(check: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Poll a condition of other processes until it is true. No event exists for it.

    Raises:
        AssertionError: the condition was not true within `deadline_s` seconds; the message contains `what`.
    """
    end = time.monotonic() + deadline_s
    while not check():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.2)


def processes_with(environment: dict[str, str]) -> list[psutil.Process]:
    """Return the processes that have these environment variables, orphans included."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if environment.items() <= process.environ().items():
                processes.append(process)
    return processes


def ray_processes(names: tuple[str, ...] = RAY_PROCESSES) -> dict[int, str]:
    """Return the processes of Ray and Serve that this pytest process started: command lines by process ID.

    Processes of shared clusters are excluded: they start and stop idle workers, and reload HAProxy, at any
    time.
    """
    lines = {}
    for process in processes_with(SESSION):
        with contextlib.suppress(psutil.NoSuchProcess):
            if CLUSTER_VARIABLE in process.environ():
                continue
            line = " ".join(process.cmdline())
            if any(name in line for name in names):
                lines[process.pid] = line
    return lines


def end_orphans() -> subprocess.Popen[bytes]:
    """Start a process that kills what this pytest process has started, if this one dies without its clean-up.

    Its input is a pipe that ends with this process, however that ends.
    """
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=os.environ | SESSION)


@contextlib.contextmanager
def assert_no_new_ray_processes(
    deadline_s: float = DEADLINE_S, names: tuple[str, ...] = RAY_PROCESSES
) -> Iterator[None]:
    """Assert that processes of Ray and Serve that the block starts end within `deadline_s` seconds.

    Args:
        names: parts of the command lines of the processes.
    """
    before = ray_processes(names)
    yield
    left: list[str] = []

    def clean() -> bool:
        left[:] = [line for pid, line in ray_processes(names).items() if pid not in before]
        return not left

    try:
        eventually(clean, deadline_s, "the end of all processes")
    except AssertionError as error:
        raise AssertionError(f"left on the machine: {left}") from error


@dataclass(frozen=True)
class Cluster:
    """Running Ray cluster of one node with two CPUs.

    Attributes:
        address: address of the GCS, as HOST:PORT.
        dashboard: URL of the dashboard, which accepts jobs.
        environment: environment variables of all processes of the cluster.
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
            import_path: folder from which the workers import modules, besides this module's folder.
            env_vars: additional environment variables of the workers.
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
            allowed: parts of the names of actors and groups that may remain.
        """
        remaining: list[str] = []

        def clean() -> bool:
            remaining[:] = [item for item in self.leftovers() if not any(word in item for word in allowed)]
            return not remaining

        with self.connected():
            try:
                eventually(clean, DEADLINE_S, "cleaning up")
            except AssertionError as error:
                self._clean()  # later tests must not fail too
                raise AssertionError(f"left on the cluster: {remaining}") from error
        if "haproxy" not in allowed:
            eventually(
                lambda: not self._proxies(),
                DEADLINE_S,
                "the end of HAProxy, whose ports the next proxy needs",
            )

    def stop_serve(self) -> None:
        """Shut down Serve after its driver has ended."""
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
        proxies = []
        for process in processes_with(self.environment):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "haproxy" in process.name():
                    proxies.append(process)
        return proxies


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
    if not (Path.home() / ".ray" / "auth_token").exists():
        subprocess.run([str(BIN / "ray"), "get-auth-token", "--generate"], check=True, capture_output=True)
    environment = {CLUSTER_VARIABLE: str(port)}
    head = None
    try:
        head = _start(command, environment)
        yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environment)
    finally:
        eventually(lambda: not _kill(processes_with(environment)), DEADLINE_S, "the end of the cluster")
        if head is not None:
            head.wait()
        if CURRENT_CLUSTER.exists() and CURRENT_CLUSTER.read_text().endswith(f":{port}"):
            CURRENT_CLUSTER.unlink()


@contextlib.contextmanager
def restored_cluster_file() -> Iterator[None]:
    """Restore, at the end, the file with the address of the cluster that was started last: a cluster of
    `ray.cluster_utils` overwrites it."""
    before = CURRENT_CLUSTER.read_text() if CURRENT_CLUSTER.exists() else None
    try:
        yield
    finally:
        if before is not None:
            CURRENT_CLUSTER.write_text(before)
        else:
            CURRENT_CLUSTER.unlink(missing_ok=True)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Run `ray start` until the node is up. It is started again, because Ray's own limits (30 seconds for the
    node, 60 for the dashboard) are too short on a busy machine."""
    output = ""
    for _ in range(STARTS):
        head = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert head.stdout
        for line in head.stdout:
            output += line
            if "--block" in line:
                return head
        head.wait()
        eventually(lambda: not _kill(processes_with(environment)), DEADLINE_S, "the end of the cluster")
    raise AssertionError(f"ray start failed: {output}")


def _kill(processes: list[psutil.Process]) -> list[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return processes


def kill_orphaned_proxies(before: dict[int, str]) -> None:
    """Kill orphaned HAProxy processes that are not in `before`, an earlier result of `ray_processes`."""
    for pid in ray_processes(("haproxy",)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if pid not in before and process.ppid() == 1:
                process.kill()


def restore_interrupts() -> None:
    """Restore SIGINT in this process and its children. Shells start background jobs with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":  # what `end_orphans` starts
    sys.stdin.read()
    session = {"RAYLIGHT_TEST_SESSION": os.environ["RAYLIGHT_TEST_SESSION"]}
    while _kill([process for process in processes_with(session) if process.pid != os.getpid()]):
        time.sleep(0.2)
