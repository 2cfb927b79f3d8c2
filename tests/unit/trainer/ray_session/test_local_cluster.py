"""Start of a local cluster: its settings, and typed errors for what Ray raises."""

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray._private.node as ray_node
import ray._private.ray_constants as ray_constants
import ray._private.services as ray_services
from ray._raylet import AuthenticationTokenLoader

from raylight.errors import ClusterStartError
from raylight.trainer.ray_session import local_cluster
from raylight.trainer.ray_session.local_cluster import (
    RAY_AGENT_FAILURES,
    START_ATTEMPTS,
    START_TIMES,
    ensure_token,
    is_ray_agent_failure,
    loopback_address,
    start_local_cluster,
)

LATE_AGENT = (
    "[2026-11-27 21:27:47,034 C 7211 7211] (raylet) node_manager.cc:3576:  An unexpected system state has "
    "occurred. Check failed: statussetor3576.has_value() Timed out waiting for file "
    "/tmp/ray/session_x/metrics_agent_port_28dead19"
)
ENDED_AGENT = (
    "[2026-11-27 21:38:23,839 E 23427 23455] (raylet) agent_manager.cc:87: The raylet exited immediately "
    "because one Ray agent failed, agent_name = dashboard_agent."
)
OTHER_END = "[2026-11-27 21:38:23,839 C 1 1] (raylet) store.cc:1: Check failed: No space left on device"


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    for name in (
        *START_TIMES,
        "DASHBOARD_STARTUP_TIMEOUT_S",
        "ENABLE_WINDOWS_OR_OSX_CLUSTER",
        "worker_niceness",
    ):
        monkeypatch.delenv(f"RAY_{name}", raising=False)


def test_each_step_has_the_time_that_is_set_and_everything_listens_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def init(**options: Any) -> None:
        seen.update(options, environment=dict(os.environ))
        seen["dashboard"] = ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S
        seen["all interfaces"] = ray_constants.ENABLE_RAY_CLUSTER
        seen["node"] = ray_node.Node

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "7")
    before = dict(os.environ), vars(ray_constants).copy()
    start_local_cluster(240.0, log_to_driver=False)
    assert seen["address"] == "local"
    assert seen["log_to_driver"] is False
    assert (seen["dashboard"], seen["all interfaces"]) == (240.0, False)
    assert seen["node"] is not ray_node.Node
    assert isinstance(ray_node.Node, type), "restored"
    assert seen["environment"]["RAY_raylet_start_wait_time_s"] == "240"
    assert seen["environment"]["RAY_agent_register_timeout_ms"] == "7", "the user's value stays"
    assert seen["environment"]["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "for the drivers of jobs"
    assert seen["environment"]["RAY_worker_niceness"] == "0"
    assert (dict(os.environ), vars(ray_constants)) == before


def test_ray_still_has_the_constants_that_are_set() -> None:
    assert isinstance(ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S, (int, float))
    assert isinstance(ray_constants.ENABLE_RAY_CLUSTER, bool)


@pytest.mark.parametrize(
    ("interface", "named", "kept"),
    [("127.0.0.1", "127.0.0.1", True), ("127.0.0.1", "localhost", True), ("0.0.0.0", "127.0.0.1", False)],
)
def test_loopback_stays_the_address_of_a_cluster_that_listens_nowhere_else(
    interface: str, named: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "get_node_ip_address", lambda: "127.0.0.2")
    before = ray_constants.ENABLE_RAY_CLUSTER
    with socket.create_server((interface, 0)) as server:
        with loopback_address(f"{named}:{server.getsockname()[1]}"):
            assert ray_constants.ENABLE_RAY_CLUSTER is (before and not kept)
        assert ray_constants.ENABLE_RAY_CLUSTER is before


@pytest.mark.parametrize("address", [None, "auto", "10.0.0.7:6379"])
def test_other_addresses_are_ray_s_matter(address: str | None) -> None:
    before = ray_constants.ENABLE_RAY_CLUSTER
    with loopback_address(address):
        assert ray_constants.ENABLE_RAY_CLUSTER is before


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (
            1.0,
            r"Ray did not start: The current node timed out during startup\. The load of .* logs are in",
        ),
        (
            200.0,
            r"did not start within 180 s \(start_timeout_s\) a step, 200 s in all: .*raise start_timeout_s",
        ),
    ],
)
def test_every_exception_of_ray_is_typed_and_its_processes_end(
    seconds: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, seconds])
    monkeypatch.setattr(local_cluster.time, "monotonic", lambda: next(times))
    started: list[psutil.Process] = []

    def init(**options: Any) -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        started.append(psutil.Process(child.pid))
        raise Exception("The current node timed out during startup.")  # as `ray.init` does

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterStartError, match=expected):
        start_local_cluster(180.0)
    assert not started[0].is_running()


