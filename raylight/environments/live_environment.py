"""An environment of one rollout: its class as TRL's `environment_factory` takes it, its methods as tools, its
reward and its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from raylight.agent.attributes import exception_message
from raylight.environments.tool_loop import MAX_RESULT, answer_calls, call_tool, cut_result
from raylight.errors import (
    AgentSignatureError,
    ConfigError,
    EnvironmentUnavailableError,
    RewardTypeError,
    SandboxUnavailableError,
    ToolTimeoutError,
)
from raylight.traces.reward_spans import named_rewards
from raylight.types import JsonObject

logger = logging.getLogger(__name__)

Factory = Callable[[], object]
"""A class, or another callable without arguments that returns an environment."""
NOT_TOOLS = ("reset", "get_reward", "reward", "close")
"""Public methods that are not tools."""


def instance_type(factory: Factory) -> type:
    """Return the class of a factory's environments. A factory that is not a class is called once.

    Raises:
        AgentSignatureError: it cannot be called without arguments, or its environments have no `reset`.
    """
    if not callable(factory):
        raise AgentSignatureError(
            "rl.environments.environment takes a class or a function that returns an environment, not "
            f"{factory!r:.80}"
        )
    name = getattr(factory, "__name__", repr(factory))
    try:
        with contextlib.suppress(ValueError):  # written in C, without a signature
            inspect.signature(factory).bind()
    except TypeError as error:
        raise AgentSignatureError(
            f"rl.environments.environment calls {name} without arguments, one call for each rollout: "
            f"{error}; give "
            "defaults, or a function that passes the arguments"
        ) from None
    if inspect.isclass(factory):
        found: type = factory
    else:
        instance = factory()
        found = type(instance)
        if callable(close := getattr(instance, "close", None)) and not inspect.iscoroutinefunction(close):
            close()
    if not callable(getattr(found, "reset", None)):
        raise AgentSignatureError(
            f"the environment {found.__name__} has no method reset; define `def reset(self, **row)`, which "
            "receives the columns of the task and returns the first observation or None"
        )
    return found


def tool_methods(cls: type) -> list[str]:
    """Return the names of a class's tools: its public methods, in alphabetical order."""
    return [
        name
        for name, _ in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    ]


def tool_schemas(cls: type) -> list[JsonObject]:
    """Return the tools of a class in OpenAI's form, from their type hints and docstrings.

    Raises:
        AgentSignatureError: a tool has no docstring, or an argument has no type hint or no description.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    schemas = []
    for name in tool_methods(cls):
        try:
            schema = get_json_schema(getattr(cls, name))
        except (DocstringParsingException, TypeHintParsingException, NameError, ValueError) as error:
            raise AgentSignatureError(
                f"the tool {cls.__name__}.{name} cannot be described to the model: {error}. Give the method "
                "type hints and a docstring with a line for each argument below `Args:`, or begin its name "
                "with an underscore if it is not a tool"
            ) from error
        schema["function"].pop("return", None)  # OpenAI's form does not have it
        schemas.append(schema)
    return schemas


def check_positive(name: str, value: object, kind: type = int) -> None:
    """Check that a setting of an environment is a number above 0.

    Args:
        kind: `int`, or `float`, which also accepts whole numbers.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float if kind is float else int) or value <= 0:
        raise ConfigError(f"{name}={value!r:.40} is not {'a whole' if kind is int else 'a'} number above 0")


CLOSE_S = 10.0
"""Time for the `close` of an environment."""
T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]
PendingCall = tuple[Future[Outcome], Callable[[], object]]


