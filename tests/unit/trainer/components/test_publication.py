"""Publications during updates, and replicas that join, which receive the weights as soon as possible."""

import asyncio
from typing import Any

import pytest
from coordinator_helpers import Coordinator, RunningReplica, SpyEngine, send, turns
from unit_helpers import within

from raylight.config import MODEL_NAME, EngineConfig
from raylight.engines.protocol import LoraAdapter
from raylight.errors import (
    EngineStartError,
    LearnerError,
    LearnerLostError,
    MismatchError,
    WeightSyncError,
)
from raylight.trainer.components.publication import Publications
from raylight.weights.client import CoordinatorClient
from raylight.weights.orders import Snapshot


class Learners:
    """They serve all replicas that wait, unless they fail."""

    def __init__(self, keeper: CoordinatorClient) -> None:
        self.keeper = keeper
        self.failure: Exception | None = None
        self.served: list[tuple[int, list[str]]] = []
        self.called = asyncio.Event()

    async def publish_weights(self, version: int, token: str, settings: Any) -> None:
        self.called.set()
        if self.failure:
            raise self.failure
        self.served.append((version, sorted(self.keeper.lacking)))
        self.keeper.update(Snapshot(1))


class Bench:
    """Publications whose learners hold version `held`, while version 3 is the last published one."""

    def __init__(self) -> None:
        self.keeper = CoordinatorClient(None, 0.0, print)
        self.learners: Any = Learners(self.keeper)
        engine = EngineConfig(kind="transformers")
        self.publications = Publications(
            self.learners, self.keeper, engine, 5.0, probe=[1, 2], tolerance=1e-9
        )
        self.publications.published = self.held = 3
        self.task = asyncio.create_task(self.publications.serve_joined(lambda: self.held))

    def join(self, *replicas: str) -> None:
        self.keeper.update(Snapshot(1, lacking=frozenset(replicas)))

    async def turns(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


async def test_a_replica_that_joins_is_served_each_time() -> None:
    async with within():
        bench = Bench()
        for _ in range(2):  # under the same name too, after a restart of the coordinator
            bench.join("a", "b")
            await bench.turns()
        assert bench.learners.served == [(3, ["a", "b"])] * 2
        bench.task.cancel()


async def test_a_replica_waits_until_restarted_learners_have_returned_to_the_version() -> None:
    async with within():
        bench = Bench()
        bench.held = 1
        bench.join("a")
        await bench.turns()
        assert not bench.learners.served
        bench.held = 3
        bench.publications.notice_version()
        await bench.turns()
        assert bench.learners.served == [(3, ["a"])]
        bench.task.cancel()


@pytest.mark.parametrize("error", [LearnerLostError("a rank died"), LearnerError("a bug")])
async def test_a_failure_of_the_learners_is_raised_and_the_replica_is_served_after_it(
    error: LearnerError,
) -> None:
    async with within():
        bench = Bench()
        bench.learners.failure = error
        bench.join("a")
        with pytest.raises(LearnerError, match=str(error)):
            await bench.publications.wait_for_failure()
        bench.learners.failure = None
        await bench.turns()
        assert not bench.learners.served  # until they have been restarted
        bench.publications.notice_version()
        await bench.turns()
        assert bench.learners.served == [(3, ["a"])]
        bench.task.cancel()


async def test_a_replica_that_cannot_be_reached_waits_for_the_next_publication() -> None:
    async with within():
        bench = Bench()
        bench.learners.failure = WeightSyncError("several transfers broke")
        bench.join("a")
        await bench.learners.called.wait()
        bench.learners.called.clear()
        bench.join("a")
        await bench.turns()
        assert not bench.learners.called.is_set()
        bench.learners.failure = None
        bench.join("a", "b")
        await bench.turns()
        assert bench.learners.served == [(3, ["a", "b"])]
        bench.task.cancel()


class Replicas(CoordinatorClient):
    """A publication lasts until the learners have sent the weights."""

    def __init__(self) -> None:
        super().__init__(None, 0.0, print)
        self.version, self.sent, self.failed = 0, asyncio.Event(), ""

    async def publish(  # type: ignore[override]
        self, version: int, *args: Any, token: str, probe: list[int]
    ) -> dict[str, Any]:
        self.sent.clear()
        await self.sent.wait()
        if self.failed:
            raise WeightSyncError(self.failed)
        self.version = version
        return {"a": [float(version)] * len(probe), "joined meanwhile": None}

    async def fail_publication(self, token: str, reason: str) -> None:
        self.failed = reason
        self.sent.set()

    async def probe(self, ids: list[int], *args: Any, **others: Any) -> dict[str, list[float]]:
        return {"a": [float(self.version)] * len(ids)}


class Senders:
    """Learners whose weights are the number of updates. They send when `may_send` is set."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas, self.weights, self.snapshot = replicas, 0, 0
        self.sending, self.may_send = asyncio.Event(), asyncio.Event()
        self.sent: list[int] = []
        self.failure: Exception | None = None

    async def take_snapshot(self, ids: list[int], settings: Any) -> list[float]:
        assert not self.sending.is_set(), "the snapshot is being sent"
        await asyncio.sleep(0)
        self.snapshot = self.weights
        return [float(self.weights)] * len(ids)

    async def logprobs(self, ids: list[int], model: str = "") -> list[float]:
        return [float(self.weights)] * len(ids)

    async def publish_weights(self, version: int, token: str, settings: Any) -> None:
        self.sending.set()
        try:
            await self.may_send.wait()
            if self.failure:
                raise self.failure
        finally:
            self.sending.clear()
        self.sent.append(self.snapshot if settings.during_updates else self.weights)
        assert self.sent[-1] == version
        if not token:
            self.replicas.update(Snapshot(1))
        self.replicas.sent.set()


class Run:
    """A trainer that updates and publishes."""

    def __init__(self, during_updates: bool) -> None:
        self.replicas = Replicas()
        self.learners: Any = Senders(self.replicas)
        self.publications = Publications(
            self.learners,
            self.replicas,
            EngineConfig(kind="transformers"),
            5.0,
            probe=[1, 2, 3],
            tolerance=1e-9,
            during_updates=during_updates,
        )

    async def update(self) -> None:
        async with self.publications.learners_busy:
            self.learners.weights += 1


async def test_an_update_runs_while_the_version_before_is_sent() -> None:
    async with within():
        run = Run(during_updates=True)
        await run.update()
        first = asyncio.create_task(run.publications.publish(1))
        await asyncio.sleep(0)
        await run.update()  # it waits for the snapshot
        await run.learners.sending.wait()
        assert run.learners.weights == 2
        assert not run.replicas.version
        second = asyncio.create_task(run.publications.publish(2))
        await asyncio.sleep(0)
        run.learners.may_send.set()
        assert (await first).max_abs == (await second).max_abs == 0.0, (
            "compared with the weights of the version"
        )
        assert run.learners.sent == [1, 2]
        assert run.publications.published == 2


async def test_without_snapshots_an_update_waits_until_the_weights_are_sent() -> None:
    async with within():
        run = Run(during_updates=False)
        await run.update()
        publishing = asyncio.create_task(run.publications.publish(1))
        await run.learners.sending.wait()
        updating = asyncio.create_task(run.update())
        for _ in range(5):
            await asyncio.sleep(0)
        assert run.learners.weights == 1
        run.learners.may_send.set()
        await asyncio.gather(publishing, updating)
        assert run.learners.sent == [1]


async def test_a_joined_replica_gets_the_published_version_while_the_learners_have_a_later_one() -> None:
    async with within():
        run = Run(during_updates=True)
        run.learners.may_send.set()
        await run.update()
        await run.publications.publish(1)
        await run.update()
        joining = asyncio.create_task(run.publications.serve_joined(lambda: run.learners.weights))
        run.replicas.sent.clear()
        run.replicas.update(Snapshot(1, lacking=frozenset({"b"})))
        await run.replicas.sent.wait()
        assert run.learners.sent == [1, 1]
        joining.cancel()


async def test_restarted_learners_have_no_snapshot_until_they_return_to_the_published_version() -> None:
    async with within():
        run = Run(during_updates=True)
        run.learners.may_send.set()
        for version in (1, 2):
            await run.update()
            await run.publications.publish(version)
        run.learners.weights = 1
        run.publications.notice_version()
        joining = asyncio.create_task(run.publications.serve_joined(lambda: 2))
        run.replicas.update(Snapshot(1, lacking=frozenset({"b"})))
        assert await run.publications.publish(1) is None
        for _ in range(5):
            await asyncio.sleep(0)
        assert run.learners.sent == [1, 2]
        await run.update()
        run.replicas.sent.clear()
        assert await run.publications.publish(2) is not None
        await run.replicas.sent.wait()
        assert run.learners.sent == [1, 2, 2]
        joining.cancel()


@pytest.mark.parametrize("during_updates", [True, False])
async def test_a_cancelled_publication_leaves_no_replica_waiting(during_updates: bool) -> None:
    async with within():
        run = Run(during_updates)
        await run.update()
        publishing = asyncio.create_task(run.publications.publish(1))
        await run.learners.sending.wait()
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert run.replicas.failed
        await run.update()


async def test_learners_that_are_lost_while_they_send_end_the_publication() -> None:
    async with within():
        run = Run(during_updates=True)
        run.learners.failure = LearnerLostError("a rank died")
        run.learners.may_send.set()
        await run.update()
        with pytest.raises(LearnerLostError, match="a rank died"):
            await run.publications.publish(1)
        assert "a rank died" in run.replicas.failed


class RestartedLearners:
    """Learners that are lost when `lost` is set, while they compute log-probs."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator, self.version = coordinator, 1
        self.lost: asyncio.Event | None = None

    async def export_adapter(self, model: str) -> tuple[int, LoraAdapter]:
        return 0, LoraAdapter({"version": self.version}, {})

    async def publish_weights(self, version: int, token: str, settings: Any) -> None:
        await send(self.coordinator, version, token)

    async def logprobs(self, ids: list[int], model: str = "") -> list[float]:
        if self.lost:
            await self.lost.wait()
            raise LearnerLostError("a rank died")
        return [-float(i) for i in ids[1:]]


class ProbedLater(SpyEngine):
    """An engine that does not answer the probe of version 2 until `gate` is set."""

    async def finish_weight_update(self, version: int) -> None:
        await super().finish_weight_update(version)
        if version == 2:
            self.gate.clear()


@pytest.mark.parametrize("cut_off", ["cancelled", "lost"])
@pytest.mark.parametrize("adapters", [{}, {MODEL_NAME: ""}], ids=["weights", "adapter"])
async def test_a_version_that_replicas_load_after_its_publication_was_cut_off_is_published(
    adapters: dict[str, str], cut_off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(refs: list[Any]) -> Any:
        return refs[0]

    monkeypatch.setattr("raylight.trainer.components.publication.ray.put", lambda value: value)
    async with within():
        coordinator = Coordinator()
        replica = RunningReplica(coordinator, "a")
        replica.engine = replica.executor._engine = ProbedLater()
        replica.executor._fetch = fetch
        await replica.start()
        learners: Any = RestartedLearners(coordinator)
        engine = EngineConfig(kind="transformers")
        publications = Publications(
            learners, coordinator.client, engine, 5.0, adapters=adapters, probe=[1, 2, 3], tolerance=1e-9
        )
        assert await publications.publish(1) is not None
        learners.version = 2
        learners.lost = asyncio.Event()
        if adapters:
            replica.engine.gate.clear()
        publishing = asyncio.create_task(publications.publish(2))
        await turns(200)
        if cut_off == "lost":
            learners.lost.set()
        else:
            publishing.cancel()
        with pytest.raises(LearnerLostError if cut_off == "lost" else asyncio.CancelledError):
            await publishing
        assert publications.published == 1
        learners.lost = None
        again = asyncio.create_task(publications.publish(2))
        await turns()
        replica.engine.gate.set()
        assert (await again).tokens == 2  # type: ignore[union-attr]
        assert publications.published == 2
        assert replica.engine.adapters == dict.fromkeys(adapters, 2)
        assert replica.engine.version == (0 if adapters else 2)
        assert all(ref.config == {"version": 2} for ref in publications._payload_refs.values())  # type: ignore[attr-defined]
        await replica.die()


class AdapterLearners:
    async def export_adapter(self, model: str) -> tuple[int, LoraAdapter]:
        return 0, LoraAdapter({}, {})


class FailingReplicas(CoordinatorClient):
    """Replicas that fail to load anything."""

    async def publish(  # type: ignore[override]
        self, version: int, payload_refs: list[Any], timeout: float, mode: str, adapter: str, **others: Any
    ) -> dict[str, Any]:
        assert (version, adapter) == (0, MODEL_NAME)
        raise WeightSyncError("replica a: expected target modules in ['q_proj']")


async def test_an_engine_that_cannot_serve_the_adapter_fails_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raylight.trainer.components.publication.ray.put", lambda value: value)
    learners: Any = AdapterLearners()
    publications = Publications(
        learners,
        FailingReplicas(None, 0.0, print),
        EngineConfig(kind="transformers"),
        1.0,
        adapters={MODEL_NAME: ""},
        probe=[],
        tolerance=1e-9,
    )
    with pytest.raises(EngineStartError, match=r"expected target modules.*lora\.serve='merged'"):
        async with within():
            await publications.publish_initial(0, 1.0)


class TwoModels:
    """Learners with two adapters and a fixed one; log-probs tell the model and its version."""

    version = 0

    async def export_adapter(self, model: str) -> tuple[int, LoraAdapter]:
        return self.version, LoraAdapter({"model": model, "version": self.version}, {})

    async def logprobs(self, ids: list[int], model: str = "") -> list[float]:
        return [float(len(model) + self.version)] * len(ids)


class AdapterReplicas(CoordinatorClient):
    """A replica that serves what it was sent."""

    def __init__(self) -> None:
        super().__init__(None, 0.0, print)
        self.served: dict[str, dict[str, Any]] = {}
        self.claimed: list[int] = []

    async def publish(  # type: ignore[override]
        self, version: int, payload_refs: list[Any], timeout: float, mode: str, adapter: str, probe: list[int]
    ) -> dict[str, Any]:
        self.claimed.append(version)
        await self.pin(adapter, version, payload_refs, timeout)
        return {"a": (await self.probe(probe, timeout, adapter))["a"]}

    async def pin(self, name: str, version: int, payload_ref: list[Any], *args: Any) -> None:  # type: ignore[override]
        self.served[name] = payload_ref[0].config

    async def release(self, name: str, timeout: float) -> None:
        del self.served[name]

    async def probe(
        self, ids: list[int], timeout: float, adapter: str | None = None
    ) -> dict[str, list[float]]:
        found = self.served[str(adapter)]
        return {"a": [float(len(found["model"]) + found["version"])] * len(ids)}


@pytest.mark.parametrize("during_updates", [False, True])
async def test_the_adapters_of_several_models_are_published_and_pinned_as_one_version(
    during_updates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raylight.trainer.components.publication.ray.put", lambda value: value)
    learners: Any = TwoModels()
    replicas = AdapterReplicas()
    models = ("planner", "coder", "judge")
    publications = Publications(
        learners,
        replicas,
        EngineConfig(kind="transformers"),
        5.0,
        adapters={name: name for name in models},
        fixed=["judge"],
        probe=[1, 2, 3],
        tolerance=1e-9,
        during_updates=during_updates,
    )
    async with within():
        await publications.publish_initial(0, 1.0)
        assert replicas.served == {name: {"model": name, "version": 0} for name in models}
        assert (await publications.check_parity(0, 1.0)).tokens == 3
        learners.version = 1
        parity = await publications.publish(1)
        assert (parity.max_abs, parity.tokens) == (0.0, 3)
        assert {name: found["version"] for name, found in replicas.served.items()} == {
            "planner": 1,
            "coder": 1,
            "judge": 0,
        }
        assert replicas.claimed == [0, 1], "a version is claimed once"
        pinned = await publications.pin(4)
        assert pinned.names == {"planner": "planner@step-4", "coder": "coder@step-4"}
        assert sorted(pinned.payload_refs) == ["coder", "planner"]
        assert replicas.served["coder@step-4"] == {"model": "coder", "version": 1}
        await publications.release(pinned)
        assert sorted(replicas.served) == sorted(models)
        learners.version = 2
        replicas.pin = lambda *args: asyncio.sleep(0)  # type: ignore[method-assign,assignment]
        with pytest.raises(MismatchError):
            await publications.publish(2)