def test_an_interrupt_of_the_start_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(KeyboardInterrupt):
        start_local_cluster(180.0)


def test_a_second_interrupt_does_not_end_the_clean_up_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    def init(**options: Any) -> None:
        raise KeyboardInterrupt

    def shutdown() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        cleaned.append("Ray")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    with pytest.raises(KeyboardInterrupt):
        start_local_cluster(180.0)
    assert cleaned == ["Ray"]


@pytest.mark.parametrize(
    ("log", "expected"), [(LATE_AGENT, True), (ENDED_AGENT, True), (OTHER_END, False), ("", False)]
)
def test_the_log_of_the_raylet_decides_about_another_start(log: str, expected: bool) -> None:
    assert (
        is_ray_agent_failure(f"[.. I 1 1] (raylet) main.cc:1: starting\n{log}\n*** StackTrace ***")
        is expected
    )


def test_the_raylet_still_writes_the_texts_that_are_looked_for() -> None:
    with (
        open(ray_services.RAYLET_EXECUTABLE, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary,
    ):
        assert [text for text in RAY_AGENT_FAILURES if binary.find(text.encode()) < 0] == []


def failing_start(tmp_path: Path, log: str, fails: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the first starts fail with a raylet that wrote this log; return the folders of all sessions."""
    sessions: list[str] = []

    def init(**options: Any) -> None:
        node = object.__new__(local_cluster._LocalNode)
        ray_node.Node.args[0].append(node)  # type: ignore[attr-defined]
        logs = tmp_path / f"session_{len(sessions)}"
        logs.mkdir()
        node._logs_dir = str(logs)
        sessions.append(str(logs))
        (logs / "raylet.out").write_text(log)
        if len(sessions) <= fails:
            raise RuntimeError("its raylet ended; raylet.out says why")

    monkeypatch.setattr(ray, "init", init)
    return sessions


def test_a_start_that_an_agent_of_ray_delayed_is_repeated_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = failing_start(tmp_path, LATE_AGENT, START_ATTEMPTS - 1, monkeypatch)
    start_local_cluster(180.0)
    assert len(sessions) == 3
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(". ")[2] for line in lines] == [
        "Starting it again, attempt 2 of 3",
        "Starting it again, attempt 3 of 3",
    ]
    assert all(f"logs are in {logs}" in line for logs, line in zip(sessions, lines, strict=False))


@pytest.mark.parametrize(("log", "attempts"), [(ENDED_AGENT, START_ATTEMPTS), (OTHER_END, 1)])
def test_the_error_of_the_last_start_names_the_logs_of_its_session(
    log: str, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = failing_start(tmp_path, log, 9, monkeypatch)
    with pytest.raises(ClusterStartError) as caught:
        start_local_cluster(180.0)
    assert len(sessions) == attempts
    assert f"Ray's logs are in {sessions[-1]}" in str(caught.value)


def test_the_ports_of_agents_are_free_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(local_cluster, "RAY_AGENT_PORT_RANGE", [number, *range(20_100, 20_150)])
        ports = [port for _ in range(100) for port in [local_cluster._free_ports(4)]]
    assert all(len(set(chosen)) == 4 and number not in chosen for chosen in ports)


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process for which Ray has no token yet."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    yield
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize("home", ["/dev/null", "/proc/nobody"])
def test_without_a_home_folder_the_cluster_has_a_token_of_its_own(
    home: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", home)
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    assert not loader.has_token(ignore_auth_mode=True)
    ensure_token()
    assert loader.has_token(ignore_auth_mode=True)
    assert len(os.environ.pop("RAY_AUTH_TOKEN")) >= 32
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the home folder cannot be written (")


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize("variables", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "1" * 64}])
def test_ray_saves_its_token_itself_wherever_it_can(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path) if not variables else "/dev/null")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    AuthenticationTokenLoader.instance().reset_cache()
    ensure_token()
    assert os.environ.get("RAY_AUTH_TOKEN") == variables.get("RAY_AUTH_TOKEN")


@pytest.mark.parametrize(("available", "counted"), [(1, 2), (2, 2), (64, 64)])
def test_a_cluster_has_cpus_for_all_parts_of_a_run(
    available: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(local_cluster, "available_cpus", lambda: available)
    monkeypatch.setattr(ray, "init", lambda **options: seen.update(options))
    start_local_cluster(180.0)
    assert seen["num_cpus"] == counted
    start_local_cluster(180.0, num_cpus=1)
    assert seen["num_cpus"] == 1
