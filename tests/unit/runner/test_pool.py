"""A pool of runners with a store in this process: runners that end are replaced, resizes, draining nodes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from unit_helpers import as_agent, enqueue, until, within

from raylight.agent.hooks import HookDispatcher
from raylight.config import RunnerConfig
from raylight.errors import ConfigError, PlacementError, RunnerLostError
from raylight.runner import draining
from raylight.runner import pool as module
from raylight.runner.actor import RunnerPayload
from raylight.runner.pool import RunnerPool, StartState
from raylight.runner.runner import Runner
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.tracer import DummyTracer

DIED = RayActorError(error_msg="The actor died unexpectedly before finishing this task")
BROKEN = RayActorError(error_msg="No module named 'agents'", actor_init_failed=True)
LEFT_S = 30.0


class Actor:
    """A runner's actor in this process."""

    def __init__(self, cluster: Cluster, name: str, worker_id: str, config: RunnerConfig) -> None:
        self.name = name
        self.cluster = cluster
        self.node = cluster.node
        self.up = asyncio.Event()
        self.dead = asyncio.Event()
        self.fault: Exception = DIED
        self.runner = Runner(
            worker_id,
            cluster.store,
            as_agent(cluster.agent),
            DummyTracer(),
            HookDispatcher(()),
            "secret",
            config.max_concurrent,
            config.max_rollouts,
        )
        self.ready = SimpleNamespace(remote=self._ready)
        self.serve = SimpleNamespace(remote=self._serve)

    def kill(self, fault: Exception = DIED) -> None:
        self.fault = fault
        self.dead.set()

    async def _ready(self) -> str:
        await self._while_alive(self.up.wait())
        return self.node

    async def _serve(self) -> Any:
        return await self._while_alive(self.runner.serve())

    async def _while_alive(self, work: Any) -> Any:
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise self.fault
            return working.result()
        finally:
            working.cancel()
            dying.cancel()
            await asyncio.wait([working])


class Cluster:
    """Ray as the pool uses it."""

    def __init__(self) -> None:
        self.store = StoreClient(StoreService())
        self.actors: list[Actor] = []
        self.room = 100
        """Number of further actors that find a place."""
        self.node = "n1"
        """Node of the next actors."""
        self.draining: dict[str, float | None] = {}
        self.finish = asyncio.Event()
        """Set to let the agents return."""
        self.begun = 0
        """Attempts so far."""
        self.faults: list[Exception] = []
        """Faults of the next actors, while they start."""

    async def agent(self, task: int) -> float:
        self.begun += 1
        await self.finish.wait()
        return 1.0

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._create(options)))

    def _create(self, options: dict[str, Any]) -> Callable[..., Actor]:
        def create(
            worker_id: str, store: Any, payload: Any, config: RunnerConfig, gateway_hosts: tuple[str, ...]
        ) -> Actor:
            actor = Actor(self, options["name"], worker_id, config)
            self.actors.append(actor)
            if self.faults:
                actor.kill(self.faults.pop(0))
            elif self.room > 0:
                self.room -= 1
                actor.up.set()
            return actor

        return create

    @property
    def alive(self) -> list[str]:
        return [actor.name for actor in self.actors if not actor.dead.is_set()]

    def states(self, actors: dict[str, Actor], bundle: Any) -> dict[str, StartState]:
        phases = {name: "starting" if actor.up.is_set() else "unplaced" for name, actor in actors.items()}
        return {name: StartState(phase) for name, phase in phases.items()}  # type: ignore[arg-type]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(module.ray, "remote", cluster.remote)
    monkeypatch.setattr(module.ray, "kill", lambda actor: actor.kill())
    monkeypatch.setattr(module, "read_start_states", cluster.states)
    monkeypatch.setattr(module.StartUp, "_placement_message", lambda self, n: f"{n} without room")
    monkeypatch.setattr(draining, "draining_nodes", lambda: cluster.draining)
    monkeypatch.setattr(draining, "CHECK_S", 0.01)
    return cluster


@asynccontextmanager
async def running(cluster: Cluster, n: int, **settings: Any) -> AsyncIterator[tuple[RunnerPool, Any]]:
    """A pool that is watched until the end of the block, with the task of its watch."""
    config = RunnerConfig(n=n, **{"max_concurrent": 2, "drain_timeout_s": LEFT_S} | settings)
    payload: Any = RunnerPayload(agent=None)  # type: ignore[arg-type]
    pool = RunnerPool("run", config, cluster.store, payload)
    watching: asyncio.Task[None] | None = None
    try:
        async with within():
            await pool.start()
            watching = asyncio.create_task(pool.watch())
            yield pool, watching
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])
        await pool.stop()


async def finished_once(cluster: Cluster, ids: list[str]) -> list[int]:
    """Let the agents return; return the number of attempts of each rollout, all of which succeeded."""
    cluster.finish.set()
    await cluster.store.wait_until_decided(rollout_ids=ids)
    rollouts = [await cluster.store.get_rollout_by_id(rollout_id) for rollout_id in ids]
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    return [rollout.attempt.sequence_id for rollout in rollouts if rollout.attempt]


