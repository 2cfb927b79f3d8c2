"""Base class of agents, and the runner and Trainer of the running rollout as an agent sees them."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raylight.agent.resources import NamedResources
from raylight.errors import AgentSignatureError, OutsideRolloutError
from raylight.traces.tracer import Tracer, get_active_tracer
from raylight.types import Rollout, Span, SpanCoreFields


@dataclass(frozen=True)
class TrainerView:
    """The settings of the Trainer that reach the runner's process; the Trainer itself is in another one."""

    tracer: Tracer
    hooks: tuple[object, ...] = ()
    n_runners: int = 1
    max_rollouts: int | None = None


@dataclass(frozen=True)
class RolloutScope:
    """Objects that execute the running rollout."""

    runner: Any = None
    trainer: TrainerView | None = None

    @property
    def tracer(self) -> Tracer | None:
        return get_active_tracer()


_OUTSIDE = RolloutScope()
_SCOPE: ContextVar[RolloutScope] = ContextVar("raylight_rollout_scope", default=_OUTSIDE)


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

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, agent: object, owner: type | None = None) -> Any:
        if agent is None:
            return self
        value = getattr(_SCOPE.get(), self._name)
        if value is None:
            raise OutsideRolloutError(
                f"{type(agent).__name__}.{self._name} exists only inside a rollout; read it in the agent's "
                "rollout method or in a hook"
            )
        return value


RolloutResult = (
    float | int | dict[str, float] | list[Span] | list[SpanCoreFields] | list[Any] | Rollout | None
)
"""Result of a rollout.

A number; named rewards with the primary one first; spans (raylight's, or OpenTelemetry's ReadableSpan); a
Rollout with `metadata["reward"]`; or None, if the agent emits its rewards or has none.
"""
Task = TypeVar("Task")

_TRAIN = ("training_rollout_async", "training_rollout", "rollout_async", "rollout")
_VALIDATION = ("validation_rollout_async", "validation_rollout", "rollout_async", "rollout")
"""Names of methods in order of preference: the first that the subclass defines is called."""


