"""Names of arguments in agent-lightning."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from raylight.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def take_synonyms(values: Mapping[str, object], synonyms: Mapping[str, str]) -> dict[str, Any]:
    """Return keyword arguments under raylight's own names.

    Args:
        values: arguments by name. None under a synonym counts as not given.
        synonyms: raylight's name of an argument by its other name, such as `{"n_workers": "n_runners"}`.

    Raises:
        ConfigError: an argument is given under both names, with different values.
    """
    renamed = dict(values)
    for synonym, name in synonyms.items():
        value = renamed.pop(synonym, None)
        if value is None:
            continue
        own = renamed.get(name)
        # other values are compared by identity: the == of a dataset may raise or return an array
        if own is not None and own is not value and not (isinstance(own, int | str) and own == value):
            raise ConfigError(f"{name} and {synonym} mean the same; give one of them")
        renamed[name] = value
    return renamed


def accept_synonyms(**synonyms: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it also accepts agent-lightning's names of its arguments.

    With `@accept_synonyms(n_workers="n_runners")`, `n_workers=4` is passed on as `n_runners=4`. Synonyms are
    keywords only, and do not show in the signature. A call that gives an argument under both names, with
    different values, raises ConfigError.

    Args:
        synonyms: raylight's name of an argument by its other name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            positional = dict(zip(parameters, args, strict=False))
            if synonyms.keys().isdisjoint(kwargs) or not positional.keys().isdisjoint(kwargs):
                return function(*args, **kwargs)
            arguments = take_synonyms(positional | kwargs, synonyms)
            first = [arguments.pop(name) for name in positional]
            return function(*first, *args[len(first) :], **arguments)

        return call

    return decorate
