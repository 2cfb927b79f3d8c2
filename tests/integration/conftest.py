"""A Ray cluster that exists before raylight comes, and checks that a run leaves nothing on it."""

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
import pytest

# a shell gives its background jobs an ignored SIGINT, which would be inherited by the runs that are to be interrupted here
signal.signal(signal.SIGINT, signal.default_int_handler)

BIN = Path(sys.executable).parent
START_DEADLINE_S = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(check: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Ask an outside process's state until it holds; there is no event to wait for."""
    end = time.monotonic() + deadline_s
    while not check():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.2)


def marked(mark: dict[str, str]) -> list[psutil.Process]:
    """All processes with these variables in their environment: it is inherited even by those that outlive their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if mark.items() <= process.environ().items():
                found.append(process)
    return found


def kill(processes: list[psutil.Process]) -> list[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return processes


@dataclass(frozen=True)
class Cluster:
    address: str
    dashboard: str
    mark: dict[str, str]
    """In the environment of all its processes."""

    def leftovers(self) -> list[str]:
        """What runs on the cluster and belongs to some run of raylight. Needs a connection to the cluster."""
        from ray.util.state import list_actors, list_placement_groups

        actors = [
            f"actor {a.name}" for a in list_actors(filters=[("state", "!=", "DEAD")], limit=1000) if a.name
        ]
        groups = [
            f"group {g.name}" for g in list_placement_groups(filters=[("state", "!=", "REMOVED")], limit=1000)
        ]
        return sorted(actors + groups)

    def env(self) -> dict[str, str]:
        return {**os.environ, "RAY_ADDRESS": self.address}

    def assert_clean(self, allowed: tuple[str, ...] = ()) -> None:
        import ray

        with ray.init(address=self.address, log_to_driver=False):
            seen: list[str] = []

            def clean() -> bool:
                seen[:] = [item for item in self.leftovers() if not any(word in item for word in allowed)]
                return not seen

            try:
                eventually(clean, 20, "cleaning up")
            except AssertionError as error:
                raise AssertionError(f"left on the cluster: {seen}") from error
        if "haproxy" not in allowed:
            eventually(lambda: not self._proxies(), 20, "the end of HAProxy, whose ports the next one needs")

    def _proxies(self) -> list[psutil.Process]:
        found = []
        for process in marked(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "haproxy" in process.name():
                    found.append(process)
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """`ray start --head` with a dashboard, in a process of its own; RAY_ADDRESS points to it."""
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
    mark = {"RAYLIGHT_TEST_CLUSTER": str(port)}
    head = subprocess.Popen(
        command,
        env={**os.environ, **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert head.stdout
    output = ""
    for line in head.stdout:
        output += line
        if "--block" in line:
            break
    assert "--block" in output, output
    found = Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", mark)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = found.address
    try:
        yield found
    finally:
        eventually(lambda: not kill(marked(mark)), 30, "the end of the cluster")
        head.wait()
        note = Path(
            "/tmp/ray/ray_current_cluster"
        )  # Ray's, of the last cluster; only `ray stop` would remove it
        if note.exists() and note.read_text().endswith(f":{port}"):
            note.unlink()
        os.environ.pop("RAY_ADDRESS", None)
        if before:
            os.environ["RAY_ADDRESS"] = before


def running(*words: str) -> dict[int, str]:
    """Command lines of processes in which one of these words is, by number."""
    lines = {
        process.pid: " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    }
    return {pid: line for pid, line in lines.items() if any(word in line for word in words)}


@pytest.fixture
def no_processes_left() -> Iterator[None]:
    """Nothing of Ray or Serve that the test started outlives it."""
    words = ("raylet", "gcs_server", "haproxy", "ray::")
    before = running(*words)
    yield
    left: list[str] = []

    def clean() -> bool:
        left[:] = [line for pid, line in running(*words).items() if pid not in before]
        return not left

    try:
        eventually(clean, 20, "the end of all processes")
    except AssertionError as error:
        raise AssertionError(f"left on the machine: {left}") from error


@pytest.fixture
def proxies_of_the_killed(no_processes_left: None) -> Iterator[None]:
    """Ends the HAProxy that Ray leaves where a driver is killed outright, and with it the local cluster."""
    before = running("haproxy")
    yield
    for pid in running("haproxy"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if pid not in before and process.ppid() == 1:
                process.kill()
