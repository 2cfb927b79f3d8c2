"""A driver whose Ray cluster ends says so in one line, and exits by itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_cluster import Cluster, processes_with, ray_head

PROGRAM = Path(__file__).with_name("lost_cluster.py")
EXIT_S = 60.0


@contextlib.contextmanager
def driver(address: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run the program until it has started its actor; kill it if it does not exit."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "started\n"
            yield process
        finally:
            process.kill()


def kill(processes: list[psutil.Process], name: str) -> None:
    (victim,) = [process for process in processes if process.name() == name]
    victim.kill()


def assert_error(process: subprocess.Popen[str], name: str) -> None:
    output, errors = process.communicate(timeout=EXIT_S)
    assert process.returncode == 1, errors
    # Ray may report the end of its raylet before the driver ends
    assert re.sub(r"\x1b\[\d+m", "", output).startswith("(raylet) ") or not output
    lines = errors.splitlines()
    assert re.fullmatch(
        rf"error: the run's Ray cluster is lost: its {name} at \S+ has ended .*Run it again\.", lines[-1]
    )
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_local_cluster(name: str) -> None:
    with driver("local") as process:
        kill(psutil.Process(process.pid).children(recursive=True), name)
        assert_error(process, name)


@pytest.fixture
def own_head() -> Iterator[Cluster]:
    with ray_head() as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_cluster_that_was_joined(name: str, own_head: Cluster) -> None:
    """`ray start --block` ends the other processes of its node when one of them has ended."""
    with driver(own_head.address, RAY_gcs_rpc_server_reconnect_timeout_s="20") as process:
        kill(processes_with(own_head.environment), name)
        assert_error(process, r"(raylet|gcs_server)")


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_driver_whose_gcs_ends_while_serve_starts_ends_with_sigterm(tmp_path: Path) -> None:
    """The thread that starts Serve is blocked, and Serve would start a cluster for itself."""
    command = [sys.executable, "-m", "raylight.cli", "quickstart", "--output-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout
            assert any("starting the engine" in line for line in process.stdout)
            kill(psutil.Process(process.pid).children(recursive=True), "gcs_server")
            process.terminate()
            output, _ = process.communicate(timeout=EXIT_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM or "gcs_server" in output
    assert output.count("started the Ray cluster") == 0
