"""Finding the cluster to join: one that does not answer is never waited for."""

import socket
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import ray

from raylight.errors import ConfigError
from raylight.trainer.ray_session import connection
from raylight.trainer.ray_session.connection import OWN_CLUSTER_HINT, ray_session, running_cluster


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Socket that keeps its port and accepts nothing, so that no other process can listen there."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def dead_port(silent: socket.socket) -> int:
    return silent.getsockname()[1]


@pytest.mark.parametrize("alive", [True, False])
def test_ray_s_note_of_a_crashed_cluster_is_not_believed(
    alive: bool, silent: socket.socket, dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: f"127.0.0.1:{dead_port}")
    if alive:
        silent.listen()
    assert running_cluster() == (f"127.0.0.1:{dead_port}" if alive else None)


def test_an_address_where_nothing_answers_is_an_error_at_once(
    dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the tests of one process share a connection to Ray, which would be used instead of the address
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection, "_disconnect", lambda: None)
    began = time.monotonic()
    with (
        pytest.raises(ConfigError, match="no Ray cluster is reachable"),
        ray_session(f"127.0.0.1:{dead_port}", False),
    ):
        pass
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("lost", [False, True])
def test_workers_that_outlive_a_cluster_of_this_process_are_killed(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE) as raylet:
        assert raylet.stdout
        worker = psutil.Process(int(raylet.stdout.readline()))
        node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=raylet)]})
        monkeypatch.setattr(connection.ray_worker, "_global_node", node)
        monkeypatch.setattr(connection, "is_cluster_lost", lambda: lost)
        monkeypatch.setattr(ray, "shutdown", raylet.kill)
        connection._disconnect()
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Addresses that are joined, without a cluster."""
    addresses: list[str | None] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **options: addresses.append(address))
    monkeypatch.setattr(connection, "driver_processes", lambda owns_cluster: [])
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.7:6379", get_session_name=str)
    )
    monkeypatch.setattr(connection, "mark_session", lambda name: None)
    monkeypatch.setattr(connection, "sweep", lambda: None)
    monkeypatch.setattr(connection.ray_worker, "get_dashboard_url", lambda: "127.0.0.1:8265")
    monkeypatch.setattr(connection, "is_reachable", lambda address: True)
    monkeypatch.setattr(connection, "running_cluster", lambda: "10.0.0.7:6379")
    monkeypatch.delenv(connection.JOB_VARIABLE, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


NAMED = "the Ray cluster at 10.0.0.7:6379 (1 node, 2 CPU; dashboard http://127.0.0.1:8265)"


@pytest.mark.parametrize(
    ("address", "variables", "used", "shown"),
    [
        (None, {}, None, f"note joined {NAMED}, found on this machine. {OWN_CLUSTER_HINT}"),
        (
            None,
            {"RAY_ADDRESS": "10.0.0.7:6379"},
            "10.0.0.7:6379",
            f"note joined {NAMED}, address from RAY_ADDRESS. {OWN_CLUSTER_HINT}",
        ),
        (None, {"RAY_ADDRESS": ""}, None, f"note joined {NAMED}, found on this machine. {OWN_CLUSTER_HINT}"),
        ("10.0.0.7:6379", {}, "10.0.0.7:6379", f"stage joined {NAMED}"),
        (
            "local",
            {"RAY_ADDRESS": "10.0.0.7:6379"},
            "local",
            f"stage started {NAMED}, which ends with this run",
        ),
        (
            None,
            {"RAY_ADDRESS": "10.0.0.7:6379", connection.JOB_VARIABLE: "{}"},
            "10.0.0.7:6379",
            f"stage joined {NAMED}, address from RAY_ADDRESS",
        ),
    ],
    ids=["found", "RAY_ADDRESS", "empty RAY_ADDRESS", "address", "local", "in a job"],
)
def test_a_run_names_its_cluster(
    address: str | None,
    variables: dict[str, str],
    used: str | None,
    shown: str,
    joined: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    with ray_session(address, False) as connection:
        connection.announce(
            lambda text: lines.append(f"note {text}"), lambda text: lines.append(f"stage {text}")
        )
    assert joined == [used]
    assert lines == [shown]


@pytest.mark.parametrize(
    ("address", "unread"),
    [
        ("local", "address='local' is not read: call ray.shutdown() first to use it"),
        ("10.0.0.7:6379", ""),
        (None, ""),
    ],
)
def test_an_existing_connection_is_used_and_another_address_is_noted(
    address: str | None, unread: str, joined: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    notes: list[str] = []
    stages: list[str] = []
    with ray_session(address, False) as connection:
        connection.announce(notes.append, stages.append)
    used = f"uses this process's connection to {NAMED}"
    assert (notes, stages) == (([f"{used}. {unread}"], []) if unread else ([], [used]))
    assert joined == []


def test_a_user_s_connection_prints_logs_again_after_a_loss(
    joined: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(connection.ray_worker, "_worker_logs_enabled", True)
    with ray_session(None, False):
        connection.ray_worker._worker_logs_enabled = False  # as at the loss of the cluster
    assert connection.ray_worker._worker_logs_enabled


def test_an_unreachable_ray_address_is_named_with_the_way_out(
    dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{dead_port}")
    with (
        pytest.raises(ConfigError, match=rf"{dead_port}' \(from RAY_ADDRESS\); start one.*--address local"),
        ray_session(None, False),
    ):
        pass
