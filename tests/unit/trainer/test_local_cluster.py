"""Start of a local cluster: its settings, and typed errors for what Ray raises."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest
import ray
import ray._private.parameter as ray_parameter
import ray._private.ray_constants as ray_constants

from raylight.errors import ClusterStartError
from raylight.trainer import local_cluster
from raylight.trainer.local_cluster import START_TIMES, loopback_address, start_local_cluster


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for name in (*START_TIMES, "DASHBOARD_STARTUP_TIMEOUT_S", "ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.delenv(f"RAY_{name}", raising=False)


def test_each_step_has_the_time_that_is_set_and_everything_listens_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def init(**options: Any) -> None:
        seen.update(options, environment=dict(os.environ))
        seen["dashboard"] = ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S
        seen["all interfaces"] = ray_constants.ENABLE_RAY_CLUSTER
        parameters = ray_parameter.RayParams()
        seen["processes"] = parameters.dashboard_agent_listen_port, parameters.include_log_monitor

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "7")
    before = dict(os.environ), vars(ray_constants).copy()
    start_local_cluster(240.0, log_to_driver=False)
    assert seen["address"] == "local"
    assert seen["log_to_driver"] is False
    assert (seen["dashboard"], seen["all interfaces"]) == (240.0, False)
    assert seen["processes"] == (0, False)
    assert isinstance(ray_parameter.RayParams, type), "restored"
    assert seen["environment"]["RAY_raylet_start_wait_time_s"] == "240"
    assert seen["environment"]["RAY_agent_register_timeout_ms"] == "7", "the user's value stays"
    assert seen["environment"]["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "for the drivers of jobs"
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
