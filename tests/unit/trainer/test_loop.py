"""The training loop on a real store, with fake learners and engines, killed at any moment."""

import asyncio
import contextlib
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from run_settings import policy_settings
from unit_helpers import within

import raylight as rl
from raylight.config import CheckpointConfig, LearnerConfig, StoreConfig
from raylight.errors import LearnerError, LearnerLostError, RolloutsFailedError, ServingLostError, StoreError
from raylight.experience.checkpoints import TrainingStates
from raylight.quickstart import STARTER_MODEL
from raylight.semconv import reward_attributes
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.trainer.components.learners import Learners
from raylight.trainer.components.serving import Serving
from raylight.trainer.loop import Training
from raylight.trainer.parity import Parity
from raylight.trainer.policy_rollouts import PolicyRollouts
from raylight.trainer.repeated_rollouts import RepeatedRollouts
from raylight.trainer.report import Report
from raylight.trainer.resume import (
    find_resume_point,
    fingerprint_tasks,
    highest_logged_step,
    highest_logged_version,
    prepare_states,
)
from raylight.trainer.run import Run
from raylight.types import CallKey, Failure, Generation, RolloutConfig, Span

STEPS, TASKS, GROUP = 9, 4, 2
START = "start"
ONCE = RolloutConfig(infrastructure_retries=0)


