"""Span attributes from Python values, in the keys and shapes of agent-lightning 0.3.

Nested dicts and lists become dotted keys (`a.b.0`); a list of one primitive type stays a list; what remains is JSON text.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from raylight.errors import EmitError
from raylight.semconv import LINK_PREFIX, TAG_PREFIX
from raylight.types import Attributes

MAX_DEPTH = 16
"""Of nesting; what lies deeper is JSON text."""
MAX_KEYS = 128
"""Attributes that one recorded argument or result may become; a bigger one is JSON text (OpenTelemetry's limit of a span)."""


def flatten(nested: Any, prefix: str = "", depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Dotted keys and their leaves: primitives, lists of one primitive type, and whatever is neither dict nor list.

    Raises:
        EmitError: a key is no string.
    """
    if not isinstance(nested, Mapping | list | tuple) or not nested or depth == 0 or _is_leaf_list(nested):
        return {prefix: nested} if prefix else {}
    items = nested.items() if isinstance(nested, Mapping) else enumerate(nested)
    flat: dict[str, Any] = {}
    for key, value in items:
        if isinstance(nested, Mapping) and not isinstance(key, str):
            raise EmitError(
                f"the key {key!r:.80} in {prefix or 'the attributes'} is of type {type(key).__name__}; use strings"
            )
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key), depth - 1)
    return flat


def _is_leaf_list(nested: Any) -> bool:
    kinds = {type(to_builtin(item)) for item in nested} if isinstance(nested, list | tuple) else set()
    return len(kinds) == 1 and kinds <= {str, bool, int, float}


def to_builtin(value: Any) -> Any:
    """A primitive of a subclass, of numpy or of torch as Python's own, which any process can read; other values as they are."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def encode_value(value: Any) -> Any:
    """A value as a span can hold it; what is not primitive becomes JSON text, and never fails."""
    value = to_builtin(value)
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple) and (not value or _is_leaf_list(value)):
        return [to_builtin(item) for item in value]
    try:
        return json.dumps(value, default=str)
    except Exception:  # recording must not fail the agent, whose objects may do anything in __str__
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


def as_attributes(nested: Mapping[str, Any] | None) -> Attributes:
    """Attributes given beside what is emitted; odd values become JSON text.

    Raises:
        EmitError: it is no dict, or a key is no string.
    """
    if nested is not None and not isinstance(nested, Mapping):
        raise EmitError(f"attributes must be a dict, not {type(nested).__name__}")
    return {key: encode_value(value) for key, value in flatten(nested or {}).items()}


def strict_attributes(annotation: Mapping[str, Any]) -> Attributes:
    """Attributes that a reader of the trace will compute with: only primitives and lists of them.

    Raises:
        EmitError: it is no dict, a key is no string, or a value is something else.
    """
    attributes = as_attributes(annotation)
    for key, value in flatten(annotation).items():
        leaf = to_builtin(value)
        if not isinstance(leaf, str | bool | int | float | list | tuple | Mapping) or (
            isinstance(leaf, Mapping) and leaf
        ):
            raise EmitError(
                f"annotation {key!r} is {value!r:.80} of type {type(value).__name__}; give a str, bool, int or float, "
                "or dicts and lists of these (emit_object takes other objects)"
            )
    return attributes


def value_attributes(prefix: str, value: Any) -> Attributes:
    """A function's argument or result under `prefix`. Whatever it is, recording it does not fail."""
    try:
        flat = flatten({prefix: value})
    except Exception:  # keys that are no strings, or a container of the user's that cannot be walked
        flat = {}
    if not 0 < len(flat) <= MAX_KEYS:
        return {prefix: encode_value(value)}
    return {key: encode_value(leaf) for key, leaf in flat.items()}


def exception_attributes(error: BaseException) -> Attributes:
    """An exception as OpenTelemetry's semantic conventions have it."""
    kind = type(error)
    return {
        "exception.type": kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}",
        "exception.message": exception_message(error),
        "exception.stacktrace": "".join(traceback.format_exception(error)),
    }


def exception_message(error: BaseException) -> str:
    """An exception's text; an exception of the user's may fail to tell it."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its message cannot be read: {type(broken).__name__})"


def make_tag_attributes(tags: Iterable[str]) -> Attributes:
    """Attributes that tag a span: `agentlightning.tag.N`.

    Raises:
        EmitError: a tag is no string.
    """
    if isinstance(tags, str):
        raise EmitError(f"make_tag_attributes takes a list of tags, not the string {tags!r:.80}")
    return {f"{TAG_PREFIX}.{index}": _text(tag, "a tag") for index, tag in enumerate(tags)}


def make_link_attributes(links: Mapping[str, str]) -> Attributes:
    """Attributes that say which spans this one is about: those whose attributes have these values.

    Args:
        links: attribute and value, such as `{"gen_ai.response.id": "chatcmpl-1"}`; `trace_id` and `span_id` name a span itself.

    Raises:
        EmitError: a key or a value is no string.
    """
    flat: Attributes = {}
    for index, (key, value) in enumerate(links.items()):
        flat[f"{LINK_PREFIX}.{index}.key_match"] = _text(key, "the key of a link")
        flat[f"{LINK_PREFIX}.{index}.value_match"] = _text(value, f"the link {key!r}")
    return flat


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EmitError(f"{what} is {value!r:.80} of type {type(value).__name__}; it must be a string")
    return to_builtin(value)
