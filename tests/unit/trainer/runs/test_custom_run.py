"""Runs of an algorithm with its own loop, and the way of an update to the learners."""

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from run_settings import KnownFacts
from training_world import FakeRun, Ranks, World
from unit_helpers import ReachedRay, within

import raylight
import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.trainer import launch
from raylight.trainer.output.report import Report
from raylight.trainer.ray_session.connection import Connection
from raylight.trainer.runs.policy_run import PolicyRun


@rl.rollout
def agent(task: int) -> float:
    return 1.0


class Noting(rl.Algorithm):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, bool]] = []

    def note(self, tasks: Any) -> None:
        self.seen.append((tasks, threading.current_thread() is threading.main_thread()))


class Awaited(Noting):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        self.note(train_dataset)


class Blocking(Noting):
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        self.note(train_dataset)


class HandedOn(Noting):
    """Synchronous by its signature only."""

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        return self.search(train_dataset)

    async def search(self, tasks: Any) -> None:
        self.note(tasks)


async def carry_out(algorithm: Any, planned_runs: list[Any], folder: Path, *datasets: Any) -> None:
    with pytest.raises(ReachedRay):
        rl.Trainer(algorithm=algorithm, output_dir=folder).fit(agent, *datasets)
    run: Any = SimpleNamespace(store=StoreClient(StoreService()), endpoints=SimpleNamespace(resources={}))
    report = Mock(spec=Report, folder=folder)
    async with within():
        await planned_runs[-1].loop(run, report).run()


@pytest.mark.parametrize(("kind", "on_the_loop"), [(Awaited, True), (Blocking, False), (HandedOn, True)])
async def test_every_kind_of_run_is_carried_out(
    kind: Any, on_the_loop: bool, planned_runs: list[Any], tmp_path: Path
) -> None:
    algorithm = kind()
    await carry_out(algorithm, planned_runs, tmp_path, [1, 2])
    assert algorithm.seen == [([1, 2], on_the_loop)]


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_dataset_that_a_function_does_not_take_ends_the_run(
    asynchronous: bool, planned_runs: list[Any], tmp_path: Path
) -> None:
    async def coroutine(store: Any) -> None: ...

    def plain(store: Any) -> None: ...

    with pytest.raises(TypeError, match="has no parameter val_dataset, but a val_dataset was given"):
        await carry_out(rl.algo(coroutine if asynchronous else plain), planned_runs, tmp_path, None, [1])


async def test_tasks_that_can_be_read_only_once_become_a_list(
    planned_runs: list[Any], tmp_path: Path
) -> None:
    algorithm = Awaited()
    await carry_out(algorithm, planned_runs, tmp_path, (n for n in range(3)))
    assert algorithm.seen == [([0, 1, 2], True)]


class LocalRun(FakeRun):
    """A run whose learners and engines are in this process."""

    def __init__(self, run: PolicyRun) -> None:
        super().__init__(run.settings, run.start, World(run.folder), None)

    async def counts(self) -> dict[str, int]:
        return {}


MAX_FUNCTIONS = 9
"""Functions from `Trainer.fit` to `LearnerGroup.update`, both included."""


def test_few_functions_are_between_the_users_call_and_the_learners(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Record callers in the thread that waits and in the thread that works."""
    callers, package = [], Path(raylight.__file__).parent

    @contextlib.contextmanager
    def session(*arguments: Any) -> Iterator[Connection]:
        yield Connection(False, "no cluster")

    async def update(self: Any, batch: Any, original: Any = Ranks.update) -> dict[str, float]:
        waiting = threading.main_thread().ident
        assert waiting is not None
        stacks = (sys._current_frames()[waiting], sys._getframe())
        frames = [frame for stack in stacks for frame in traceback.extract_stack(stack)]
        callers[:] = [frame.name for frame in frames if package in Path(frame.filename).parents]
        return await original(self, batch)

    monkeypatch.setattr(launch, "ray_session", session)
    monkeypatch.setattr(launch, "ClusterFacts", KnownFacts)
    monkeypatch.setattr(PolicyRun, "components", lambda run, *_: LocalRun(run))
    monkeypatch.setattr(Ranks, "update", update)
    algorithm = rl.GRPO(model=STARTER_MODEL, n_steps=1, tasks_per_step=2, group_size=2)
    trainer = rl.Trainer(algorithm=algorithm, output_dir=tmp_path, progress=False)
    trainer.fit(lambda task, llm: 1.0, [1, 2])
    assert callers[:4] == ["call", "fit", "run_blocking", "main"]
    assert len(callers[1:]) + 1 <= MAX_FUNCTIONS, callers
