"""Hooks: code of the user's around every rollout that a runner makes."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
from collections.abc import Iterable
from typing import Any

from raylight.agent.attributes import exception_message
from raylight.errors import HookError
from raylight.traces.rewards import find_final_reward

logger = logging.getLogger(__name__)

_ALWAYS = ("agent", "runner", "tracer", "rollout")
HOOK_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "on_rollout_start": _ALWAYS,
    "on_trace_start": _ALWAYS,
    "on_trace_end": (*_ALWAYS, "spans"),
    "on_rollout_end": (*_ALWAYS, "spans"),
}
"""What a hook's method may take at each event."""


class Hook:
    """Base of hooks: override what you need.

    A method takes any of these by keyword, in any order, and may be synchronous (it then holds up the runner's other rollouts)
    or asynchronous: `agent`, `runner`, `tracer`, `rollout`; at the two ends also `spans`, those of the attempt so far.
    """

    strict: bool = False
    """True fails the rollout when the hook fails; otherwise that is only logged."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Before an attempt begins."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """After tracing began, before the agent is called."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any, spans: Any) -> None:
        """After the agent returned or raised, while its trace is open; emitters can still be used."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any, spans: Any) -> None:
        """After the attempt, before it is decided: a reward emitted here still counts."""


class LoggingHook(Hook):
    """Logs the beginning and the end of every rollout.

    Args:
        level: of the log records.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        self._level = level

    def on_rollout_start(self, *, rollout: Any) -> None:  # type: ignore[override]  # a hook takes what it needs
        logger.log(self._level, "%s begins, mode %s", _title(rollout), rollout.mode)

    def on_rollout_end(self, *, rollout: Any, spans: Any) -> None:  # type: ignore[override]
        logger.log(
            self._level,
            "%s ends with %d spans, reward %s",
            _title(rollout),
            len(spans),
            find_final_reward(spans),
        )


def _title(rollout: Any) -> str:
    attempt = getattr(rollout, "attempt", None)
    return f"rollout {rollout.rollout_id}" + (f", attempt {attempt.attempt_id}" if attempt else "")


class HookDispatcher:
    """Calls hooks in their order, each with the arguments that it takes.

    Args:
        hooks: instances of `Hook`, or of any class with at least one of its methods.

    Raises:
        HookError: something is no hook, has a method that is none of a hook's, or takes an argument that there is not.
    """

    def __init__(self, hooks: Iterable[Any] | Any = ()) -> None:
        given = [hooks] if isinstance(hooks, Hook) else list(hooks or ())
        self._calls: dict[str, list[tuple[Any, frozenset[str]]]] = {event: [] for event in HOOK_ARGUMENTS}
        for hook in given:
            _check(hook)
            for event in HOOK_ARGUMENTS:
                method = getattr(hook, event, None)
                if method is not None and getattr(method, "__func__", None) is not getattr(Hook, event):
                    self._calls[event].append((hook, _accepted_arguments(hook, event)))

    def __bool__(self) -> bool:
        """Whether there is anything to call."""
        return any(self._calls.values())

    async def call(self, event: str, /, **available: Any) -> None:
        """Call the hooks of an event. One that fails is logged, and the others are called all the same.

        Args:
            available: what `HOOK_ARGUMENTS` lists for the event.

        Raises:
            HookError: a strict hook failed; its exception is the cause.
        """
        failed: list[tuple[str, BaseException]] = []
        for hook, wanted in self._calls[event]:
            name = f"{type(hook).__name__}.{event}"
            arguments = {key: available[key] for key in wanted}
            try:
                returned = getattr(hook, event)(**arguments)
                if inspect.isawaitable(returned):
                    await returned
            except BaseException as error:  # the hook is the user's code, and must not end the runner
                if _is_cancellation(error):
                    raise
                logger.exception("the hook %s failed", name)
                if getattr(hook, "strict", False):
                    failed.append((name, error))
        if failed:
            said = "; ".join(
                f"{name}: {type(error).__name__}: {exception_message(error)}" for name, error in failed
            )
            raise HookError(f"a strict hook failed: {said}") from failed[0][1]


def _is_cancellation(error: BaseException) -> bool:
    """Whether the task that called the hook is cancelled or closed, which is no failure of the hook."""
    task = asyncio.current_task()
    return isinstance(error, GeneratorExit) or (
        isinstance(error, asyncio.CancelledError) and bool(task and task.cancelling())
    )


def _check(hook: Any) -> None:
    """Refuse what would never be called."""
    if isinstance(hook, type):
        raise HookError(f"hooks takes instances; write {hook.__name__}() instead of {hook.__name__}")
    title = type(hook).__name__
    if not any(callable(getattr(hook, event, None)) for event in HOOK_ARGUMENTS):
        raise HookError(f"{title} is no hook; define one of {', '.join(HOOK_ARGUMENTS)}")
    for name in dir(type(hook)):
        near = difflib.get_close_matches(name, HOOK_ARGUMENTS, 1, 0.8)
        if name.startswith("on_") and name not in HOOK_ARGUMENTS and near:
            raise HookError(
                f"{title}.{name} is never called; is {near[0]} meant? The events are {', '.join(HOOK_ARGUMENTS)}"
            )


def _accepted_arguments(hook: Any, event: str) -> frozenset[str]:
    """Names of the arguments to call a hook's method with."""
    title = f"{type(hook).__name__}.{event}"
    available = HOOK_ARGUMENTS[event]
    wanted: set[str] = set()
    for parameter in inspect.signature(getattr(hook, event)).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return frozenset(available)
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise HookError(f"{title} takes {parameter.name!r} by position only; hooks are called by keyword")
        if parameter.name in available:
            wanted.add(parameter.name)
        elif parameter.default is parameter.empty:
            raise HookError(
                f"{title} takes {parameter.name!r}, which there is not; there are {', '.join(available)}"
            )
    return frozenset(wanted)
