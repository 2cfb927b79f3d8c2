"""Decorator that turns a function into an algorithm."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from raylight.agent.decorators import unwrap_partial
from raylight.algorithms.base import Algorithm
from raylight.errors import ConfigError

DATASETS = ("train_dataset", "val_dataset")
PARAMETERS = ("store", "adapter", "llm_proxy", "initial_resources", *DATASETS)
"""Parameters that are passed to the function; any other needs a default."""


class FunctionalAlgorithm(Algorithm):
    """Algorithm made from a function, whose parameters are passed by name.

    A parameter with a default keeps it if no value is passed. Without a default, `llm_proxy`,
    `initial_resources` and the datasets are then None, and a missing `store` or `adapter` is an error.

    Raises:
        ConfigError: the function has a required parameter of another name, or one that cannot be passed by
            name.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        functools.update_wrapper(
            self, function, updated=()
        )  # first, so that it overwrites no attribute set below
        bare = unwrap_partial(function)
        self._function = function
        self._name = getattr(function, "__name__", None) or getattr(bare, "__name__", None) or repr(function)
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(bare).__call__
        )
        parameters = _check_parameters(function, self._name)
        self._required = {p.name: p.default is p.empty for p in parameters if p.name in PARAMETERS}
        """For each parameter that is passed: True if it has no default."""

    def is_async(self) -> bool:
        return self._async

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the undecorated function."""
        return self._function(*args, **kwargs)

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Awaitable[None] | None:
        """Call the function with its parameters; return its awaitable if it is asynchronous.

        Raises:
            TypeError: a dataset is given that the function has no parameter for.
            ConfigError: the function requires a store or an adapter, and none is set.
        """
        datasets = {"train_dataset": train_dataset, "val_dataset": val_dataset}
        for name, dataset in datasets.items():
            if dataset is not None and name not in self._required:
                raise TypeError(
                    f"{self._title} has no parameter {name}, but a {name} was given; add the parameter, or "
                    f"leave out the {name}"
                )
        returned = self._function(**self._arguments(datasets))
        return returned if inspect.isawaitable(returned) else None

    def _arguments(self, datasets: dict[str, object]) -> dict[str, object]:
        values = {
            "store": self._store,
            "adapter": self._adapter,
            "llm_proxy": self._llm_proxy,
            "initial_resources": self._initial_resources,
            **datasets,
        }
        for name in ("store", "adapter"):
            if self._required.get(name) and values[name] is None:
                raise self._missing(name)
        return {
            name: values[name]
            for name, required in self._required.items()
            if required or values[name] is not None
        }

    @property
    def _title(self) -> str:
        return f"algorithm function {self._name}"


def _check_parameters(function: Callable[..., object], name: str) -> list[inspect.Parameter]:
    """Return the function's parameters, after checking that each can be passed or has a default."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"@algo: {name} is a generator function; write a plain or an async function without yield"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"@algo: {name} has no readable signature ({error}); wrap it in a Python function"
        ) from error
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise ConfigError(
                f"@algo: {name} has the parameter {p}, but parameters are passed by name; use any of "
                f"{', '.join(PARAMETERS)}"
            )
        if p.name not in PARAMETERS and p.default is p.empty:
            nearest = difflib.get_close_matches(p.name, PARAMETERS, n=1, cutoff=0.5)
            hint = (
                f"did you mean {nearest[0]!r}?"
                if nearest
                else f"the known ones are {', '.join(PARAMETERS)}; give it a default, or subclass Algorithm"
            )
            raise ConfigError(f"@algo: {name} requires {p.name!r}, which is not passed; {hint}")
    return parameters


def algo(function: Callable[..., object]) -> FunctionalAlgorithm:
    """Decorator that turns a function into an algorithm.

    The function receives the following that it has parameters for: `store`, `adapter`, `llm_proxy`,
    `initial_resources`, `train_dataset`, `val_dataset`.

    Example:
        @algo
        async def evaluate(*, store: StoreClient, train_dataset: list) -> None:
            queued = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
            await store.wait_until_decided(rollout_ids=[rollout.rollout_id for rollout in queued])

    Raises:
        ConfigError: it is not a function, or has a required parameter of another name.
    """
    if not callable(function) or isinstance(function, type | Algorithm):
        raise ConfigError(
            f"@algo decorates a function, and got {function!r:.80} of type {type(function).__name__}"
        )
    return FunctionalAlgorithm(function)
