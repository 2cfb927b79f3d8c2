"""The work of runs: calls of an algorithm with its own loop, and the way of an update to the learners."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from unit_helpers import ReachedRay, within

import raylight
import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.trainer import launch, work
from raylight.trainer.cluster import Connection
from raylight.trainer.cluster_settings import finalize_settings
from raylight.trainer.run import Run
from raylight.trainer.work import call_algorithm


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
    run: Any = SimpleNamespace(store=StoreClient(StoreService()), serving=SimpleNamespace(resources={}))
    report: Any = SimpleNamespace(folder=folder)
    async with within():
        await call_algorithm(planned_runs[-1], run, report)


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


class Step:
    """A loop of one frame, which trains on one batch."""

    def __init__(self, run: Any, *_: Any) -> None:
        self._learners = run.learners

    async def run(self) -> None:
        await self._learners.update(None)


class Rank:
    """A LearnerGroup that records the functions of raylight between the user's call and its own."""

    def __init__(self) -> None:
        self.callers: list[str] = []

    async def update(self, batch: Any) -> dict[str, float]:
        user = threading.main_thread().ident
        assert user is not None
        stacks = (sys._current_frames()[user], sys._getframe())
        frames = [frame for stack in stacks for frame in traceback.extract_stack(stack)]
        self.callers = [
            frame.name for frame in frames if Path(raylight.__file__).parent in Path(frame.filename).parents
        ]
        return {}


class LocalRun(Run):
    """A run whose learners are in this process."""

    rank = Rank()

    async def _open(self) -> None:
        learners = self._make_learners()
        assert learners is not None
        fakes: Any = SimpleNamespace(learners_busy=asyncio.Lock())
        learners.group, learners.publications, self.learners = cast(Any, self.rank), fakes, learners


def test_few_functions_are_between_the_users_call_and_the_learners(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def session(*arguments: Any) -> Iterator[Connection]:
        yield Connection(False, "no cluster")

    monkeypatch.setattr(launch, "ray_session", session)
    monkeypatch.setattr(launch, "settings_for_cluster", lambda s, _: (finalize_settings(s), ()))
    monkeypatch.setattr(work, "Training", Step)
    monkeypatch.setattr(work, "Run", LocalRun)
    trainer = rl.Trainer(algorithm=rl.GRPO(model=str(STARTER_MODEL)), output_dir=tmp_path, progress=False)
    trainer.fit(lambda task, llm: 1.0, [1])
    assert LocalRun.rank.callers == ["call", "fit", "run_blocking", "main", "train_policy", "update"]