class LitAgent(Generic[Task]):
    """Base class of agents. A subclass defines `rollout` or `rollout_async`.

    It may define `training_rollout` and `validation_rollout` (or their `_async` forms) where the two differ.
    All are called with the task as positional argument and with `resources` and `rollout` as keywords. A
    subclass need not call this `__init__`.

    Args:
        trained_agents: regular expression that is searched in the names of a rollout's agents. Only calls of
            matching agents are trained on. None: all.

    Raises:
        AgentSignatureError: `trained_agents` is not a regular expression.
    """

    trained_agents: str | None = None
    tracer = InsideRollout()
    """Tracer of the running rollout; outside a rollout an OutsideRolloutError."""
    runner = InsideRollout()
    """Runner of the running rollout."""
    trainer = InsideRollout()
    """Settings of the Trainer in the running rollout: `tracer`, `hooks`, `n_runners` and `max_rollouts`."""

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents
        _check_pattern(self)

    def rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the agent on one task and return its reward. Called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout or rollout_async")

    async def rollout_async(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the agent on one task and return its reward. Called on the runner's event loop."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout or rollout_async")

    def training_rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the agent on a training task. Default: `rollout`."""
        return self.rollout(task, resources=resources, rollout=rollout)

    async def training_rollout_async(
        self, task: Task, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """Run the agent on a training task. Default: `rollout_async`."""
        return await self.rollout_async(task, resources=resources, rollout=rollout)

    def validation_rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the agent on a validation task. Default: `rollout`."""
        return self.rollout(task, resources=resources, rollout=rollout)

    async def validation_rollout_async(
        self, task: Task, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """Run the agent on a validation task. Default: `rollout_async`."""
        return await self.rollout_async(task, resources=resources, rollout=rollout)

    # used by the runner and the Trainer

    @property
    def declared_resources(self) -> NamedResources:
        """Resources that the agent provides itself; the Trainer's initial resources take precedence."""
        return {}

    def is_async_for(self, mode: str | None) -> bool:
        """Return True if `call_async` runs rollouts of this mode, and False if `call` does.

        Raises:
            AgentSignatureError: the agent has no method for this mode.
        """
        return self._method_for(mode).endswith("_async")

    @property
    def is_async(self) -> bool:
        """True if training rollouts are asynchronous."""
        return self.is_async_for("train")

    def call(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the synchronous method for the rollout's mode.

        Raises:
            AgentSignatureError: the method does not exist, or it returns an awaitable.
        """
        name = self._method_for(rollout.mode)
        returned = getattr(self, name)(task, resources=resources, rollout=rollout)
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise AgentSignatureError(
                f"{self._method_title(name)} returns an awaitable; make it `async def` ({name}_async, as a "
                "method)"
            )
        return returned

    async def call_async(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the asynchronous method for the rollout's mode.

        Raises:
            AgentSignatureError: the method does not exist, or it does not return an awaitable.
        """
        name = self._method_for(rollout.mode)
        returned = getattr(self, name)(task, resources=resources, rollout=rollout)
        if not inspect.isawaitable(returned):
            raise AgentSignatureError(
                f"{self._method_title(name)} is not asynchronous; rename it to {name.removesuffix('_async')}"
            )
        return await returned

    def check(
        self, resources: Iterable[str], modes: Iterable[str] = (), *, more_may_come: bool = False
    ) -> None:
        """Check before a run starts that the agent can be run.

        Args:
            resources: names of the available resources, or a dict of them, so that they can be matched by
                type too.
            modes: modes of the planned rollouts. If empty, any one mode suffices.
            more_may_come: True if the algorithm may add resources: then a missing one is only logged.

        Raises:
            AgentSignatureError: a method or a resource is missing, or a signature does not fit.
        """
        _check_pattern(self)
        for name in {self._method_for(mode) for mode in modes or [self._any_mode()]}:
            method = getattr(self, name)
            if not name.endswith("_async") and inspect.iscoroutinefunction(method):
                raise AgentSignatureError(
                    f"{self._method_title(name)} is asynchronous; rename it to {name}_async"
                )
            if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
                raise AgentSignatureError(
                    f"{self._method_title(name)} yields; a rollout returns its reward once"
                )
            self._check_parameters(name)

    def _check_parameters(self, name: str) -> None:
        try:
            signature = inspect.signature(getattr(self, name))
        except (TypeError, ValueError):  # written in C: it checks its arguments itself
            return
        try:
            signature.bind(None, resources=None, rollout=None)
        except TypeError as error:
            raise AgentSignatureError(
                f"{self._method_title(name)} has the parameters ({', '.join(signature.parameters)}); it is "
                f"called with the task first, and resources and rollout by keyword: {error}"
            ) from None

    @property
    def display_name(self) -> str:
        """Name of the agent in messages."""
        return type(self).__name__

    def _method_title(self, name: str) -> str:
        return f"{self.display_name}.{name}"

    def _any_mode(self) -> str:
        return "train" if self._defined(_TRAIN) else "val"

    def _defined(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if getattr(type(self), name) is not getattr(LitAgent, name)]

    def _method_for(self, mode: str | None) -> str:
        """Return the name of the method for a mode; modes other than "train" count as validation."""
        names = _TRAIN if mode == "train" else _VALIDATION
        defined = self._defined(names)
        if not defined:
            alternative = "training_rollout" if mode == "train" else "validation_rollout"
            raise AgentSignatureError(
                f"{self.display_name} must define rollout or rollout_async (or {alternative}, for rollouts "
                f"of mode {mode!r})"
            )
        return defined[0]


def _check_pattern(agent: LitAgent) -> None:
    if agent.trained_agents is None:
        return
    try:
        re.compile(agent.trained_agents)
    except (re.error, TypeError) as error:
        raise AgentSignatureError(
            f"trained_agents={agent.trained_agents!r} is not a regular expression: {error}"
        ) from error
