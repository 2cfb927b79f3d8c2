"""Hooks: the user's code that a runner calls around every rollout."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
from collections.abc import Iterable
from typing import Any

from raylight.agent.attributes import exception_message
from raylight.errors import HookError
from raylight.traces.reward_spans import find_final_reward
from raylight.types import Rollout, Span

logger = logging.getLogger(__name__)

_COMMON = ("agent", "runner", "tracer", "rollout")
HOOK_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "on_rollout_start": _COMMON,
    "on_trace_start": _COMMON,
    "on_trace_end": (*_COMMON, "spans"),
    "on_rollout_end": (*_COMMON, "spans"),
}
"""Arguments that a hook's method may take, by event."""


class Hook:
    """Base class of hooks: override the methods that are needed.

    A method takes any of these keyword arguments, in any order: `agent`, `runner`, `tracer`, `rollout`, and
    at the two ends also `spans`, the spans of the attempt so far. It may be asynchronous. A synchronous
    method blocks the runner's other rollouts.
    """

    strict: bool = False
    """True if an error in the hook fails the rollout; otherwise it is only logged."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Called before an attempt begins."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Called after tracing has begun, before the agent is called."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any, spans: Any) -> None:
        """Called after the agent has returned or raised. The trace is still open, so emitters work."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any, spans: Any) -> None:
        """Called after the attempt, before its outcome is decided: a reward emitted here still counts."""


class LoggingHook(Hook):
    """Hook that logs the beginning and the end of every rollout.

    Args:
        level: level of the log records.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        self._level = level

    def on_rollout_start(self, *, rollout: Rollout) -> None:  # type: ignore[override]  # a hook takes only the arguments it needs
        logger.log(self._level, "%s begins, mode %s", _title(rollout), rollout.mode)

    def on_rollout_end(self, *, rollout: Rollout, spans: list[Span]) -> None:  # type: ignore[override]
        logger.log(
            self._level,
            "%s ends with %d spans, reward %s",
            _title(rollout),
            len(spans),
            find_final_reward(spans),
        )


def _title(rollout: Rollout) -> str:
    attempt = getattr(rollout, "attempt", None)
    return f"rollout {rollout.rollout_id}" + (f", attempt {attempt.attempt_id}" if attempt else "")


class HookDispatcher:
    """Calls hooks in order, each with the arguments that it takes.

    Args:
        hooks: instances of `Hook`, or of any class with at least one of its methods.

    Raises:
        HookError: an object is not a hook, a method name is misspelt, or a method takes an unknown argument.
    """

    def __init__(self, hooks: Iterable[object] | Hook = ()) -> None:
        instances = [hooks] if isinstance(hooks, Hook) else list(hooks or ())
        self._calls: dict[str, list[tuple[object, frozenset[str]]]] = {event: [] for event in HOOK_ARGUMENTS}
        for hook in instances:
            _check(hook)
            for event in HOOK_ARGUMENTS:
                method = getattr(hook, event, None)
                if method is not None and getattr(method, "__func__", None) is not getattr(Hook, event):
                    self._calls[event].append((hook, _accepted_arguments(hook, event)))

    def __bool__(self) -> bool:
        """Return True if there is a hook to call."""
        return any(self._calls.values())

    async def call(self, event: str, /, **available: object) -> None:
        """Call the hooks of an event. An error in one is logged, and the others are still called.

        Args:
            event: a key of `HOOK_ARGUMENTS`.
            available: the arguments that `HOOK_ARGUMENTS` lists for the event.

        Raises:
            HookError: a strict hook failed; its exception is the cause.
        """
        failed: list[tuple[str, BaseException]] = []
        for hook, accepted in self._calls[event]:
            name = f"{type(hook).__name__}.{event}"
            arguments = {key: available[key] for key in accepted}
            try:
                returned = getattr(hook, event)(**arguments)
                if inspect.isawaitable(returned):
                    await returned
            except BaseException as error:  # of the user's code, which must not end the runner
                if _is_cancellation(error):
                    raise
                logger.exception("the hook %s failed", name)
                if getattr(hook, "strict", False):
                    failed.append((name, error))
        if failed:
            reasons = "; ".join(
                f"{name}: {type(error).__name__}: {exception_message(error)}" for name, error in failed
            )
            raise HookError(f"a strict hook failed: {reasons}") from failed[0][1]


def _is_cancellation(error: BaseException) -> bool:
    """Return True if the task that called the hook was cancelled or closed, not the hook itself."""
    task = asyncio.current_task()
    return isinstance(error, GeneratorExit) or (
        isinstance(error, asyncio.CancelledError) and bool(task and task.cancelling())
    )


def _check(hook: object) -> None:
    """Reject objects with methods that would never be called."""
    if isinstance(hook, type):
        raise HookError(f"hooks takes instances, not the class {hook.__name__}; write {hook.__name__}()")
    title = type(hook).__name__
    if not any(callable(getattr(hook, event, None)) for event in HOOK_ARGUMENTS):
        raise HookError(f"{title} is not a hook; define one of {', '.join(HOOK_ARGUMENTS)}")
    for name in dir(type(hook)):
        nearest = difflib.get_close_matches(name, HOOK_ARGUMENTS, 1, 0.8)
        if name.startswith("on_") and name not in HOOK_ARGUMENTS and nearest:
            raise HookError(
                f"{title}.{name} is never called; did you mean {nearest[0]}? The events are "
                f"{', '.join(HOOK_ARGUMENTS)}"
            )


def _accepted_arguments(hook: object, event: str) -> frozenset[str]:
    """Return the names of the arguments that a hook's method takes."""
    title = f"{type(hook).__name__}.{event}"
    available = HOOK_ARGUMENTS[event]
    accepted: set[str] = set()
    for parameter in inspect.signature(getattr(hook, event)).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return frozenset(available)
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise HookError(f"{title} takes {parameter.name!r} by position only; make it a keyword argument")
        if parameter.name in available:
            accepted.add(parameter.name)
        elif parameter.default is parameter.empty:
            raise HookError(
                f"{title} takes the unknown argument {parameter.name!r}; available: {', '.join(available)}"
            )
    return frozenset(accepted)
