"""Other programs use the cluster that a run has started, which listens on loopback only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray
import ray._private.worker as ray_worker
from ray_cluster import BIN, eventually

from raylight.trainer.cluster import ray_session

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