# growing


async def test_new_runners_take_rollouts_at_once(cluster: Cluster) -> None:
    async with running(cluster, 1) as (pool, _):
        ids = await enqueue(cluster.store, range(6))
        await until(lambda: cluster.begun == 2)
        await pool.resize(3)
        await until(lambda: cluster.begun == 6)
        assert pool.size == 3
        assert await finished_once(cluster, ids) == [1] * 6


async def test_runners_without_room_are_given_up_and_the_others_stay(cluster: Cluster) -> None:
    cluster.room = 2
    async with running(cluster, 1, placement_timeout_s=0.05) as (pool, watching):
        with pytest.raises(PlacementError, match="2 without room"):
            await pool.resize(4)
        assert (pool.size, cluster.alive) == (2, ["runner-0", "runner-1"])
        assert not watching.done()
        cluster.room = 10
        await pool.resize(4)
        assert pool.size == 4


@pytest.mark.parametrize(
    ("n", "settings", "message"),
    [
        (0, {}, "RunnerConfig.n: .* greater than or equal to 1"),
        (10**9, {}, "RunnerConfig.n: .* less than or equal"),
        (2, {"max_rollouts": 5}, "max_rollouts=5"),
    ],
)
async def test_a_bad_number_changes_nothing(
    n: int, settings: dict[str, Any], message: str, cluster: Cluster
) -> None:
    async with running(cluster, 1, **settings) as (pool, _):
        with pytest.raises(ConfigError, match=message):
            await pool.resize(n)
        assert pool.size == 1


# deaths of runners that start


