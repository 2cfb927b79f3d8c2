"""Agents: a class to subclass, and the decorator that makes one of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from raylight.agent.resources import NamedResources
from raylight.errors import AgentSignatureError
from raylight.types import Rollout

Reward = float | int | dict[str, float] | None
"""What a rollout returns: a number, named rewards with the primary one first, or None if it scores nothing."""


class LitAgent:
    """An agent: subclass it and write `rollout` or `rollout_async`."""

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> Reward:
        """Run the agent on one task and return its reward. Runs in a thread."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout or rollout_async")

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Reward:
        """Run the agent on one task and return its reward. Runs on the runner's event loop."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout or rollout_async")

    @property
    def is_async(self) -> bool:
        return type(self).rollout_async is not LitAgent.rollout_async

    def check(self, resource_names: set[str]) -> None:
        """Say before the run starts whether the agent can be run with resources of these names.

        Raises:
            AgentSignatureError: it cannot.
        """
        name = type(self).__name__
        if not self.is_async and type(self).rollout is LitAgent.rollout:
            raise AgentSignatureError(f"{name} must define rollout or rollout_async")
        if not self.is_async and inspect.iscoroutinefunction(self.rollout):
            raise AgentSignatureError(f"{name}.rollout is asynchronous; call it rollout_async")


class FunctionalLitAgent(LitAgent):
    """An agent made of a function; its parameters are filled by name.

    `task` (or, where none is called so, the first parameter), `rollout` and `resources` are always there; every other parameter
    is a named resource, such as `llm`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = getattr(function, "__name__", repr(function))
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        parameters = list(inspect.signature(function).parameters.values())
        fixed = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
        if not parameters or fixed:
            raise AgentSignatureError(
                f"@rollout: {self._name} takes the task first and resources by name, such as (task, llm); "
                f"it has ({', '.join(str(p) for p in parameters)})"
            )
        names = [p.name for p in parameters]
        self._task_name = "task" if "task" in names else names[0]
        self._optional = {p.name for p in parameters if p.default is not p.empty}
        self._names = [name for name in names if name != self._task_name]
        functools.update_wrapper(self, function)

    @property
    def is_async(self) -> bool:
        return self._async

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had not been decorated."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (FunctionalLitAgent, (self._function,))

    def check(self, resource_names: set[str]) -> None:
        known = resource_names | {"rollout", "resources", "task"}
        missing = [name for name in self._names if name not in known and name not in self._optional]
        if missing:
            raise AgentSignatureError(
                f"rollout function {self._name} asks for {', '.join(map(repr, missing))}, which nothing fills; "
                f"there are: {', '.join(sorted(known))}"
            )

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> Reward:
        return self._function(**self._arguments(task, resources, rollout))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Reward:
        return await self._function(**self._arguments(task, resources, rollout))

    def _arguments(self, task: Any, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        available = {**resources, "rollout": rollout, "resources": resources, "task": task}
        named = {name: available[name] for name in self._names if name in available}
        return {self._task_name: task, **named}


def rollout(function: Callable[..., Any]) -> FunctionalLitAgent:
    """Make an agent of a function.

    Example:
        @rollout
        async def adder(task: dict, llm: LLM) -> float: ...

    Raises:
        AgentSignatureError: the function takes no task, or has parameters that cannot be filled by name.
    """
    if not callable(function):
        raise AgentSignatureError(f"@rollout decorates a function, not {type(function).__name__}")
    return FunctionalLitAgent(function)