def mixed(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class World:
    """State that outlives a driver, and a record of what happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained: list[tuple[str, tuple[str, ...]]] = []
        """Weights and the rollouts that they were trained on, of each update."""
        self.sampled: Counter[str] = Counter()
        """Number of times that each rollout finished."""
        self.published: dict[int, str] = {}
        self.faults: dict[int, int] = {}
        """Updates, counted from 0, that fail so often."""
        self.faulty_saves: set[int] = set()
        """Versions of weights of which a state is lost once while it is saved, with the learners."""
        self.stranded_at: set[int] = set()
        """Numbers of finished rollouts at which the learners and the only replica are lost together."""
        self.lives = 0
        self.lost: Callable[[str], bool] = lambda rollout_id: False
        """Tells if the infrastructure fails a rollout."""
        self.outages_at: set[int] = set()
        """Numbers of the confirmations that find an outage."""
        self.reward: float | None = None
        """Reward of every rollout; None draws it at random."""


def write_weights(content: str, weights: Any) -> None:
    Path(content).mkdir(parents=True)
    Path(content, "weights.json").write_text(json.dumps(weights))


def read_weights(content: str) -> Any:
    return json.loads(Path(content, "weights.json").read_text())


class Ranks:
    """Weights are a digest of all that they were trained on."""

    def __init__(self, world: World) -> None:
        self.world, self.weights, self.version, self.lost = world, START, 0, False

    async def update(self, batch: Any) -> dict[str, float]:
        assert not self.lost
        assert {v for row in batch.rows for v in row.weight_versions.tolist()} == {-1, self.version}
        world = self.world
        if world.faults.get(self.version, 0):
            world.faults[self.version] -= 1
            self.lost = True
            raise LearnerLostError("a rank died")
        names = tuple(sorted(row.rollout_id for row in batch.rows))
        world.trained.append((self.weights, names))
        parts = [
            (row.rollout_id.partition("-")[2], batch.rewards[owner])
            for row, owner in zip(batch.rows, batch.owners, strict=True)
        ]
        self.weights, self.version = mixed(self.weights, sorted(parts)), self.version + 1
        return {"learner/pg_loss": 0.0}

    async def restart(self) -> None:
        self.weights, self.version, self.lost = START, 0, False

    async def save(self, folder: str) -> None:
        TrainingStates(folder).complete(0, {"weights": self.weights})

    async def save_state(self, url: str, step: int, about: dict, keep: int, timeout_s: float) -> None:
        if self.version in self.world.faulty_saves:
            self.world.faulty_saves.remove(self.version)
            raise LearnerLostError("a rank died while it saved")
        states = TrainingStates(url)
        content = states.new_content(step)
        write_weights(content, [self.weights, self.version])
        states.complete(step, about, content)
        states.prune(keep)

    async def finish_saving(self, timeout_s: float) -> None: ...

    async def load_state(self, url: str, step: int, version: int) -> None:
        if step:
            with TrainingStates(url).reading(step) as content:
                self.weights, self.version = read_weights(content)
        self.version = version


class Engines:
    """The fleet: what agents sample from."""

    def __init__(self) -> None:
        self.weights, self.version = START, 0


class Publications:
    """Publishes the learners' weights to the engines."""

    def __init__(self, world: World, learners: Ranks, engines: Engines) -> None:
        self.world, self.learners, self.engines = world, learners, engines
        self.published = 0
        self.learners_busy = asyncio.Lock()
        self.stranded, self.served = asyncio.Event(), asyncio.Event()

    async def wait_for_failure(self) -> None:
        await self.stranded.wait()
        raise LearnerLostError("a rank died, and a replica has joined")

    async def publish(self, version: int) -> Parity:
        async with self.learners_busy:
            assert version == self.learners.version
            weights = self.learners.weights
            assert self.world.published.setdefault(version, weights) == weights, (
                "a version means the same weights for ever"
            )
            if version > self.published:
                self.engines.weights, self.engines.version = weights, version
                self.published = version
        assert (self.engines.version, self.engines.weights) == (version, weights)
        return Parity(0.0, 0.0, 1)

    def notice_version(self) -> None:
        self.stranded.clear()
        if self.learners.version == self.published:
            self.served.set()


class Monitor:
    """Finds an outage at some confirmations: since the last one, what ended is lost."""

    def __init__(self, run: "FakeRun") -> None:
        self.run_, self.confirmations, self.outages, self.seconds_away = run, 0, 0, 0.0
        self.confirmed = time.time()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def confirm(self) -> None:
        self.confirmations += 1
        if self.confirmations in self.run_.world.outages_at:
            self.outages += 1
            await self.run_.store.report_outage("policy", self.confirmed, "refused")
            await self.run_.store.report_outage("policy", None)
        self.confirmed = time.time()


class FakeRun(Run):
    """Learners, engines and a runner in this process."""

    def __init__(self, settings: Any, start: Any, repeated: Any, world: World, die_after: int | None) -> None:
        super().__init__(settings, lambda text: None, True, start)
        self.world, self.die_after, self.repeated = world, die_after, repeated
        self.learners = Learners(settings, settings.training, settings.serving, start, lambda text: None)
        ranks, self.engines = Ranks(world), Engines()
        self.ranks: Any = ranks
        self.learners.group, self.learners.replicas = self.ranks, cast(Any, self.engines)
        self.publications: Any = Publications(world, ranks, self.engines)
        self.learners.publications = self.publications

    async def _open(self) -> None:
        self.service = StoreService(self.settings.store_path, StoreConfig())
        self._stack.push_async_callback(self.service.close)
        self.store = StoreClient(self.service)
        if self.start.same_run:
            await self.repeated.find(self.store)
        await self.store.add_resources({"engine": self.world.lives})
        self.serving = Serving("run", None, None, self.store, print, True)
        monitors: list[Any] = [Monitor(self)]
        self.serving.monitors = monitors
        if not self.start.is_fresh:
            await self.ranks.load_state(self.start.state_url, self.start.step, self.learners.version)
        self._components = [cast(Any, self), self.serving]

    def watches(self) -> list[Any]:
        """As a pool of runners."""
        return [self._run_agents()]

    async def _run_agents(self) -> None:
        while True:
            for rollout in await self.store.dequeue_many_rollouts(
                limit=3, timeout=5, worker_id=f"w{self.world.lives}"
            ):
                if self.die_after is not None and sum(self.world.sampled.values()) >= self.die_after:
                    await self.service.close()  # the driver is gone, with what it was doing
                    raise StoreError("killed")
                await self._run_agent(rollout)

    async def _run_agent(self, rollout: Any) -> None:
        resources = await self.store.get_resources_by_id(rollout.resources_id)
        assert resources.resources == {"engine": self.world.lives}, "the engine of the life before is gone"
        if (finished := sum(self.world.sampled.values())) in self.world.stranded_at:
            self.world.stranded_at.remove(finished)
            self.ranks.lost = True
            self.publications.stranded.set()
            await self.publications.served.wait()
        if self.world.lost(rollout.rollout_id):
            failure = Failure(kind="infrastructure", error="APIConnectionError: refused")
            await self.store.finish_attempt(rollout, "failed", failure)
            return
        key = CallKey(rollout.rollout_id, rollout.attempt.attempt_id, mixed(rollout.attempt.attempt_id))
        luck = int(mixed(self.engines.weights, rollout.rollout_id.partition("-")[2]), 16)
        worth = luck % 7 / 7 if self.world.reward is None else self.world.reward
        call = Generation(
            key, "policy", [1, 2], [luck % 50], [-1.0], [self.engines.version], "stop", 0.0, 1.0
        )
        reward = Span(
            rollout_id=key.rollout_id,
            attempt_id=key.attempt_id,
            sequence_id=0,
            trace_id="t",
            span_id="s",
            name="reward",
            start_time=0.0,
            end_time=1.0,
            attributes=reward_attributes({"primary": worth}),
        )
        await self.store.capture([(key, 0.0)], [(key, call, None)])
        await self.store.finish_attempt(rollout, "succeeded", spans=[reward])
        self.world.sampled[rollout.rollout_id] += 1


class Quiet:
    def progress(self, text: str) -> None: ...

    def stage(self, text: str) -> None: ...
    def step(self, step: int, metrics: dict) -> None: ...
    def note(self, text: str) -> None: ...


async def live(
    world: World,
    resume: Any = "auto",
    die_after: int | None = None,
    loggers: Any = ("jsonl",),
    **settings: Any,
) -> list[dict]:
    """Run a driver until its end or death; return the rows of its metrics."""
    world.lives += 1
    folder, tasks = world.folder, list(range(10))
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=GROUP,
        tasks_per_step=TASKS,
        n_steps=STEPS,
        val_every=2,
        max_logprob_mismatch=1,
        **{"best": None, **settings},
    )
    settings_ = policy_settings(
        str(STARTER_MODEL),
        learner=LearnerConfig(max_restarts=2),
        algorithm=algorithm,
        training={
            "checkpoint": CheckpointConfig(every=3),
            "state_url": str(folder / "state"),
            "total_steps": STEPS,
        },
        name=f"life-{world.lives}",
        folder=str(folder),
        store_path=str(folder / "store.db"),
        rollout=algorithm.rollout,
    )
    config = settings_.resolved() | {"tasks": fingerprint_tasks(tasks)}
    start = find_resume_point(
        resume, str(folder / "state"), config, highest_logged_version(folder / "metrics.jsonl")
    )
    start = replace(start, completed_step=highest_logged_step(folder / "metrics.jsonl"))
    report = Report(folder, Quiet(), config, None, start.last_logged_step, loggers)
    prepare_states(start, str(folder / "state"), config)
    repeated = RepeatedRollouts(start, lambda text: None)
    async with within(30), FakeRun(settings_, start, repeated, world, die_after) as run:
        run._stack.callback(report.close)
        training = Training(PolicyRollouts(run, repeated), algorithm, tasks, [100, 101], report, config)
        with contextlib.suppress(StoreError) if die_after is not None else contextlib.nullcontext():
            await run.watched(training.run())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(rows: list[dict]) -> list[tuple]:
    return [
        tuple(row.get(name) for name in ("step", "train/reward", "val/reward", "weights/version"))
        for row in rows
    ]


