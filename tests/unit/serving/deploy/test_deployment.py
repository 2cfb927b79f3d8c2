"""Deployment with other drivers on the cluster: what is shared, and who shuts Serve down."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_helpers import join
from ray.exceptions import ActorDiedError
from unit_helpers import until, within

from raylight.config import EngineConfig, LearnerConfig
from raylight.errors import ConfigError, EngineStartError, PortInUseError
from raylight.serving.deploy import deployment as module
from raylight.serving.deploy.deployment import Deployment
from raylight.weights.client import CoordinatorClient
from raylight.weights.coordinator import ReplicaCoordinator


@dataclass(frozen=True)
class Settings:
    """The replica's settings that a deployment reads."""

    config: EngineConfig
    app_name: str = "run"
    secret: str | None = "key"
    route: str | None = "/"
    coordinator: Any = None

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
    starting: list[str] = field(default_factory=list)
    """Replicas that still start."""
    locked: bool = False
    log: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def ingress_host(self, head: str, own_cluster: bool, timeout_s: float) -> Iterator[Any]:
        if self.locked:
            raise EngineStartError(f"another driver held the lock for {timeout_s:g} s")
        self.log.append("lock")
        yield SimpleNamespace(connection_limit=lambda: self.connections)
        self.log.append("unlock")

    def start_serve(
        self, host: str | None, port: int | None, machine: Any, timeout_s: float, deploy: Any
    ) -> tuple[str, int]:
        assert self.log[-1] == "lock"
        self.log.append("start")
        self.address = (host or "127.0.0.1", port or 8000)
        deploy(*self.address)
        return self.address

    def stop_serve(self, machine: Any) -> None:
        assert self.log[-1] == "lock"
        self.log.append("stop")

    def run_many(self, targets: list[Any], **_: Any) -> None:
        self.log.append(f"deploy {targets[0].name} at {targets[0].route_prefix}")
        self.applications.add(targets[0].name)

    def delete(self, name: str, _blocking: bool = True) -> None:
        if not _blocking:
            self.log.append("order the end")
        elif self.starting:
            raise TimeoutError("Some of these applications weren't deleted after 60s")
        else:
            self.applications.remove(name)

    def kill(self, replica: str) -> None:
        self.log.append(f"kill {replica}")
        self.starting.remove(replica)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    fakes = {
        "serve_http_options": lambda: cluster.address,
        "is_unused": lambda: cluster.raylights and not cluster.applications,
        "started_flags": lambda: {},
        "start_serve": cluster.start_serve,
        "stop_serve": cluster.stop_serve,
        "head_node": lambda: {"NodeID": "head", "NodeManagerAddress": "10.0.0.7"},
        "alive_nodes": lambda: [{}] * cluster.nodes,
        "is_joinable": lambda: True,
        "starting_replicas": lambda name: list(cluster.starting),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(module.ingress, name, fake)
    monkeypatch.setattr(module, "ingress_host", cluster.ingress_host)
    monkeypatch.setattr(module, "build_application", lambda settings, flags: None)
    monkeypatch.setattr(module.serve, "run_many", cluster.run_many)
    monkeypatch.setattr(module.serve, "delete", cluster.delete)
    monkeypatch.setattr(module.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(module.ray, "kill", cluster.kill)
    monkeypatch.setattr(module.serve, "status", lambda: SimpleNamespace(applications=cluster.applications))
    return cluster


def make(secret: str | None = "key", rollouts: int = 0, **config: Any) -> Deployment:
    settings: Any = Settings(EngineConfig(**{"start_timeout_s": 9.0, **config}), secret=secret)
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
    """One of two nodes may run all rollouts, and a node other than the head gets half of the connections."""
    cluster.address, cluster.connections, cluster.nodes = ("0.0.0.0", 8123), connections, nodes
    make(rollouts=100)._deploy()
    assert ("up to 100 rollouts" in caplog.text and "ulimit -n 1000" in caplog.text) == warned


@pytest.mark.parametrize(
    ("others", "raylights", "log"),
    [
        (set(), True, ["order the end", "lock", "stop", "unlock"]),
        ({"other"}, True, ["order the end"]),
        (set(), False, ["order the end"]),
    ],
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

    def delete(name: str, _blocking: bool = True) -> None:
        cluster.applications, cluster.address = set(), None
        raise error

    monkeypatch.setattr(module.serve, "delete", delete)
    make()._stop()
    assert cluster.log == []


def test_an_application_that_cannot_be_deleted_is_an_error(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.address, cluster.applications = ("127.0.0.1", 8000), {"run"}

    def delete(name: str, _blocking: bool = True) -> None:
        raise ActorDiedError

    monkeypatch.setattr(module.serve, "delete", delete)
    with pytest.raises(ActorDiedError):
        make()._stop()


def test_replicas_that_still_start_are_killed(cluster: Cluster) -> None:
    cluster.address, cluster.applications = ("127.0.0.1", 8000), {"run"}
    cluster.starting = ["SERVE_REPLICA::run#llm#1", "SERVE_REPLICA::run#llm#2"]
    make()._stop()
    assert cluster.log[:3] == ["order the end", *(f"kill SERVE_REPLICA::run#llm#{i}" for i in (1, 2))]
    assert not cluster.applications


@pytest.mark.parametrize(
    ("tries", "drain_timeout_s", "is_reported"), [(1, 60.0, False), (2, 60.0, True), (2, 100.0, False)]
)
def test_requests_that_take_long_are_waited_for_and_hide_no_error_of_the_run(
    tries: int,
    drain_timeout_s: float,
    is_reported: bool,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster.address, cluster.applications = ("127.0.0.1", 8000), {"run"}
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def delete(name: str, _blocking: bool = True) -> None:
        if _blocking and clock.now < 60 * tries:
            clock.now += 60
            raise TimeoutError("not deleted after 60s")
        if _blocking:
            cluster.applications.remove(name)

    monkeypatch.setattr(module.serve, "delete", delete)
    monkeypatch.setattr(module, "time", clock)
    make(drain_timeout_s=drain_timeout_s)._stop()
    assert bool(cluster.applications) == is_reported
    assert ("still deletes the application of this run: not deleted" in caplog.text) == is_reported


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


# resizing


@dataclass
class Replicas:
    """Replicas of a deployment, which Serve starts and stops at once while there is room."""

    coordinator: ReplicaCoordinator
    room: int = 100
    broken: bool = False
    targets: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    async def set(self, n: int) -> None:
        self.targets.append(n)
        while len(self.names) > n:
            await self.coordinator.leave(self.names.pop())
        while len(self.names) < min(n, self.room):
            if self.broken:
                await self.coordinator.report_start_failure("OSError: no model")
                return
            self.names.append(f"replica-{len(self.targets)}-{len(self.names)}")
            await join(self.coordinator, self.names[-1])


async def resizable(monkeypatch: pytest.MonkeyPatch, n: int, **config: Any) -> tuple[Deployment, Replicas]:
    """A deployment of `n` replicas in this process."""
    replicas = Replicas(ReplicaCoordinator())
    await replicas.set(n)
    settings: Any = Settings(EngineConfig(replicas=n, **config), coordinator=replicas.coordinator)
    client = CoordinatorClient(replicas.coordinator)  # does not follow it
    client.update(replicas.coordinator.snapshot())
    deployment = Deployment(settings, cluster_ends=False, replicas=client)
    loop = asyncio.get_running_loop()

    def set_replicas(n: int) -> None:
        asyncio.run_coroutine_threadsafe(replicas.set(n), loop).result()

    monkeypatch.setattr(deployment, "_set_replicas", set_replicas)
    monkeypatch.setattr(deployment, "_start_timeout_message", lambda failure: f"no room: {failure}.")
    return deployment, replicas


async def test_a_start_shows_what_it_does_and_how_long_that_took(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    deployment, replicas = await resizable(monkeypatch, 1)
    await replicas.set(0)
    deployment._show = shown.append
    monkeypatch.setattr(module, "QUICK_START_S", 0.0)
    async with within():
        waiting = asyncio.ensure_future(deployment._wait_for_replicas())
        for stage in ("importing", "loading weights", "loading weights"):
            await replicas.coordinator.report_start("a", stage, len(shown), False)
            await until(lambda stage=stage: bool(shown) and stage in shown[-1])
        await replicas.set(1)
        await waiting
    assert shown[:2] == ["the engine: importing (0 s)", "the engine: loading weights (0 s)"]
    assert shown[2].startswith("the engine is up after ")
    assert len(shown) == 3


async def test_a_start_without_progress_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, replicas = await resizable(monkeypatch, 1, start_timeout_s=0.05)
    await replicas.set(0)
    await replicas.coordinator.report_start("a", "compiling", 0, False)
    with pytest.raises(EngineStartError, match=r"no room: made no progress for 0.05 s \(compiling\)"):
        await deployment._wait_for_replicas()


async def test_replicas_are_added_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, replicas = await resizable(monkeypatch, 2, min_replicas=2)
    async with within():
        for n in (4, 2, 2, 3):
            await deployment.resize(n)
            assert deployment.size == n
        with pytest.raises(ConfigError, match="min_replicas=2 is more than replicas=1"):
            await deployment.resize(1)
    assert replicas.targets == [2, 4, 2, 2, 3]


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"room": 2}, "no room"), ({"broken": True}, "failed to start: OSError: no model")],
)
async def test_replicas_that_do_not_start_are_given_up(
    fault: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, replicas = await resizable(monkeypatch, 1, start_timeout_s=0.05, drain_timeout_s=0.05)
    vars(replicas).update(fault)
    async with within():
        with pytest.raises(EngineStartError, match=f"{message}.* goes on with 1 replica"):
            await deployment.resize(3)
        vars(replicas).update(room=9, broken=False)
        await deployment.resize(3)  # an earlier failure does not count
    assert replicas.targets == [1, 3, 1, 3]


@pytest.mark.parametrize(
    ("engine", "learner", "refused"),
    [
        ({"num_gpus": 0.4, "weight_transfer": "ipc"}, {"n": 2, "num_gpus": 0.6}, 3),
        ({"num_gpus": 0.5, "weight_transfer": "nccl"}, {"num_gpus": 1}, 2),
        ({"num_gpus": 0.4, "weight_transfer": "gloo"}, {"num_gpus": 0.6}, None),
        ({"num_gpus": 1, "weight_transfer": "nccl"}, {"num_gpus": 1}, None),
        ({}, {}, None),
    ],
)
async def test_no_replicas_are_added_that_the_transport_does_not_reach(
    engine: dict[str, Any], learner: dict[str, Any], refused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, replicas = await resizable(monkeypatch, 1, kind="vllm", **engine)
    deployment._learner = LearnerConfig(**learner)
    async with within():
        for n in (2, 3, 4):
            if refused is not None and n >= refused:
                with pytest.raises(ConfigError, match=f"was chosen for .*, and does not reach {n}; .*'gloo'"):
                    await deployment.resize(n)
            else:
                await deployment.resize(n)
        await deployment.resize(1)
    assert replicas.targets == [1, *range(2, refused or 5), 1]


async def test_replicas_that_serve_scales_by_load_have_no_number_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment, _ = await resizable(monkeypatch, 1, max_replicas=4)
    with pytest.raises(ConfigError, match=r"from engine.replicas=1 to engine.max_replicas=4"):
        await deployment.resize(2)
