"""The class of agents."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from raylight.agent.resources import NamedResources
from raylight.errors import AgentSignatureError
from raylight.types import Rollout, Span, SpanCoreFields

RolloutResult = (
    float | int | dict[str, float] | list[Span] | list[SpanCoreFields] | list[Any] | Rollout | None
)
"""What a rollout returns: a number; named rewards with the primary one first; spans (of raylight, or OpenTelemetry's ReadableSpan);
a Rollout with `metadata["reward"]`; or None, if it emits its rewards or scores nothing."""
Task = TypeVar("Task")

_TRAIN = ("training_rollout_async", "training_rollout", "rollout_async", "rollout")
_VALIDATION = ("validation_rollout_async", "validation_rollout", "rollout_async", "rollout")
"""Methods in the order in which they are looked for; the first that the subclass defines is called."""


class LitAgent(Generic[Task]):
    """An agent: subclass it and write `rollout` or `rollout_async`.

    Where training differs from validation, write `training_rollout` and `validation_rollout` (or their `_async` forms) too. All are
    called with the task first and `resources` and `rollout` by keyword.

    Args:
        trained_agents: a regular expression; where a rollout has several agents, only calls of those whose name it finds are
            trained. None trains all.

    A subclass need not call this `__init__`.
    """

    trained_agents: str | None = None

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents
        _check_pattern(self)

    def rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the agent on one task and return its reward. Runs in a thread."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout or rollout_async")

    async def rollout_async(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the agent on one task and return its reward. Runs on the runner's event loop."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout or rollout_async")

    def training_rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """`rollout` of a task that is trained on."""
        return self.rollout(task, resources=resources, rollout=rollout)

    async def training_rollout_async(
        self, task: Task, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """`rollout_async` of a task that is trained on."""
        return await self.rollout_async(task, resources=resources, rollout=rollout)

    def validation_rollout(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """`rollout` of a task on which progress is measured."""
        return self.rollout(task, resources=resources, rollout=rollout)

    async def validation_rollout_async(
        self, task: Task, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """`rollout_async` of a task on which progress is measured."""
        return await self.rollout_async(task, resources=resources, rollout=rollout)

    # what the runner and the Trainer use

    @property
    def declared_resources(self) -> NamedResources:
        """Resources that the agent brings along: the initial ones, where the Trainer is not given others of the same names."""
        return {}

    def is_async_for(self, mode: str | None) -> bool:
        """Whether a rollout of this mode is a coroutine: then `call_async` runs it, otherwise `call`.

        Raises:
            AgentSignatureError: the agent has no method for this mode.
        """
        return self._method_for(mode).endswith("_async")

    @property
    def is_async(self) -> bool:
        """`is_async_for` training."""
        return self.is_async_for("train")

    def call(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the synchronous method for the rollout's mode.

        Raises:
            AgentSignatureError: there is none, or it gives something to be awaited.
        """
        name = self._method_for(rollout.mode)
        returned = getattr(self, name)(task, resources=resources, rollout=rollout)
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise AgentSignatureError(
                f"{self._where(name)} returns something to be awaited; make it `async def` ({name}_async, as a method)"
            )
        return returned

    async def call_async(self, task: Task, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Run the asynchronous method for the rollout's mode.

        Raises:
            AgentSignatureError: there is none, or it gives nothing to be awaited.
        """
        name = self._method_for(rollout.mode)
        returned = getattr(self, name)(task, resources=resources, rollout=rollout)
        if not inspect.isawaitable(returned):
            raise AgentSignatureError(
                f"{self._where(name)} is not asynchronous; call it {name.removesuffix('_async')}"
            )
        return await returned

    def check(
        self, resources: Iterable[str], modes: Iterable[str] = (), *, more_may_come: bool = False
    ) -> None:
        """Say before the run starts whether the agent can be run.

        Args:
            resources: the resources that there will be; their names alone will do, but a dict allows choosing them by type.
            modes: the modes in which rollouts will be made; if empty, one for which the agent has a method must do.
            more_may_come: the algorithm may add resources, so that one that is not there yet is only logged.

        Raises:
            AgentSignatureError: it cannot.
        """
        _check_pattern(self)
        for name in {self._method_for(mode) for mode in modes or [self._any_mode()]}:
            method = getattr(self, name)
            if not name.endswith("_async") and inspect.iscoroutinefunction(method):
                raise AgentSignatureError(f"{self._where(name)} is asynchronous; call it {name}_async")
            if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
                raise AgentSignatureError(f"{self._where(name)} yields; a rollout returns its reward once")
            self._check_parameters(name)

    def _check_parameters(self, name: str) -> None:
        try:
            signature = inspect.signature(getattr(self, name))
        except (TypeError, ValueError):  # of a callable written in C, which checks its arguments itself
            return
        try:
            signature.bind(None, resources=None, rollout=None)
        except TypeError as error:
            raise AgentSignatureError(
                f"{self._where(name)} has the parameters ({', '.join(signature.parameters)}); it is called with the task first, "
                f"and resources and rollout by keyword: {error}"
            ) from None

    @property
    def display_name(self) -> str:
        return type(self).__name__

    def _where(self, name: str) -> str:
        return f"{self.display_name}.{name}"

    def _any_mode(self) -> str:
        return "train" if self._defined(_TRAIN) else "val"

    def _defined(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if getattr(type(self), name) is not getattr(LitAgent, name)]

    def _method_for(self, mode: str | None) -> str:
        """Name of the method that runs a rollout of this mode: training for "train", validation for anything else."""
        names = _TRAIN if mode == "train" else _VALIDATION
        defined = self._defined(names)
        if not defined:
            what = "training_rollout" if mode == "train" else "validation_rollout"
            raise AgentSignatureError(
                f"{self.display_name} must define rollout or rollout_async (or {what}, for rollouts of mode {mode!r})"
            )
        return defined[0]


def _check_pattern(agent: LitAgent) -> None:
    if agent.trained_agents is None:
        return
    try:
        re.compile(agent.trained_agents)
    except (re.error, TypeError) as error:
        raise AgentSignatureError(
            f"trained_agents={agent.trained_agents!r} is no regular expression: {error}"
        ) from error