def weights_of(world: World) -> str:
    """Return the weights of the model that a run saved."""
    return TrainingStates(str(world.folder / "checkpoint")).metadata(0)["weights"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "a").mkdir()
    return World(tmp_path / "a")


@pytest.fixture
def undisturbed(tmp_path: Path) -> tuple[list[tuple], str]:
    """Rows and weights of a run that nothing disturbed."""
    (tmp_path / "b").mkdir()
    world = World(tmp_path / "b")
    rows = asyncio.run(live(world))
    return told(rows), weights_of(world)


@pytest.mark.parametrize("deaths", [[1], [5], [29], [38, 39], [20, 47, 60], [84]])
def test_a_driver_that_dies_at_any_moment_changes_nothing(
    deaths: list[int], world: World, undisturbed: tuple
):
    for death in deaths:
        asyncio.run(live(world, die_after=death))
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}  # each was finished once: none was lost, and none sampled anew
    assert len(world.sampled) == STEPS * TASKS * GROUP + 2 * (1 + STEPS // 2 + STEPS % 2)
    lineage = dict(
        world.trained
    )  # a step that is taken again is trained on the same rollouts, from the same weights
    assert set(world.trained) == set(lineage.items())
    assert Counter(name for names in lineage.values() for name in names).most_common(1)[0][1] == 1


@pytest.mark.parametrize("faults", [{0: 1}, {4: 1}, {6: 2}, {2: 1, 7: 1}])
def test_learners_that_are_lost_come_to_where_they_were(
    faults: dict[int, int], world: World, undisturbed: tuple
):
    world.faults = faults
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}
    assert rows[-1]["learner/restarts"] == sum({4: 1, 6: 2, 2: 1, 7: 1, 0: 1}[v] for v in world.faults)


@pytest.mark.parametrize("stranded_at", [13, 40, 67])
def test_learners_that_are_lost_with_the_only_replica_are_restarted_at_once(
    stranded_at: int, world: World, undisturbed: tuple
) -> None:
    """Agents wait for the replacement of the replica, and it for the weights of the learners."""
    world.stranded_at = {stranded_at}
    rows = asyncio.run(live(world))
    assert not world.stranded_at
    assert told(rows) == undisturbed[0]
    assert set(world.sampled.values()) == {1}
    assert rows[-1]["learner/restarts"] == 1


