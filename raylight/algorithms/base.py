"""Base classes of algorithms, and the protocol of the run that a Trainer gives them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from raylight.agent.resources import NamedResources
from raylight.errors import ConfigError
from raylight.store.client import StoreClient
from raylight.traces.trace_adapter import TraceAdapter
from raylight.types import FinishedRollout, JsonObject


class RunContext(Protocol):
    """Parts of a run that an algorithm with its own loop may use, besides the store."""

    @property
    def folder(self) -> Path:
        """Run directory."""
        ...

    @property
    def resume_file(self) -> Path | None:
        """`Algorithm.result_file` of the run to resume; None for a new run."""
        ...

    @property
    def checkpoint(self) -> Path:
        """Folder for the trained model."""
        ...

    def model_path(self, model: str) -> str:
        """Return the folder of a model, given a folder or a name in the local Hugging Face cache.

        Raises:
            ModelNotFoundError: the model does not exist.
        """
        ...

    def report_failures(self, finished: list[FinishedRollout]) -> None:
        """Report failed rollouts to the user."""
        ...

    def stage(self, text: str) -> None:
        """Display the current stage of the run."""
        ...

    def note(self, text: str) -> None:
        """Display a message that the user should see."""
        ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step; step 0 is the validation before training."""
        ...


class BaseAlgorithm:
    """Base of everything that `Trainer(algorithm=...)` accepts.

    `Algorithm` has its own `run`; `PolicyAlgorithm` holds settings for the Trainer's loop.
    """

    def with_loop(self) -> BaseAlgorithm:
        """Return the algorithm that a Trainer runs: this one, if its settings choose no other loop."""
        return self


class Algorithm(BaseAlgorithm):
    """Algorithm with its own loop: subclass it and define `run`, synchronous or asynchronous.

    `run` enqueues rollouts in the store, waits for them and learns from their results. The Trainer sets the
    store, the adapter and the rest before it calls `run`; without a Trainer, the caller sets them. A subclass
    need not call `Algorithm.__init__`. An algorithm can be pickled; the copy lacks the trainer and the run
    context.
    """

    serves_model: ClassVar[bool] = False
    """True if `run` serves a model to the agents, so that an `LLM` among the resources needs no endpoint."""

    served_model: str | None = None
    """Folder or name of a model that the run serves unchanged, as `llm` or for every `LLM` without an
    endpoint."""

    result_file: ClassVar[str | None] = None
    """File in the run directory from which `run` can resume (`Trainer.fit(resume=...)`); None if it
    cannot."""

    _trainer: weakref.ReferenceType[object] | None = None
    _store: StoreClient | None = None
    _adapter: TraceAdapter[Any] | None = None
    _llm_proxy: Any = None
    _initial_resources: NamedResources | None = None
    _run_context: RunContext | None = None

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Awaitable[None] | None:
        """Run the algorithm.

        The Trainer runs a synchronous `run` in a separate thread, so it may block; it calls the store by
        `asyncio.run`. An awaitable return value is awaited.

        Args:
            train_dataset: training tasks, or None.
            val_dataset: validation tasks, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run(train_dataset, val_dataset)")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.run(*args, **kwargs)

    def is_async(self) -> bool:
        """Return True if `run` is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: object) -> None:
        """Set the trainer, which is referenced weakly because it owns the algorithm."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """Return the trainer that runs this algorithm.

        Raises:
            ConfigError: none is set, or it has been garbage-collected.
        """
        if self._trainer is None:
            raise self._missing("trainer")
        trainer = self._trainer()
        if trainer is None:
            raise ConfigError(
                f"the trainer of {self._title} has been garbage-collected; keep a reference to it while the "
                "algorithm runs"
            )
        return trainer

    def set_store(self, store: StoreClient) -> None:
        """Set the store in which rollouts are enqueued and read."""
        self._store = store

    def get_store(self) -> StoreClient:
        """Return the store.

        Raises:
            ConfigError: none is set.
        """
        if self._store is None:
            raise self._missing("store")
        return self._store

    def set_adapter(self, adapter: TraceAdapter[Any] | None) -> None:
        """Set the adapter that converts an attempt's spans into training data."""
        self._adapter = adapter

    def get_adapter(self) -> TraceAdapter[Any]:
        """Return the adapter.

        Raises:
            ConfigError: none is set.
        """
        if self._adapter is None:
            raise self._missing("adapter")
        return self._adapter

    def set_llm_proxy(self, llm_proxy: object) -> None:
        """Set the proxy that serves the model to agents, or None."""
        self._llm_proxy = llm_proxy

    def get_llm_proxy(self) -> Any:
        """Return the proxy that serves the model to agents, or None."""
        return self._llm_proxy

    def set_initial_resources(self, resources: NamedResources | None) -> None:
        """Set the named resources that agents receive at the start."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """Return the named resources that agents receive at the start; None if the user gave none."""
        return self._initial_resources

    def set_run_context(self, context: RunContext) -> None:
        """Set the parts of the run that the algorithm may use besides the store."""
        self._run_context = context

    def get_run_context(self) -> RunContext:
        """Return the run context.

        Raises:
            ConfigError: none is set.
        """
        if self._run_context is None:
            raise self._missing("run_context")
        return self._run_context

    def total_steps(self, n_train: int) -> int:
        """Return the number of steps for `n_train` training tasks; 0 if it is not known before `run`."""
        return 0

    def resolved(self) -> JsonObject:
        """Return the settings for `config.yaml` in the run directory."""
        return {}

    def __getstate__(self) -> dict[str, object]:
        """Return everything but the trainer and the run context, which stay in their process."""
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_trainer", "_run_context")
        }

    @property
    def _title(self) -> str:
        """Name of the algorithm in messages."""
        return type(self).__name__

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self._title} has no {name}; run it by a Trainer (Trainer(algorithm=...)), or call "
            f"set_{name}(...) first"
        )


class FastAlgorithm(Algorithm):
    """Algorithm that is fast enough for developing an agent; `Trainer.dev` accepts only these."""
