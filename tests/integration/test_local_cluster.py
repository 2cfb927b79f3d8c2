"""Other programs use the cluster that a run has started, which listens on loopback only."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import ray._private.worker as ray_worker
from ray_cluster import BIN, eventually

from raylight.errors import ClusterStartError
from raylight.trainer.ray_session import local_cluster
from raylight.trainer.ray_session.connection import ray_session
from raylight.trainer.ray_session.local_cluster import start_local_cluster

JOB = "import ray; ray.init(); print('answer', ray.get(ray.remote(lambda: 42).remote()))"


@pytest.fixture
def local(no_processes_left: None) -> Iterator[str]:
    """A local cluster, by its address."""
    with ray_session("local", False):
        yield ray.get_runtime_context().gcs_address


def run(*command: str, **variables: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_raylight_ray_s_commands_and_jobs_reach_it(local: str) -> None:
    assert local.startswith("127.0.0.1:")
    found = json.loads(run(str(BIN / "raylight"), "doctor", "--json", "--address", local))["cluster"]
    assert found["error"] is None
    assert [node["address"] for node in found["nodes"]] == ["127.0.0.1"]
    status = (str(BIN / "ray"), "status", "--address", local)
    # the monitor writes the status a few seconds after the start
    eventually(
        lambda: "Active" in run(*status, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0"),
        60,
        "an active node in ray status",
    )
    dashboard = f"http://{ray_worker.get_dashboard_url()}"
    job = run(str(BIN / "ray"), "job", "submit", "--address", dashboard, "--", sys.executable, "-c", JOB)
    assert "answer 42" in job


@pytest.mark.slow
def test_a_raylet_that_ends_while_it_starts_is_reported(no_processes_left: None) -> None:
    began, ended = time.monotonic(), threading.Event()

    def end_raylet() -> None:
        while not ended.wait(0.01):
            for process in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() == "raylet":
                        process.kill()
                        return

    thread = threading.Thread(target=end_raylet)
    thread.start()
    try:
        with pytest.raises(ClusterStartError, match=r"its raylet ended; raylet.out says why.*logs are in"):
            start_local_cluster(280)
    finally:
        ended.set()
        thread.join(60)
    assert not ray.is_initialized()
    assert time.monotonic() - began < 140


LATE_AGENT = """
import os, sys, time
if any(part.endswith("dashboard/agent.py") for part in sys.orig_argv):
    try:
        os.remove({mark!r})
    except FileNotFoundError:
        pass
    else:
        time.sleep(20)
"""
"""A `sitecustomize` that delays Ray's next dashboard agent by more than the 15 s that a raylet waits."""


@pytest.fixture
def late_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "late"
    mark.touch()
    (tmp_path / "sitecustomize.py").write_text(LATE_AGENT.format(mark=str(mark)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")


def restarts(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [line for line in lines if "Starting it again" in line]


@pytest.fixture
def shut_down(no_processes_left: None) -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_late_agent_of_ray_delays_the_start_only(
    late_agent: None, shut_down: None, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    start_local_cluster(280)
    assert time.monotonic() - began > 20, "the agent was late"
    assert restarts(caplog) == []
    assert ray.get(ray.remote(lambda: 42).remote()) == 42


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_raylet_that_an_agent_s_delay_ended_is_started_again(
    late_agent: None, shut_down: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_cluster._LocalNode, "_announce_agents", lambda node: [])  # Ray's own wait
    start_local_cluster(280)
    (line,) = restarts(caplog)
    assert "attempt 2 of 3" in line
    log = Path(line.partition("Ray's logs are in ")[2].partition(". ")[0], "raylet.out").read_text()
    assert "Timed out waiting for file" in log
    assert ray.get(ray.remote(lambda: 42).remote()) == 42


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["metrics_agent_port", "dashboard_agent_listen_port"])
def test_another_start_follows_if_the_port_of_an_agent_is_taken_meanwhile(
    name: str, shut_down: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose, chosen = local_cluster._free_ports, []
    with socket.create_server(("", 0)) as taken:

        def free_ports(count: int) -> list[int]:
            ports = choose(count)
            if not chosen:
                ports[local_cluster.RAY_AGENT_PORTS.index(name)] = taken.getsockname()[1]
            chosen.append(ports)
            return ports

        monkeypatch.setattr(local_cluster, "_free_ports", free_ports)
        start_local_cluster(280)
    assert len(chosen) == 2
    assert len(restarts(caplog)) == 1
    assert ray.get(ray.remote(lambda: 42).remote()) == 42
