"""How a Trainer runs an algorithm that brings its own loop: a coroutine, a function that blocks, and what
lies between."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit_helpers import ReachedRay, within

import raylight as rl
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
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
