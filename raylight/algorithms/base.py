"""What every algorithm is: something that a Trainer gives a store and datasets to, and runs."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from raylight.agent.resources import LLM, NamedResources
from raylight.errors import ConfigError
from raylight.experience.batch import BatchReport
from raylight.store.client import StoreClient
from raylight.traces.adapters import TraceAdapter
from raylight.types import FinishedRollout


class RunContext(Protocol):
    """What an algorithm is given of its run, beside the store."""

    @property
    def secret(self) -> str:
        """The run's, from which the keys of attempts derive."""
        ...

    @property
    def trained_agents(self) -> str | None:
        """Regular expression for the agents whose calls are trained; None for all."""
        ...

    @property
    def folder(self) -> Path:
        """The run directory."""
        ...

    @property
    def continues(self) -> Path | None:
        """The `result_file` from which `run` is to go on; None if it begins anew."""
        ...

    @property
    def checkpoint(self) -> Path:
        """Folder for what was trained."""
        ...

    def model_path(self, model: str) -> str:
        """The folder of a model, which may be a hub name in the local cache.

        Raises:
            ModelNotFoundError: there is none.
        """
        ...

    def with_model(self, llm: LLM) -> NamedResources:
        """The run's resources, in which every open model is the given one."""
        ...

    def report_failures(self, finished: list[FinishedRollout]) -> None:
        """Tell of failed rollouts."""
        ...

    def check_scored(self, finished: list[FinishedRollout], failure_reward: float | None) -> None:
        """Tell of failed rollouts; raise when none gave a reward."""
        ...

    def describe(
        self, finished: list[FinishedRollout], content: BatchReport, seconds: float
    ) -> dict[str, float]:
        """Metrics of a batch of rollouts."""
        ...

    def stage(self, text: str) -> None:
        """What is going on now."""
        ...

    def note(self, text: str) -> None:
        """Something that a person should see."""
        ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step; step 0 is the validation before training."""
        ...


class AnyAlgorithm:
    """What a Trainer takes as its algorithm: one with a `run` of its own, or the settings of one that the Trainer's loop runs."""


class Algorithm(AnyAlgorithm):
    """An algorithm: subclass it and write `run`, synchronous or asynchronous.

    It enqueues rollouts in the store, waits for them and learns from what they left. What it needs for that is set by the Trainer
    before `run`, or by whoever runs it alone. A subclass need not call this `__init__`; an algorithm may be sent to another
    process, where it has all but its trainer.
    """

    serves_model: ClassVar[bool] = False
    """Whether `run` serves a model to the agents, so that an `LLM` among the resources needs no endpoint."""

    served_model: str | None = None
    """Folder or name of a model that the run is to serve to agents as it is, as `llm` or where an `LLM` has no endpoint."""

    result_file: ClassVar[str | None] = None
    """File of the run directory from which `run` can go on (`Trainer.fit(resume=...)`); None if it cannot."""

    _trainer: weakref.ReferenceType[Any] | None = None
    _store: StoreClient | None = None
    _adapter: TraceAdapter[Any] | None = None
    _llm_proxy: Any = None
    _initial_resources: NamedResources | None = None
    _run_context: RunContext | None = None

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Awaitable[None] | None:
        """Carry out the algorithm.

        A synchronous one is run in a thread of its own, so that it may block; it calls the store by `asyncio.run`. What it returns
        is awaited if it can be.

        Args:
            train_dataset: tasks to learn from; None if there are none.
            val_dataset: tasks to measure progress on; None if there are none.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run(train_dataset, val_dataset)")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def is_async(self) -> bool:
        """Whether `run` must be awaited."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: Any) -> None:
        """The trainer that runs this. It owns the algorithm, which therefore does not keep it alive."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """The trainer that runs this.

        Raises:
            ConfigError: there is none, or it is gone.
        """
        if self._trainer is None:
            raise self._lacks("trainer")
        trainer = self._trainer()
        if trainer is None:
            raise ConfigError(
                f"the trainer of {self._title} is gone; keep a reference to it for as long as the algorithm runs"
            )
        return trainer

    def set_store(self, store: StoreClient) -> None:
        """The store to enqueue rollouts in and to read them from."""
        self._store = store

    def get_store(self) -> StoreClient:
        """The store.

        Raises:
            ConfigError: there is none.
        """
        if self._store is None:
            raise self._lacks("store")
        return self._store

    def set_adapter(self, adapter: TraceAdapter[Any] | None) -> None:
        """What makes training data of the spans of an attempt."""
        self._adapter = adapter

    def get_adapter(self) -> TraceAdapter[Any]:
        """The adapter.

        Raises:
            ConfigError: there is none.
        """
        if self._adapter is None:
            raise self._lacks("adapter")
        return self._adapter

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        """What serves the model to agents; None if nothing does."""
        self._llm_proxy = llm_proxy

    def get_llm_proxy(self) -> Any:
        """What serves the model to agents; None if nothing does."""
        return self._llm_proxy

    def set_initial_resources(self, resources: NamedResources | None) -> None:
        """The named resources that agents begin with."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """The named resources that agents begin with; None if the user gave none."""
        return self._initial_resources

    def set_run_context(self, side: RunContext) -> None:
        """What it may use of its run, beside the store."""
        self._run_context = side

    def get_run_context(self) -> RunContext:
        """What this needs of its run.

        Raises:
            ConfigError: there is none.
        """
        if self._run_context is None:
            raise self._lacks("run_context")
        return self._run_context

    def total_steps(self, n_train: int) -> int:
        """Steps of the whole run for a training set of `n_train` tasks; 0 where only `run` knows."""
        return 0

    def resolved(self) -> dict[str, Any]:
        """Its settings, for the run directory's `config.yaml`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """All but the trainer and its run, which stay in their own process."""
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_trainer", "_run_context")
        }

    @property
    def _title(self) -> str:
        return type(self).__name__

    def _lacks(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._title} has no {what}; run it by a Trainer (Trainer(algorithm=...)), or call set_{what}(...) first"
        )


class FastAlgorithm(Algorithm):
    """An algorithm that is quick enough to develop an agent with, so that `Trainer.dev` runs it."""
