"""A run on a real store, with fake learners, engines and runners in one process, which can be killed at any
moment."""

import asyncio
import contextlib
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recording_display import RecordingDisplay
from run_output import metric_rows
from unit_helpers import within

import raylight as rl
from raylight._utils.aio import BroadcastCondition, task_group
from raylight.agent.resources import LLM
from raylight.config import (
    MODEL_NAME,
    CheckpointConfig,
    EngineConfig,
    LearnerConfig,
    LoraConfig,
    RunnerConfig,
    SessionConfig,
    StoreConfig,
)
from raylight.engines.protocol import EngineLoad
from raylight.errors import LearnerLostError, StoreError
from raylight.learner.state.checkpoints import TrainingStates
from raylight.quickstart import STARTER_MODEL
from raylight.runner.actor import RunnerPayload
from raylight.semconv import reward_attributes
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.tasks.task_set import ShuffledTasks, TaskSet
from raylight.trainer.components.learners import Learners
from raylight.trainer.components.parity import Parity
from raylight.trainer.components.publication import PinnedAdapter
from raylight.trainer.components.run_components import PolicyComponents
from raylight.trainer.components.runners import OutsideAgents
from raylight.trainer.components.store import cancel_undecided
from raylight.trainer.loops.policy_loop import PolicyLoop
from raylight.trainer.loops.session_groups import SessionGroups
from raylight.trainer.loops.training_groups import TrainingGroups
from raylight.trainer.output.report import Report
from raylight.trainer.spec.resume import (
    find_resume_point,
    highest_logged_version,
    logged_evaluations,
    prepare_states,
)
from raylight.trainer.spec.settings import ServingSettings, TrainedSettings, TrainingSettings
from raylight.types import CallKey, Failure, Generation, RolloutConfig, Span, StepGroups

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
        """Versions of weights whose state is lost once while it is saved, with the learners."""
        self.models, self.faulty_models = 0, set[int]()
        """Number of models that were saved, and numbers of those at which the learners are lost."""
        self.stranded_at: set[int] = set()
        """Numbers of finished rollouts at which the learners and the only replica are lost together."""
        self.drains_at: dict[int, bool] = {}
        """Numbers of finished rollouts at which the learners' node drains, and if others have room."""
        self.places: list[object] = []
        """Placements of the restarts of the learners."""
        self.lives = 0
        self.lost: Callable[[str], bool] = lambda rollout_id: False
        """Tells if the infrastructure fails a rollout."""
        self.outages_at: set[int] = set()
        """Numbers of the confirmations that find an outage."""
        self.reward_of: Callable[[str], float | None] = lambda rollout_id: None
        """Returns the reward of a rollout; None draws it at random."""
        self.steps, self.max_restarts, self.deadline_s = STEPS, 2, 120.0
        """Length of the run, allowed restarts of the learners, and the limit of the time of a life."""
        self.staleness = 0
        """Allowed age of a token at its update."""
        self.delays: random.Random | None = None
        """Draws how long everything takes; None: nothing takes any time."""
        self.serves_adapter = False
        """True if the engines serve an adapter, and can keep versions of it."""
        self.evaluated: dict[int, set[tuple[int, str]]] = {}
        """Versions and weights that the rollouts of the evaluation after each step were sampled from."""
        self.val_waits_for: dict[int, int] = {}
        """Number of updates that must be done before rollouts of the evaluation after a step begin."""
        self.val_tasks, self.slots = 2, 1000
        """Number of validation tasks, and of rollouts that the runners execute."""
        self.killed_in_val: set[int] = set()
        """Steps in whose evaluation the driver is killed once."""
        self.notes: list[str] = []
        self.algorithm: Any = rl.GRPO
        self.run: Any = FakeRun
        self.sessions: SessionConfig | None = None
        """Settings of the sessions of a run whose agents are outside of it."""
        self.updated = BroadcastCondition()

    async def delay(self, turns: int) -> None:
        """Let others run for up to so many turns of the event loop."""
        if self.delays is not None:
            for _ in range(self.delays.choice([0, 1, self.delays.randrange(turns)])):
                await asyncio.sleep(0)


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
        world = self.world
        versions = {v for row in batch.rows for v in row.weight_versions.tolist()} - {-1}
        assert self.version - world.staleness <= min(versions) <= max(versions) <= self.version
        await world.delay(60)
        if world.faults.get(self.version, 0):
            world.faults[self.version] -= 1
            self.lost = True
            raise LearnerLostError("a rank died")
        names = tuple(sorted({row.rollout_id for row in batch.rows}))
        world.trained.append((self.weights, names))
        parts = [
            (row.rollout_id.partition("-")[2], batch.rewards[owner])
            for row, owner in zip(batch.rows, batch.owners, strict=True)
        ]
        self.weights, self.version = mixed(self.weights, sorted(parts)), self.version + 1
        world.updated.notify_all()
        return {"learner/pg_loss": 0.0}

    async def row_records(self) -> list[Any]:
        return []

    async def restart(self, placement: object = None) -> None:
        self.world.places.append(placement)
        self.weights, self.version, self.lost = START, 0, False

    async def save(self, folder: str, adapters: dict[str, str] | None = None) -> None:
        self.world.models += 1
        if self.world.models in self.world.faulty_models:
            self.lost = True
            raise LearnerLostError("a rank died while it saved a model")
        TrainingStates(folder).complete(0, {"weights": (adapters or {}).get("", self.weights)})

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
        self.pinned: dict[str, tuple[int, str]] = {}
        """Name -> version and weights."""

    def serve(self, model: str) -> tuple[int, str]:
        """Return the version and the weights that are served under a name."""
        return (self.version, self.weights) if model == MODEL_NAME else self.pinned[model]

    async def loads(self) -> dict[str, EngineLoad]:
        return {}


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
        await self.world.delay(120)  # during updates, if there are delays
        known = self.world.published.setdefault(version, weights)
        assert known == weights, "a version means the same weights for ever"
        if version > self.published:
            self.engines.weights, self.engines.version = weights, version
            self.published = version
        assert (self.engines.version, self.engines.weights) == (version, weights)
        self.notice_version()
        return Parity(0.0, 0.0, 1)

    async def pin(self, step: int) -> PinnedAdapter:
        engines = self.engines
        assert not engines.pinned, "there is one evaluation at a time"
        name = f"{MODEL_NAME}@step-{step}"
        engines.pinned[name] = (engines.version, engines.weights)
        return PinnedAdapter({MODEL_NAME: name}, engines.version, {"": engines.weights})

    async def release(self, pinned: PinnedAdapter) -> None:
        engines = self.engines
        weights = engines.pinned.pop(pinned.names[MODEL_NAME])
        assert weights == (pinned.version, pinned.payload_refs[""])

    def notice_version(self) -> None:
        self.stranded.clear()
        if self.learners.version == self.published:
            self.served.set()