class LiveEnvironment:
    """An environment of one rollout, whose methods are the tools.

    Args:
        schemas: the tools in OpenAI's form.
        timeout_s: seconds that a call of a method may take.
        max_result: characters of a result that the model receives.
    """

    def __init__(self, schemas: list[JsonObject], timeout_s: float, max_result: int = MAX_RESULT) -> None:
        self.schemas = schemas
        self._names = [schema["function"]["name"] for schema in schemas]
        self._timeout_s = timeout_s
        self._max_result = max_result
        self._thread = InstanceThread()
        self._instance: object = None
        self._is_blocked = False

    async def start(self, factory: Factory) -> None:
        self._instance = await self._run("creating the environment", factory)

    async def call(self, name: str, arguments: JsonObject) -> Any:
        """Call a method of the environment.

        Raises:
            ToolTimeoutError: it takes too long. A synchronous method then goes on in its thread.
        """
        return await self._run(name, functools.partial(getattr(self._instance, name), **arguments))

    async def answer(self, message: object) -> list[JsonObject]:
        """Execute the tool calls of a message: synchronous methods one after another, and then the others at
        once."""
        return await answer_calls(message, self._answer, is_second=self._is_async)

    def _is_async(self, name: str) -> bool:
        return name in self._names and inspect.iscoroutinefunction(getattr(self._instance, name))

    async def _answer(self, name: str, arguments: str) -> str | list[object]:
        async def execute(given: JsonObject) -> str | list[object]:
            method = getattr(self._instance, name)
            run = execute_async if inspect.iscoroutinefunction(method) else execute_sync
            return await self._run(name, functools.partial(run, method, given, self._max_result))

        try:
            return await call_tool(self._names, name, arguments, execute, self._max_result)
        except (EnvironmentUnavailableError, SandboxUnavailableError):
            raise
        except ToolTimeoutError:
            if self._is_blocked:
                raise
            return f"error: the tool did not finish within {self._timeout_s:g} s"
        except Exception as error:
            return cut_result(f"error: {error_text(error)}", self._max_result)

    async def read_reward(
        self, function: Callable[..., object] | None, messages: list[JsonObject]
    ) -> dict[str, float]:
        """Return the rewards by name, the primary one first.

        Args:
            function: receives the environment and the messages, in place of the class's own.

        Raises:
            AgentSignatureError: the class has no reward.
            RewardError: the reward is not a finite number, or a dict of such numbers.
        """
        if function is not None:
            value = await self._run("reward", functools.partial(function, self._instance, messages))
        elif callable(getattr(type(self._instance), "get_reward", None)):
            value = await self.call("get_reward", {})
        else:
            value = await self._run("reward", functools.partial(own_reward, self._instance))
        try:
            return named_rewards(value)
        except RewardTypeError as error:
            raise RewardTypeError(f"{type(self._instance).__name__}: {error}") from None

    async def close(self) -> None:
        """Call the environment's `close`, if it has one, and end its thread."""
        try:
            close = getattr(self._instance, "close", None)
            if callable(close) and not self._is_blocked:
                async with asyncio.timeout(CLOSE_S):
                    await self._run("close", close)
        except Exception as error:  # the rollout has its result
            logger.warning("%s.close failed: %s", type(self._instance).__name__, error_text(error))
        finally:
            self._thread.end()

    async def _run(self, name: str, function: Callable[[], object]) -> Any:
        """Call a function: on the event loop if it is asynchronous, else in the environment's thread.

        Args:
            name: name of the method, for error messages.
        """
        in_thread = not inspect.iscoroutinefunction(function)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                if in_thread:
                    returned = await self._thread.run(function)
                    in_thread = False
                else:
                    returned = function()
                return await returned if inspect.isawaitable(returned) else returned
        except asyncio.CancelledError:
            self._is_blocked = in_thread
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            self._is_blocked = in_thread
            title = f"{type(self._instance).__name__}.{name}"
            raise ToolTimeoutError(
                f"{title} did not return within {self._timeout_s:g} s; limit its time in its code"
                ", or a larger tool_timeout_s"
            ) from None
        except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop
            raise RuntimeError(f"an environment raised {error!r}") from error


def own_reward(instance: object) -> object:
    """Return the attribute or property `reward` of an environment, or the result of its method `reward`.

    Raises:
        AgentSignatureError: there is none.
    """
    if not hasattr(instance, "reward"):
        raise AgentSignatureError(
            f"the environment {type(instance).__name__} has no reward at the end of a rollout; define "
            "get_reward(self), set self.reward, or pass rl.environments.environment(reward=...)"
        )
    return instance.reward() if callable(instance.reward) else instance.reward


def execute_sync(method: Callable[..., object], arguments: JsonObject, limit: int) -> str | list[object]:
    """Call a tool; return its result as `tool_content`, before another call changes the object."""
    return tool_content(method(**arguments), limit)


async def execute_async(method: Callable[..., Any], arguments: JsonObject, limit: int) -> str | list[object]:
    """Call an asynchronous tool; return its result as `tool_content`."""
    return tool_content(await method(**arguments), limit)


def tool_content(result: Any, limit: int) -> str | list[object]:
    """Return the result of a tool as the content of a message: content parts, or else its text.

    Args:
        limit: characters that content parts may have together; longer ones become text.
    """
    is_parts = isinstance(result, list) and all(isinstance(part, dict) and "type" in part for part in result)
    if is_parts and result and len(str(result)) <= limit:
        return list(result)
    return result if isinstance(result, str) else str(result)


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {exception_message(error)}"


class InstanceThread:
    """A daemon thread for the synchronous code of one environment, started by the first call.

    An environment may hold what belongs to a thread, such as a connection of sqlite3, and expects no two
    calls at once. A daemon thread does not keep the process alive if a call never returns.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        """Calls that wait, and None for the end."""
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in the thread, in a copy of the caller's context, after all earlier calls.

        When the caller is cancelled, a running call goes on, and its result is dropped.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._calls,), name="environment", daemon=True
            )
            self._thread.start()
        done: Future[Outcome] = Future()
        self._calls.put((done, functools.partial(copy_context().run, function)))
        value, error = await asyncio.wrap_future(done)
        if isinstance(error, SystemExit | KeyboardInterrupt):  # would end the event loop
            raise RuntimeError(f"{error!r} was raised in an environment") from error
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        """End the thread after the calls that have begun or wait."""
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[PendingCall | None]) -> None:
    while (call := calls.get()) is not None:
        done, function = call
        if done.set_running_or_notify_cancel():
            try:
                done.set_result((function(), None))
            except BaseException as error:  # a result, because a future cannot carry a StopIteration
                done.set_result((None, error))
