"""Runner and Trainer of the running rollout, as an agent sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from raylight.errors import OutsideRolloutError
from raylight.traces.tracer import Tracer


@dataclass(frozen=True)
class TrainerView:
    """The settings of the Trainer that reach the runner's process; the Trainer itself is in another one."""

    tracer: Tracer
    hooks: tuple[Any, ...] = ()
    n_runners: int = 1
    max_rollouts: int | None = None


@dataclass(frozen=True)
class RolloutScope:
    """Objects that execute the running rollout."""

    runner: Any = None
    trainer: TrainerView | None = None


_SCOPE: ContextVar[RolloutScope | None] = ContextVar("raylight_rollout_scope", default=None)


@contextlib.contextmanager
def rollout_scope(scope: RolloutScope) -> Iterator[None]:
    """Make a scope the current one, in this context and in its copies."""
    outer = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(outer)


class InsideRollout:
    """Attribute that an agent has inside a rollout. An attribute that the agent sets itself precedes it."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, agent: Any, owner: type | None = None) -> Any:
        if agent is None:
            return self
        value = self._read()
        if value is None:
            raise OutsideRolloutError(
                f"{type(agent).__name__}.{self._name} exists only inside a rollout; read it in the agent's "
                "rollout method or in a hook"
            )
        return value


def current_runner() -> Any:
    """Return the runner of the running rollout; None outside a rollout."""
    scope = _SCOPE.get()
    return None if scope is None else scope.runner


def current_trainer() -> TrainerView | None:
    """Return the Trainer's settings in the running rollout; None outside a rollout."""
    scope = _SCOPE.get()
    return None if scope is None else scope.trainer