class Serving:
    """Finds an outage at some confirmations: since the last one, what ended is lost."""

    def __init__(self, world: World, store: StoreClient) -> None:
        self.world, self.store = world, store
        self.confirmations, self.outages, self.confirmed = 0, 0, time.monotonic()

    def watches(self) -> list[Any]:
        return [self.run()]

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def confirm(self) -> int:
        self.confirmations += 1
        if self.confirmations in self.world.outages_at:
            self.outages += 1
            await self.store.report_outage("policy", self.confirmed, "refused")
            await self.store.report_outage("policy", None)
        self.confirmed = time.monotonic()
        return self.outages

    def metrics(self) -> dict[str, float]:
        return {"serving/outages": float(self.outages)}


class FakeRun(PolicyComponents):
    """Learners, engines and a runner in this process."""

    def __init__(self, settings: TrainedSettings, start: Any, world: World, die_after: int | None) -> None:
        super().__init__(settings, lambda text: None, True, start)
        self.world, self.die_after = world, die_after

    async def _open(self) -> None:
        self.service = StoreService(self.settings.store_path, StoreConfig())
        self._stack.push_async_callback(self.service.close)
        self.store = StoreClient(self.service)
        if self.start.same_run:
            await cancel_undecided(
                self.store, self.start, keeps=isinstance(self.settings.agents, SessionConfig)
            )
        model = LLM(endpoint="http://engine", model=MODEL_NAME, traced=True)
        published = await self.store.add_resources({"engine": self.world.lives, "llm": model})
        self.engines = Engines()
        self.learners = Learners(self.settings, self.start, lambda text: None)
        ranks: Any = Ranks(self.world)
        self.learners.learner, self.learners.replicas = ranks, self.engines  # type: ignore[assignment]
        self.learners._placement = "here"  # type: ignore[assignment]
        self.learners.publications = Publications(self.world, ranks, self.engines)  # type: ignore[assignment]
        if not self.start.is_fresh:
            await self.learners.learner.load_state(
                self.start.state_url, self.start.step, self.learners.version
            )
        self.endpoints: Any = Serving(self.world, self.store)
        self.endpoints.published = published
        self.runners: Any = SimpleNamespace(metrics=dict, most_rollouts=lambda: self.world.slots)
        if self.world.sessions is not None:
            self.runners = OutsideAgents(self.world.sessions)
        self._components: list[Any] = [self, self.endpoints]

    def watches(self) -> list[Any]:
        """Return the awaitables that stand in for runners."""
        return [self._run_agents()]

    async def _run_agents(self) -> None:
        async with task_group() as agents:
            while True:
                for rollout in await self.store.dequeue_many_rollouts(
                    limit=3, timeout=5, worker_id=f"w{self.world.lives}"
                ):
                    if self.world.delays is None:
                        await self._run_agent(rollout)
                    else:
                        agents.create_task(self._run_agent(rollout))

    async def _run_agent(self, rollout: Any) -> None:
        if self.die_after is not None and sum(self.world.sampled.values()) >= self.die_after:
            await self.service.close()  # the driver is gone, with what it was doing
            raise StoreError("killed")
        resources = await self.store.get_resources_by_id(rollout.resources_id)
        model = resources.resources["llm"].model
        assert resources.resources["engine"] == self.world.lives, "the engine of the life before is gone"
        if rollout.mode == "val":
            step = int(rollout.rollout_id.split("-")[2])
            needed = self.world.val_waits_for.get(step, 0)
            await self.world.updated.wait_for(lambda: self.learners.version >= needed)
            if step in self.world.killed_in_val:
                self.world.killed_in_val.remove(step)
                await self.service.close()
                raise StoreError("killed")
            self.world.evaluated.setdefault(step, set()).add(self.engines.serve(model))
        if (finished := sum(self.world.sampled.values())) in self.world.stranded_at:
            self.world.stranded_at.remove(finished)
            self.learners.learner.lost = True
            self.learners.publications.stranded.set()
            await self.learners.publications.served.wait()
        for number in [number for number in self.world.drains_at if number <= finished]:
            if self.world.drains_at.pop(number):
                self.learners._standby_group = "elsewhere"  # type: ignore[assignment]
            self.learners.drain_noticed.set()
        if self.world.lost(rollout.rollout_id):
            failure = Failure(kind="infrastructure", error="APIConnectionError: refused")
            await self.store.finish_attempt(rollout, "failed", failure)
            return
        luck = int(mixed(self.engines.serve(model)[1], rollout.rollout_id.partition("-")[2]), 16)
        fixed = self.world.reward_of(rollout.rollout_id)
        worth = luck % 997 / 997 if fixed is None else fixed
        for turn in range(3 if self.world.delays else 1):
            await self._call(rollout, turn, luck % 50, model)
            await self.world.delay(100)
        key = CallKey(rollout.rollout_id, rollout.attempt.attempt_id, "")
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
        await self.store.finish_attempt(rollout, "succeeded", spans=[reward])
        self.world.sampled[rollout.rollout_id] += 1

    async def _call(self, rollout: Any, turn: int, token: int, model: str) -> None:
        """Sample a token with the engine's weights."""
        version, _ = self.engines.serve(model)
        attempt_id = rollout.attempt.attempt_id
        key = CallKey(rollout.rollout_id, attempt_id, mixed(attempt_id, turn))
        call = Generation(key, MODEL_NAME, [turn, 2], [token], [-1.0], [version], "stop", turn, turn + 1.0)
        await self.store.capture([(key, float(turn))], [(key, call, None)])


