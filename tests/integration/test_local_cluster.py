"""Other programs use the cluster that a run has started, which listens on loopback only."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import ray
import ray._private.worker as ray_worker
from ray_cluster import BIN, eventually

from raylight.errors import ClusterStartError
from raylight.trainer.cluster import ray_session
from raylight.trainer.local_cluster import start_local_cluster

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
