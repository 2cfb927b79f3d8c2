"""Decorators that turn a function into an agent."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, overload

from raylight.agent.litagent import LitAgent, RolloutResult
from raylight.agent.prompts import PromptTemplate
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import AgentSignatureError
from raylight.types import JsonObject, Rollout

logger = logging.getLogger(__name__)

BUILTIN_PARAMETERS = frozenset({"task", "rollout", "resources"})
"""Parameters that raylight fills itself. Resources cannot have these names."""
TYPED_PARAMETERS: dict[str, Callable[[Any], bool]] = {
    "llm": lambda resource: isinstance(resource, LLM) and not resource.tokenizer_only,
    "prompt_template": lambda resource: isinstance(resource, PromptTemplate),
    "tokenizer": lambda resource: isinstance(resource, LLM) and resource.tokenizer_only,
}
"""Parameters that also accept a resource of another name: the first one for which the test is true."""


class FunctionalLitAgent(LitAgent[Any]):
    """An agent made from a function, whose arguments are passed by name.

    The parameter `task` (or the first parameter, if none has this name) receives the task. `rollout` and
    `resources` receive the rollout and all resources. Every other parameter receives the resource of its
    name; `llm`, `prompt_template` and `tokenizer` also accept a resource of their type under another name.

    Args:
        declared: resources that the agent provides itself, by name.
        trained_agents: as in `LitAgent`.
        strip_proxy: replace a `ProxyLLM` by the plain model with the URL of the attempt.

    Raises:
        AgentSignatureError: the function takes no task, or has parameters that cannot be passed by name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        declared: NamedResources | None = None,
        trained_agents: str | None = None,
        strip_proxy: bool = True,
    ) -> None:
        # first, so that it overwrites no attribute set below
        functools.update_wrapper(self, function, updated=())
        super().__init__(trained_agents=trained_agents)
        self._function = function
        self._declared = dict(declared or {})
        self._strip_proxy = strip_proxy
        self._name = (
            getattr(function, "__name__", None)
            or getattr(unwrap_partial(function), "__name__", None)
            or repr(function)
        )
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(unwrap_partial(function)).__call__
        )
        if reserved := BUILTIN_PARAMETERS & self._declared.keys():
            raise AgentSignatureError(
                f"@rollout cannot declare a resource {', '.join(sorted(reserved))}; raylight fills these "
                "parameters itself, so choose another name"
            )
        parameters = _parameters(function, self._name)
        names = [p.name for p in parameters]
        self._task_name = "task" if "task" in names else names[0]
        self._optional = {p.name for p in parameters if p.default is not p.empty}
        self._names = [name for name in names if name != self._task_name]

    @property
    def declared_resources(self) -> NamedResources:
        return dict(self._declared)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the undecorated function."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the function, by value, or by its name if cloudpickle cannot send what it refers to."""
        settings = {
            "declared": self._declared,
            "trained_agents": self.trained_agents,
            "strip_proxy": self._strip_proxy,
        }
        if self._is_importable() and not _is_picklable(self._function):
            return (_import, (self._function.__module__, self._function.__qualname__, settings))
        return (_rebuild, (self._function, settings))

    def _is_importable(self) -> bool:
        """Return True if the agent is found under the name of its function in an imported module."""
        found: object = sys.modules.get(getattr(self._function, "__module__", None) or "__main__")
        for name in getattr(self._function, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        return found is self and self._function.__module__ != "__main__"

    def check(
        self, resources: Iterable[str], modes: Iterable[str] = (), *, more_may_come: bool = False
    ) -> None:
        super().check(resources, modes)
        available = {
            **dict.fromkeys(resources),
            **self._declared,
            **(resources if isinstance(resources, Mapping) else {}),
        }
        missing = [
            name for name in self._names if name not in self._optional and not self._can_fill(name, available)
        ]
        if missing and not more_may_come:
            raise AgentSignatureError(self._missing_message(missing, available))
        if missing:
            logger.warning(
                "%s, or let the algorithm add it before it enqueues a rollout",
                self._missing_message(missing, available),
            )
        for name in self._names:
            candidates = [
                other
                for other in available
                if name not in available
                and name in TYPED_PARAMETERS
                and TYPED_PARAMETERS[name](available[other])
            ]
            if len(candidates) > 1:
                logger.warning(
                    "the parameter %r of rollout function %s matches the resources %s and receives the "
                    "first; rename the parameter or the resource that is meant",
                    name,
                    self._name,
                    ", ".join(map(repr, candidates)),
                )

    def rollout(self, task: object, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        if self._async:
            raise AgentSignatureError(f"rollout function {self._name} is asynchronous; await rollout_async")
        return self._function(**self._arguments(task, resources, rollout))

    async def rollout_async(self, task: object, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        if not self._async:
            raise AgentSignatureError(f"rollout function {self._name} is not asynchronous; call rollout")
        return await self._function(**self._arguments(task, resources, rollout))

    @property
    def display_name(self) -> str:
        return f"rollout function {self._name}"

    def _method_title(self, name: str) -> str:
        return self.display_name

    def _method_for(self, mode: str | None) -> str:
        return "rollout_async" if self._async else "rollout"

    def _can_fill(self, name: str, resources: Mapping[str, object]) -> bool:
        return (
            name in BUILTIN_PARAMETERS
            or name in resources
            or (name in TYPED_PARAMETERS and any(map(TYPED_PARAMETERS[name], resources.values())))
        )

    def _arguments(self, task: object, resources: NamedResources, rollout: Rollout) -> dict[str, object]:
        builtin = {"task": task, "rollout": rollout, "resources": resources}
        arguments = {self._task_name: task}
        for name in self._names:
            if name in builtin:
                arguments[name] = builtin[name]
            elif self._can_fill(name, resources):
                arguments[name] = self._resource(name, resources, rollout)
            elif name not in self._optional:
                raise AgentSignatureError(self._missing_message([name], resources))
        return arguments

    def _resource(self, name: str, resources: NamedResources, rollout: Rollout) -> object:
        if name in resources:
            resource = resources[name]
        else:
            resource = next(filter(TYPED_PARAMETERS[name], resources.values()))
        if self._strip_proxy and isinstance(resource, LLM):
            return resource.with_attempted_rollout(rollout)
        return resource

    def _missing_message(self, missing: list[str], resources: Iterable[str]) -> str:
        names = ", ".join(sorted({*resources, *BUILTIN_PARAMETERS}))
        return (
            f"rollout function {self._name} needs {', '.join(map(repr, missing))}, but there is no such "
            f"resource; available: {names}. Declare it in @rollout(...), or pass it to the Trainer as an "
            "initial resource"
        )


def _rebuild(function: Callable[..., object], settings: JsonObject) -> FunctionalLitAgent:
    return FunctionalLitAgent(function, **settings)


def _import(module: str, qualname: str, settings: JsonObject) -> FunctionalLitAgent:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return FunctionalLitAgent(found._function, **settings)


_TRYING: ContextVar[bool] = ContextVar("raylight_trying_to_pickle", default=False)


def _is_picklable(function: Callable[..., object]) -> bool:
    """Return True if cloudpickle can send a function; also within this very question, to end recursion."""
    if _TRYING.get():
        return True
    import cloudpickle

    outer = _TRYING.set(True)
    try:
        cloudpickle.dumps(function)
    except Exception:  # whatever the function's globals raise
        return False
    finally:
        _TRYING.reset(outer)
    return True


def unwrap_partial(function: object) -> object:
    """Return the function inside nested `functools.partial` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _parameters(function: Callable[..., object], name: str) -> list[inspect.Parameter]:
    """Return the parameters of a rollout function, after checking that all can be passed by name."""
    bare = unwrap_partial(function)
    for yields in (inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        if yields(bare) or yields(type(bare).__call__):
            raise AgentSignatureError(f"@rollout: {name} yields; a rollout returns its reward once")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise AgentSignatureError(
            f"@rollout: the parameters of {name} cannot be inspected ({error}); wrap it in a function"
        ) from error
    unfillable = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    if not parameters or unfillable:
        raise AgentSignatureError(
            f"@rollout: {name} must take the task first and resources by name, such as (task, llm); its "
            f"parameters are ({', '.join(str(p) for p in parameters)})"
        )
    if parameters[0].name == "self":
        raise AgentSignatureError(
            f"@rollout: {name} is a method; write rollout(instance.{name}), or subclass LitAgent"
        )
    return parameters


_MISSING: object = object()


def _decorate(decorator: str, function: Any, **settings: Any) -> Any:
    """Return the agent of a function, or a decorator if no function is given."""
    if function is _MISSING:
        return functools.partial(_decorate, decorator, **settings)
    if not callable(function) or isinstance(function, type | LitAgent):
        raise AgentSignatureError(
            f"@{decorator} decorates a function, not {function!r:.80} of type {type(function).__name__}"
        )
    return FunctionalLitAgent(function, **settings)


@overload
def rollout(function: Callable[..., object], /) -> FunctionalLitAgent: ...


@overload
def rollout(
    *, trained_agents: str | None = None, **resources: object
) -> Callable[[Callable[..., Any]], FunctionalLitAgent]: ...


def rollout(function: object = _MISSING, /, *, trained_agents: str | None = None, **resources: object) -> Any:
    """Turn a function into an agent.

    Example:
        @rollout
        async def adder(task: dict, llm: LLM) -> float: ...

        @rollout(model=LLM(name="Qwen/Qwen3-0.6B"))
        def solver(task: dict, model: LLM) -> float: ...

    Args:
        trained_agents: as in `LitAgent`.
        resources: resources that the agent provides itself, by name.

    Raises:
        AgentSignatureError: the function takes no task, or has parameters that cannot be passed by name.
    """
    return _decorate("rollout", function, declared=resources, trained_agents=trained_agents)


@overload
def llm_rollout(function: Callable[..., object], /) -> FunctionalLitAgent: ...


@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[Callable[..., Any]], FunctionalLitAgent]: ...


def llm_rollout(function: object = _MISSING, /, *, strip_proxy: bool = True) -> Any:
    """Turn a function that takes the task and `llm` into an agent.

    Args:
        strip_proxy: replace a `ProxyLLM` by the plain model with the URL of the attempt.

    Raises:
        AgentSignatureError: as in `rollout`, or the function does not take `llm`.
    """
    if function is _MISSING:
        return functools.partial(llm_rollout, strip_proxy=strip_proxy)
    return _requiring("llm", _decorate("llm_rollout", function, strip_proxy=strip_proxy))


@overload
def prompt_rollout(function: Callable[..., object], /) -> FunctionalLitAgent: ...


@overload
def prompt_rollout() -> Callable[[Callable[..., Any]], FunctionalLitAgent]: ...


def prompt_rollout(function: object = _MISSING, /) -> Any:
    """Turn a function that takes the task and `prompt_template` into an agent.

    Raises:
        AgentSignatureError: as in `rollout`, or the function does not take `prompt_template`.
    """
    if function is _MISSING:
        return prompt_rollout
    return _requiring("prompt_template", _decorate("prompt_rollout", function))


def _requiring(name: str, agent: FunctionalLitAgent) -> FunctionalLitAgent:
    if name not in agent._names:
        raise AgentSignatureError(
            f"{agent.display_name} must take {name!r} in addition to the task; it takes "
            f"{', '.join([agent._task_name, *agent._names])}"
        )
    return agent