async def live(
    world: World,
    resume: Any = "auto",
    die_after: int | None = None,
    loggers: Any = ("jsonl",),
    tasks: TaskSet | None = None,
    group_reward: Any = None,
    **settings: Any,
) -> list[dict]:
    """Run a driver until its end or death; return the rows of its metrics."""
    world.lives += 1
    folder, tasks = world.folder, tasks or ShuffledTasks(list(range(10)))
    algorithm = world.algorithm(
        model=STARTER_MODEL,
        tasks_per_step=TASKS,
        max_logprob_mismatch=1,
        **{"n_steps": world.steps, "best": None, "val_every": 2, "group_size": GROUP, **settings},
    )
    training = TrainingSettings(
        algorithm,
        LearnerConfig(max_restarts=world.max_restarts, lora=LoraConfig() if world.serves_adapter else None),
        CheckpointConfig(every=3),
        str(folder / "state"),
        world.steps,
    )
    chosen = TrainedSettings(
        name=f"life-{world.lives}",
        folder=str(folder),
        seed=0,
        agents=world.sessions or RunnerPayload(rl.rollout(lambda task: 0.0)),
        secret="s3cr3t",
        runner=RunnerConfig(),
        store=StoreConfig(),
        store_path=str(folder / "store.db"),
        resources={},
        rollout=algorithm.rollout,
        serving=ServingSettings(str(STARTER_MODEL), EngineConfig()),
        training=training,
        group_reward=group_reward,
    )
    config = chosen.resolved() | {"tasks": tasks.fingerprint()}
    highest = highest_logged_version(folder / "metrics.jsonl")
    start = find_resume_point(resume, training.state_url, config, highest)
    start = replace(start, evaluated_steps=logged_evaluations(folder / "metrics.jsonl"))
    report = Report(folder, RecordingDisplay(world.notes), config, None, start.last_logged_step, loggers)
    prepare_states(start, training.state_url, config)
    async with within(world.deadline_s), world.run(chosen, start, world, die_after) as run:
        run._stack.callback(report.close)
        val_tasks = list(range(100, 100 + world.val_tasks))
        groups = TrainingGroups if world.sessions is None else SessionGroups
        work = PolicyLoop(run, tasks, val_tasks, report, config, groups=groups).run()
        with contextlib.suppress(StoreError) if die_after is not None else contextlib.nullcontext():
            async with run.watched():
                await work
    rows = metric_rows(folder)
    for row in [row for row in rows if "val/step" not in row]:
        assert row["ledger/unaccounted"] == 0
        for fate in ("trained", "dropped"):
            by_length = [n for name, n in row.items() if name.startswith("lengths/") and name.endswith(fate)]
            assert sum(by_length) == row[f"ledger/{fate}"]
    return rows


async def recorded_steps(world: World) -> dict[int, StepGroups]:
    """Return the groups that the store has for each step."""
    service = StoreService(world.folder / "store.db", read_only=True)
    try:
        lineage = next(iter(world.sampled)).partition("-")[0]
        return await StoreClient(service).query_steps(lineage)
    finally:
        await service.close()


def told(rows: list[dict]) -> list[tuple]:
    return [
        tuple(row.get(name) for name in ("step", "train/reward", "val/reward", "weights/version"))
        for row in rows
    ]


def weights_of(world: World) -> str:
    """Return the weights of the model that a run saved."""
    return TrainingStates(str(world.folder / "checkpoint")).metadata(0)["weights"]


def settings_of(world: World, stale: str) -> dict[str, Any]:
    """Return the settings of an algorithm that trains tokens as old as the world allows."""
    return {"max_staleness": world.staleness} | ({"stale": stale} if stale != "wait" else {})
