"""Deployment beside other drivers of a cluster: what is shared, and who shuts Serve down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raylight.errors import EngineStartError, PortInUseError
from raylight.serving.deploy import deployment as module
from raylight.serving.deploy.deployment import Deployment


@dataclass(frozen=True)
class Settings:
    """Those of the replica's settings that a deployment reads."""

    config: Any
    app_name: str = "run"
    secret: str | None = "key"
    route: str | None = "/"

    @property
    def prefix(self) -> str:
        return self.route or f"/{self.app_name}"


@dataclass
class Cluster:
    """Serve of a cluster, and the lock of its ingress."""

    address: tuple[str, int] | None = None
    raylights: bool = True
    connections: int | None = None
    nodes: int = 1
    applications: set[str] = field(default_factory=set)
    locked: bool = False
    log: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def ingress_host(self, head: str, own_cluster: bool, timeout_s: float) -> Iterator[Any]:
        if self.locked:
            raise EngineStartError(f"another driver held the lock for {timeout_s:g} s")
        self.log.append("lock")
        yield SimpleNamespace(connection_limit=lambda: self.connections)
        self.log.append("unlock")

    def start_serve(self, host: str | None, port: int | None, *_: Any) -> tuple[str, int]:
        assert self.log[-1] == "lock"
        self.log.append("start")
        self.address = (host or "127.0.0.1", port or 8000)
        return self.address

    def stop_serve(self, machine: Any) -> None:
        assert self.log[-1] == "lock"
        self.log.append("stop")

    def run_many(self, targets: list[Any], **_: Any) -> None:
        self.log.append(f"deploy {targets[0].name} at {targets[0].route_prefix}")
        self.applications.add(targets[0].name)

    def delete(self, name: str) -> None:
        self.applications.remove(name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    fakes = {
        "serve_http_options": lambda: cluster.address,
        "is_unused": lambda: cluster.raylights and not cluster.applications,
        "is_raylights": lambda: cluster.raylights,
        "start_serve": cluster.start_serve,
        "stop_serve": cluster.stop_serve,
        "head_node": lambda: {"NodeID": "head", "NodeManagerAddress": "10.0.0.7"},
        "alive_nodes": lambda: [{}] * cluster.nodes,
        "is_joinable": lambda: True,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(module.ingress, name, fake)
    monkeypatch.setattr(module, "ingress_host", cluster.ingress_host)
    monkeypatch.setattr(module, "build_application", lambda settings, raylights: None)
    monkeypatch.setattr(module.serve, "run_many", cluster.run_many)
    monkeypatch.setattr(module.serve, "delete", cluster.delete)
    monkeypatch.setattr(module.serve, "status", lambda: SimpleNamespace(applications=cluster.applications))
    return cluster


def make(secret: str | None = "key", rollouts: int = 0, **config: Any) -> Deployment:
    values = {"host": None, "port": None, "start_timeout_s": 9.0, **config}
    settings: Any = Settings(SimpleNamespace(**values), secret=secret)
    return Deployment(settings, cluster_ends=False, rollouts=rollouts)


def test_the_first_driver_starts_serve_and_deploys_under_the_lock(cluster: Cluster) -> None:
    assert make()._deploy() == "http://127.0.0.1:8000"
    assert cluster.log == ["lock", "start", "deploy run at /", "unlock"]


def test_a_second_driver_joins_serve_and_leaves_the_root_to_the_first(cluster: Cluster) -> None:
    cluster.address, cluster.applications = ("0.0.0.0", 8123), {"other"}
    assert make()._deploy() == "http://10.0.0.7:8123/run"
    assert cluster.log == ["lock", "deploy run at /run", "unlock"]


@pytest.mark.parametrize(
    ("secret", "config", "error", "message"),
    [
        (None, {}, EngineStartError, "anyone could use the model; set an API key"),
        ("key", {"port": 9000}, PortInUseError, "already runs on port 8123"),
    ],
)
def test_a_serve_that_does_not_fit_is_not_joined(
    secret: str | None,
    config: dict[str, Any],
    error: type[Exception],
    message: str,
    cluster: Cluster,
) -> None:
    cluster.address, cluster.applications = ("0.0.0.0", 8123), {"other"}
    with pytest.raises(error, match=message):
        make(secret, **config)._deploy()
    assert cluster.applications == {"other"}


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_serve_on_loopback_does_not_fit_a_cluster_that_grows(
    host: str | None, nodes: int, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.address, cluster.nodes = ("127.0.0.1", 8123), nodes
    if nodes == 1:
        assert make(host=host)._deploy() == "http://127.0.0.1:8123"
        assert ("join the cluster later cannot reach the model" in caplog.text) == (host is None)
        return
    with pytest.raises(EngineStartError, match="agents on other nodes cannot reach"):
        make(host=host)._deploy()


@pytest.mark.parametrize(
    ("connections", "nodes", "warned"),
    [(None, 1, False), (100, 1, False), (99, 1, True), (199, 2, True), (100, 3, False)],
)
def test_fewer_connections_than_rollouts_are_a_warning(
    connections: int | None, nodes: int, warned: bool, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two nodes, one may run all rollouts, and a node other than the head gets half of the connections."""
    cluster.address, cluster.connections, cluster.nodes = ("0.0.0.0", 8123), connections, nodes
    make(rollouts=100)._deploy()
    assert ("up to 100 rollouts" in caplog.text and "ulimit -n 1000" in caplog.text) == warned


@pytest.mark.parametrize(
    ("others", "raylights", "log"),
    [(set(), True, ["lock", "stop", "unlock"]), ({"other"}, True, []), (set(), False, [])],
    ids=["last", "not the last", "another program's Serve"],
)
def test_the_last_run_shuts_serve_down(
    others: set[str], raylights: bool, log: list[str], cluster: Cluster
) -> None:
    cluster.address, cluster.applications = ("127.0.0.1", 8000), {"run", *others}
    cluster.raylights = raylights
    make()._stop()
    assert cluster.applications == others
    assert cluster.log == log


@pytest.mark.parametrize("error", [ActorDiedError(), ValueError("no actor SERVE_CONTROLLER_ACTOR")])
def test_another_driver_shuts_serve_down_first(
    error: Exception, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's client asks for the state of a deleted application until it is gone, once per second."""
    cluster.address, cluster.applications = ("127.0.0.1", 8000), {"run"}

    def delete(name: str) -> None:
        cluster.applications, cluster.address = set(), None
        raise error

    monkeypatch.setattr(module.serve, "delete", delete)
    make()._stop()
    assert cluster.log == []


def test_an_application_that_cannot_be_deleted_is_an_error(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.address, cluster.applications = ("127.0.0.1", 8000), {"run"}

    def delete(name: str) -> None:
        raise ActorDiedError

    monkeypatch.setattr(module.serve, "delete", delete)
    with pytest.raises(ActorDiedError):
        make()._stop()


def test_a_driver_that_hangs_keeps_no_other_from_ending(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.address, cluster.applications, cluster.locked = ("127.0.0.1", 8000), {"run"}, True
    make()._stop()
    assert not cluster.applications
    assert "Ray Serve stays on the cluster: another driver held the lock for 9 s" in caplog.text


def test_a_run_that_was_stopped_starts_nothing(cluster: Cluster) -> None:
    deployment = make()
    deployment._stop()
    with pytest.raises(EngineStartError, match="the run was stopped before its engine started"):
        deployment._deploy()
    assert "start" not in cluster.log