async def test_runners_that_die_at_the_start_of_the_run_are_replaced(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.faults = [DIED, DIED]
    async with running(cluster, 2) as (pool, _):
        assert (pool.size, pool.lost, cluster.alive) == (2, 2, ["runner-2", "runner-3"])
        assert "runner-0 died while it started (The actor died unexpectedly" in caplog.text
        ids = await enqueue(cluster.store, range(4))
        assert await finished_once(cluster, ids) == [1] * 4


@pytest.mark.parametrize(
    ("faults", "message"),
    [([DIED] * 4, "4 runners died .* died unexpectedly"), ([BROKEN], "did not start: No module named")],
)
async def test_runners_that_cannot_start_end_the_run(
    faults: list[Exception], message: str, cluster: Cluster
) -> None:
    cluster.faults = list(faults)
    with pytest.raises(RunnerLostError, match=message):
        async with running(cluster, 1):
            pass
    assert cluster.alive == []


async def test_a_resize_replaces_new_runners_that_die_and_gives_up_after_too_many(cluster: Cluster) -> None:
    async with running(cluster, 1, max_restarts=2) as (pool, watching):
        cluster.faults = [DIED]
        await pool.resize(2)
        assert (pool.size, cluster.alive) == (2, ["runner-0", "runner-2"])
        cluster.faults = [DIED, DIED]
        with pytest.raises(RunnerLostError, match="3 runners died"):
            await pool.resize(3)
        assert (pool.size, cluster.alive, watching.done()) == (2, ["runner-0", "runner-2"], False)


async def test_deaths_with_successes_between_them_do_not_add_up(cluster: Cluster) -> None:
    cluster.finish.set()
    async with running(cluster, 1, max_restarts=1) as (pool, watching):
        for size in (2, 3):
            await finished_once(cluster, await enqueue(cluster.store, range(2)))
            cluster.faults = [DIED]
            await pool.resize(size)
        for node in ("n2", "n3"):
            await finished_once(cluster, await enqueue(cluster.store, range(2)))
            cluster.faults, cluster.draining, cluster.node = [DIED], {cluster.node: None}, node
            drained = [actor for actor in cluster.actors if not actor.dead.is_set()]
            await asyncio.gather(*(actor.dead.wait() for actor in drained))
            await until(lambda: pool.size == 3)
        assert (pool.lost, watching.done()) == (4, False)


# shrinking


async def test_a_runner_that_leaves_finishes_its_rollouts_and_takes_no_more(cluster: Cluster) -> None:
    async with running(cluster, 2) as (pool, watching):
        ids = await enqueue(cluster.store, range(6))
        await until(lambda: cluster.begun == 4)
        resizing = asyncio.create_task(pool.resize(1))
        await until(lambda: pool.size == 1)
        assert not resizing.done()
        assert await finished_once(cluster, ids) == [1] * 6
        await resizing
        assert (cluster.alive, watching.done()) == (["runner-0"], False)
        assert (pool.lost, pool.replaced) == (0, 0)


async def test_rollouts_that_outlast_the_grace_period_go_back_and_are_not_charged(cluster: Cluster) -> None:
    async with running(cluster, 2, drain_timeout_s=0.05) as (pool, _):
        ids = await enqueue(cluster.store, range(4), max_attempts=1)
        await until(lambda: cluster.begun == 4)
        await pool.resize(1)
        assert cluster.alive == ["runner-0"]
        statistics = await cluster.store.statistics()
        assert statistics["attempts_failed_infrastructure"] == 2
        assert sorted(await finished_once(cluster, ids)) == [1, 1, 2, 2]


async def test_the_same_size_again_changes_nothing(cluster: Cluster) -> None:
    async with running(cluster, 2) as (pool, _):
        await pool.resize(2)
        await asyncio.gather(pool.resize(3), pool.resize(3))
        assert cluster.alive == ["runner-0", "runner-1", "runner-2"]


async def test_of_two_resizes_the_later_decides(cluster: Cluster) -> None:
    cluster.room = 1
    async with running(cluster, 1) as (pool, watching):
        growing = asyncio.create_task(pool.resize(5))
        await until(lambda: len(cluster.actors) == 5)
        await pool.resize(1)
        await growing  # its runners are not waited for any more
        assert (pool.size, cluster.alive) == (1, ["runner-0"])
        assert not watching.done()


# losses


async def test_a_runner_that_dies_is_replaced_unless_the_pool_has_enough(cluster: Cluster) -> None:
    async with running(cluster, 2) as (pool, _):
        cluster.actors[0].kill()
        await until(lambda: pool.lost == 1 and pool.size == 2)
        assert cluster.alive == ["runner-1", "runner-2"]


async def test_a_replacement_that_dies_with_its_node_is_replaced_too(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(cluster, 1) as (pool, _):
        cluster.faults = [DIED, DIED]
        cluster.actors[0].kill()
        await until(lambda: pool.size == 1 and pool.lost == 3)
        assert cluster.alive == ["runner-3"]
        assert "runner-1 died while it started" in caplog.text


@pytest.mark.parametrize(
    ("faults", "room", "message"),
    [([DIED] * 3, 1, "died unexpectedly"), ([BROKEN], 1, "No module named"), ([], 0, "without room")],
    ids=["dies again and again", "cannot load the agent", "finds no room"],
)
async def test_a_replacement_that_cannot_start_ends_the_run(
    faults: list[Exception], room: int, message: str, cluster: Cluster
) -> None:
    async with running(cluster, 1, placement_timeout_s=0.05) as (_, watching):
        cluster.faults, cluster.room = list(faults), room
        cluster.actors[0].kill()
        with pytest.raises(RunnerLostError, match=f"runner-0 ended .* could not be replaced: .*{message}"):
            await watching


async def test_a_replacement_without_room_is_waited_for_while_others_work(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(cluster, 2, placement_timeout_s=0.02) as (pool, _):
        cluster.room = 0
        cluster.actors[0].kill()
        await until(lambda: "goes on with 1 runner(s) meanwhile: 1 without room" in caplog.text)
        cluster.actors[2].up.set()
        await until(lambda: pool.size == 2)


async def test_a_runner_that_does_not_respond_is_replaced_without_a_word_of_asyncio(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(cluster, 1, stuck_after_s=0.05) as (pool, _):
        cluster.actors[0].up.clear()
        await until(lambda: pool.lost == 1 and pool.size == 1)
        assert cluster.alive == ["runner-1"]
    gc.collect()
    assert "did not respond for 0.05 s and is killed" in caplog.text
    assert "never retrieved" not in caplog.text


async def test_a_run_that_ends_while_a_runner_is_probed_leaves_no_word_of_asyncio(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBE_INTERVAL_S", 0.01)
    probes = []

    def wait() -> Any:
        probes.append(asyncio.current_task())
        return asyncio.Event().wait()

    async with running(cluster, 1):
        monkeypatch.setattr(cluster.actors[0].up, "wait", wait)
        await until(lambda: bool(probes))
    await asyncio.wait(probes)
    probes.clear()
    gc.collect()
    assert "never retrieved" not in caplog.text


# draining nodes


@pytest.mark.parametrize(("deadline", "attempts"), [(None, [1, 1]), (0.0, [2, 2])])
async def test_runners_leave_a_node_that_drains(
    deadline: float | None, attempts: list[int], cluster: Cluster
) -> None:
    async with running(cluster, 2) as (pool, _):
        cluster.node = "n2"
        await pool.resize(3)
        ids = await enqueue(cluster.store, range(6))
        await until(lambda: cluster.begun == 6)
        cluster.node, cluster.draining = "n1", {"n2": deadline}
        await until(lambda: len(cluster.actors) == 4 and pool.size == 3)
        if deadline is not None:
            await until(lambda: "runner-2" not in cluster.alive)
        assert sorted(await finished_once(cluster, ids))[-2:] == attempts
        await until(lambda: "runner-2" not in cluster.alive)
        assert (pool.lost, pool.replaced) == (0, 1)


async def test_a_run_whose_runners_all_drain_goes_on_elsewhere(cluster: Cluster) -> None:
    async with running(cluster, 2) as (pool, _):
        cluster.node, cluster.draining = "n2", {"n1": None}
        await until(lambda: cluster.alive == ["runner-2", "runner-3"])
        assert pool.size == 2