@pytest.mark.parametrize("phase", ["val-0", "train-2", "train-5", "val-4"])
def test_a_resumed_run_runs_again_what_the_infrastructure_failed(
    phase: str, world: World, undisturbed: tuple
):
    """Once serving was away for so long that all retries were used up."""
    world.lost = lambda rollout_id: f"-{phase}-" in rollout_id
    with pytest.raises(RolloutsFailedError, match=r"(?s)refused\. The infrastructure .* resume='auto'"):
        asyncio.run(live(world, rollout=ONCE))
    world.lost = lambda rollout_id: False
    rows = asyncio.run(live(world, rollout=ONCE))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}


@pytest.mark.parametrize("outages_at", [{2}, {3, 4, 7}])
def test_no_result_of_an_outage_is_trained(outages_at: set[int], world: World, undisturbed: tuple):
    """Each confirmation follows a batch: all of it runs again, and is trained once."""
    world.outages_at = outages_at
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert rows[-1]["serving/outages"] == len(outages_at)
    assert max(world.sampled.values()) > 1
    assert len(world.trained) == STEPS


def test_a_model_that_stays_away_ends_the_run(world: World, monkeypatch: pytest.MonkeyPatch):
    async def run(self: Any) -> None:
        raise ServingLostError("away for too long")

    monkeypatch.setattr(Monitor, "run", run)
    with pytest.raises(ServingLostError, match="away for too long"):
        asyncio.run(live(world))


def test_completed_steps_are_replayed_with_what_failed_in_them(world: World):
    """A step that lost a rollout is trained on the same others again."""
    world.lost = lambda rollout_id: rollout_id.endswith(("-train-4-0-0-1", "-train-5-0-1-0"))
    asyncio.run(live(world, rollout=ONCE, die_after=60))
    world.lost = lambda rollout_id: False
    asyncio.run(live(world, rollout=ONCE))
    trained = dict(world.trained)
    assert set(world.trained) == set(trained.items())
    assert not any(name.endswith("-train-4-0-0-1") for names in trained.values() for name in names)


def test_learners_that_are_lost_while_a_resumed_run_takes_steps_again(world: World, undisturbed: tuple):
    """Nothing may be sampled from engines that have the first weights still."""
    asyncio.run(live(world, die_after=60))  # within step 7
    shutil.rmtree(world.folder / "state" / "step-6")  # which was not written to its end
    world.faulty_saves = {6}
    rows = asyncio.run(live(world))
    assert told(rows) == undisturbed[0]
    assert weights_of(world) == undisturbed[1]
    assert set(world.sampled.values()) == {1}


def test_learners_that_are_lost_before_the_first_state_end_the_run(world: World, tmp_path: Path):
    asyncio.run(live(world))
    (tmp_path / "c").mkdir()
    fork = World(tmp_path / "c")
    fork.faulty_saves = {6}
    with pytest.raises(LearnerError, match=r"before .* had a training state: a rank died while it saved"):
        asyncio.run(live(fork, resume=str(world.folder / "state" / "step-6")))


def test_learners_that_are_lost_too_often_end_the_run(world: World):
    world.faults = {3: 3}
    with pytest.raises(LearnerError, match="max_restarts=2"):
        asyncio.run(live(world))


def test_with_another_learning_rate_the_steps_since_are_taken_anew(world: World):
    asyncio.run(live(world, die_after=50))
    before = dict(world.published)
    rows = asyncio.run(live(world, lr=1e-3))
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert max(before) < rows[4]["weights/version"]  # versions of the life before mean other weights
    names = {name.partition("-")[0] for name in world.sampled}
    assert len(names) == 2


def test_a_run_that_is_over_stays_as_it_is(world: World, undisturbed: tuple):
    first = asyncio.run(live(world))
    sampled = Counter(world.sampled)
    assert told(asyncio.run(live(world, resume=True))) == told(first)
    assert world.sampled == sampled


@pytest.mark.parametrize("ending", [{"best": "val/reward", "patience": 1}, {"max_steps_without_signal": 1}])
def test_a_run_that_ended_early_stays_as_it_is(ending: dict, world: World):
    world.reward = None if "patience" in ending else 0.5
    first = asyncio.run(live(world, **ending))
    assert 1 <= first[-1]["step"] < STEPS
    sampled = Counter(world.sampled)
    assert told(asyncio.run(live(world, resume=True, **ending))) == told(first)
    assert world.sampled == sampled


def test_without_resume_everything_begins_anew(world: World):
    asyncio.run(live(world, die_after=40))
    (world.folder / "store.db").unlink()  # as the session does
    world.published.clear()
    rows = asyncio.run(live(world, resume=False))
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert len(world.sampled) > STEPS * TASKS * GROUP
