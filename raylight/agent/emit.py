"""Emitters, with which an agent records rewards, messages and objects, and functions that read these back.

Outside an attempt an emitter only returns the span that it would record, so that the same code runs without
raylight.
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from raylight.agent.attributes import as_attributes, exception_attributes, strict_attributes, to_builtin
from raylight.errors import EmitError, EmitTypeError, RewardError
from raylight.semconv import (
    AGENT_REWARD,
    ANNOTATION,
    EXCEPTION,
    MESSAGE,
    MESSAGE_BODY,
    OBJECT,
    OBJECT_JSON,
    OBJECT_LITERAL,
    OBJECT_TYPE,
    REWARD_AGENT,
    STATE,
    STATE_KEY,
    reward_attributes,
)
from raylight.traces.context import record_span
from raylight.traces.reward_spans import SpanLike, named_rewards
from raylight.types import Attributes, SpanCoreFields

Function = TypeVar("Function", bound=Callable[..., object])


def emit_reward(
    reward: object,
    *,
    primary_key: str | None = None,
    agent: str | None = None,
    attributes: Attributes | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Record a reward.

    Args:
        reward: a finite number, or a dict of named rewards.
        primary_key: name of the reward to train on; required if there are several.
        agent: name of the agent that the reward is for, as in `llm.for_agent(name)`; it is read with
            `credit="agent"`. None: the rollout's reward.
        attributes: further attributes, such as `make_link_attributes` returns.
        propagate: False only returns the span.

    Raises:
        RewardError: a reward is not a finite number, `primary_key` is missing or unknown, or `agent` is not
            a name.
    """
    if agent is not None and not (isinstance(agent, str) and agent):
        raise RewardError(f"agent={agent!r:.80} is not the name of an agent; give a string")
    if primary_key is None and isinstance(reward, Mapping) and len(reward) > 1:
        names = ", ".join(repr(name) for name in reward)
        raise RewardError(
            f"emit_reward got several rewards: {names}; name the one to train on with primary_key="
        )
    rewards = reward_attributes(named_rewards(reward, primary_key))
    if agent is not None:
        rewards[REWARD_AGENT] = agent
    name = ANNOTATION if agent is None else AGENT_REWARD
    return record_span(name, rewards | as_attributes(attributes), propagate=propagate)


def reward(function: Function) -> Function:
    """Decorate a function, or a coroutine function, so that each call records its result as a reward.

    A result of None records nothing. The call raises RewardError if the result is not a reward.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: object, **kwargs: object) -> object:
            return _rewarded(await function(*args, **kwargs))

        return call_async  # type: ignore[return-value]

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        return _rewarded(function(*args, **kwargs))

    return call  # type: ignore[return-value]


def _rewarded(result: object) -> object:
    if result is not None:
        emit_reward(result)
    return result


def emit_state(key: object, propagate: bool = True) -> SpanCoreFields:
    """Name the state in which the next call of the model is made, for an algorithm that compares turns of
    equal states (`rl.algorithms.GiGPO`).

    Args:
        key: a string, or another value that JSON can represent. States with equal keys are equal within the
            rollouts of a group.

    Raises:
        EmitError: JSON cannot represent the key.
    """
    try:
        text = key if isinstance(key, str) else json.dumps(to_builtin(key), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise EmitError(
            f"emit_state cannot convert a key of type {type(key).__name__} to JSON: {error}; give a string"
        ) from error
    return record_span(STATE, {STATE_KEY: text}, propagate=propagate)


def emit_annotation(annotation: Attributes, propagate: bool = True) -> SpanCoreFields:
    """Record an annotation of the rollout or of other spans. Nested dicts and lists become dotted attributes.

    Raises:
        EmitError: a value is not a str, bool, int or float, nor a dict or list of these.
    """
    return record_span(ANNOTATION, strict_attributes(annotation), propagate=propagate)


def emit_message(
    message: str, attributes: Attributes | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Record a line of text.

    Raises:
        EmitTypeError: `message` is not a string.
    """
    if not isinstance(message, str):
        raise EmitTypeError(
            f"emit_message takes a string, not {type(message).__name__}; use emit_object for other values"
        )
    recorded = {MESSAGE_BODY: to_builtin(message)} | as_attributes(attributes)
    return record_span(MESSAGE, recorded, propagate=propagate)


def emit_object(
    object: object, attributes: Attributes | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Record an object: a primitive, bytes, any value that JSON can represent, or a pydantic model.

    Raises:
        EmitError: JSON cannot represent the object.
    """
    recorded = _encode_object(object) | as_attributes(attributes)
    return record_span(OBJECT, recorded, propagate=propagate)


def emit_exception(
    exception: BaseException, attributes: Attributes | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Record an exception that the agent caught, with OpenTelemetry's `exception.*` attributes.

    Raises:
        EmitTypeError: `exception` is not an exception.
    """
    if not isinstance(exception, BaseException):
        raise EmitTypeError(
            f"emit_exception takes an exception, not {exception!r:.80} of type {type(exception).__name__}"
        )
    recorded = exception_attributes(exception) | as_attributes(attributes)
    return record_span(EXCEPTION, recorded, propagate=propagate)


def _encode_object(value: object) -> Attributes:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        if isinstance(value, bytes):
            return {OBJECT_TYPE: "bytes", OBJECT_LITERAL: base64.b64encode(value).decode()}
        primitive = to_builtin(value)
        if isinstance(primitive, str | bool | int | float):
            return {OBJECT_TYPE: type(primitive).__name__, OBJECT_LITERAL: str(primitive)}
        text = json.dumps(value.model_dump(mode="json") if hasattr(value, "model_dump") else value)
    except Exception as error:  # attributes of a proxy, and a model's serializers, may raise anything
        raise EmitError(
            f"emit_object cannot convert an object of type {name} to JSON: {error}; convert it to dicts and "
            f"lists first"
        ) from error
    return {OBJECT_TYPE: name, OBJECT_JSON: text}


def get_message_value(span: SpanLike) -> str | None:
    """Return the text of a message span; None for other spans.

    Raises:
        EmitTypeError: the text is not a string.
    """
    body = (span.attributes or {}).get(MESSAGE_BODY)
    if body is not None and not isinstance(body, str):
        raise EmitTypeError(f"the message in span {span.name!r} is of type {type(body).__name__}, not str")
    return body


def get_object_value(span: SpanLike) -> Any:
    """Return the object of an object span, decoded from JSON; None for other spans.

    Raises:
        EmitError: the object cannot be decoded.
    """
    attributes: Attributes = {**(span.attributes or {})}
    kind = attributes.get(OBJECT_TYPE, "str")
    try:
        if OBJECT_JSON in attributes:
            return json.loads(attributes[OBJECT_JSON])
        if OBJECT_LITERAL in attributes:
            return _LITERALS[kind](attributes[OBJECT_LITERAL])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise EmitError(
            f"the object of type {kind!r} in span {span.name!r} cannot be decoded: {error!r}"
        ) from error
    return None


_LITERALS: dict[object, Callable[[Any], object]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "bytes": base64.b64decode,
}
