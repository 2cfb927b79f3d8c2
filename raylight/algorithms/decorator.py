"""The decorator that makes an algorithm of a function."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from raylight.algorithms.base import Algorithm
from raylight.errors import ConfigError

DATASETS = ("train_dataset", "val_dataset")
GIVEN = ("store", "adapter", "llm_proxy", "initial_resources", *DATASETS)
"""Parameters that are filled; all others must have a default."""


class FunctionalAlgorithm(Algorithm):
    """An algorithm made of a function, whose parameters are filled by name.

    Where there is nothing to fill a parameter with, it keeps its default; without a default, `llm_proxy`, `initial_resources` and
    the datasets are None, and `store` and `adapter` are an error.

    Raises:
        ConfigError: the function has a parameter that cannot be filled by name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(
            self, function, updated=()
        )  # first, so that it overwrites nothing of our own
        bare = _bare(function)
        self._function = function
        self._name = getattr(function, "__name__", None) or getattr(bare, "__name__", None) or repr(function)
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(bare).__call__
        )
        parameters = _parameters(function, self._name)
        self._takes = {p.name: p.default is p.empty for p in parameters if p.name in GIVEN}
        """Whether it is required, for each parameter that is filled."""

    def is_async(self) -> bool:
        return self._async

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had not been decorated."""
        return self._function(*args, **kwargs)

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Awaitable[None] | None:
        """Call the function with what it asks for; an asynchronous one gives something to be awaited.

        Raises:
            TypeError: there is a dataset that the function does not take.
            ConfigError: it asks for a store or an adapter, and there is none.
        """
        datasets = {"train_dataset": train_dataset, "val_dataset": val_dataset}
        for name, dataset in datasets.items():
            if dataset is not None and name not in self._takes:
                raise TypeError(
                    f"{self._title} got a {name}, which it does not take; add the parameter, or give no {name}"
                )
        returned = self._function(**self._arguments(datasets))
        return returned if inspect.isawaitable(returned) else None

    def _arguments(self, datasets: dict[str, Any]) -> dict[str, Any]:
        there = {
            "store": self._store,
            "adapter": self._adapter,
            "llm_proxy": self._llm_proxy,
            "initial_resources": self._initial_resources,
            **datasets,
        }
        for name in ("store", "adapter"):
            if self._takes.get(name) and there[name] is None:
                raise self._lacks(name)
        return {
            name: there[name] for name, required in self._takes.items() if required or there[name] is not None
        }

    @property
    def _title(self) -> str:
        return f"algorithm function {self._name}"


def _bare(function: Any) -> Any:
    """What a partial function wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """The function's parameters, all of which can be filled or have a default."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"@algo: {name} yields; an algorithm runs once, from beginning to end")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"@algo: the parameters of {name} are not known ({error}); wrap it in a function"
        ) from error
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise ConfigError(
                f"@algo: {name} takes {p}, but parameters are filled by name; write which of {', '.join(GIVEN)} it takes"
            )
        if p.name not in GIVEN and p.default is p.empty:
            near = difflib.get_close_matches(p.name, GIVEN, n=1, cutoff=0.5)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"there are: {', '.join(GIVEN)}. Give it a default, or subclass Algorithm"
            )
            raise ConfigError(f"@algo: {name} asks for {p.name!r}, which nothing fills; {hint}")
    return parameters


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of a function, which asks by name for what it needs: `store`, `adapter`, `llm_proxy`, `initial_resources`,
    `train_dataset`, `val_dataset`.

    Example:
        @algo
        async def evaluate(*, store: StoreClient, train_dataset: list) -> None:
            queued = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in queued])

    Raises:
        ConfigError: it is no function, or it has a parameter that cannot be filled by name.
    """
    if not callable(function) or isinstance(function, type | Algorithm):
        raise ConfigError(
            f"@algo decorates a function, not {function!r:.80} of type {type(function).__name__}"
        )
    return FunctionalAlgorithm(function)
