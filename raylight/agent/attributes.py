"""Conversion of Python values to span attributes, with the keys and shapes of agent-lightning 0.3.

Nested dicts and lists become dotted keys (`a.b.0`). A list of one primitive type stays a list. Everything
else becomes JSON text.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from numbers import Integral, Real

from raylight.errors import EmitError, EmitTypeError
from raylight.types import Attributes, JsonObject

MAX_DEPTH = 16
"""Maximum nesting of dotted keys. Values below it become JSON text."""
MAX_KEYS = 128
"""Maximum number of attributes for one recorded argument or result, OpenTelemetry's limit for a span. A
larger value becomes JSON text."""


def flatten(nested: object, prefix: str = "", depth: int = MAX_DEPTH) -> JsonObject:
    """Flatten nested dicts and lists to dotted keys.

    Leaves are primitives, lists of one primitive type, and values that are neither dicts nor lists.

    Raises:
        EmitError: a key is not a string.
    """
    if not isinstance(nested, Mapping | list | tuple) or not nested or depth == 0 or _is_leaf_list(nested):
        return {prefix: nested} if prefix else {}
    items = nested.items() if isinstance(nested, Mapping) else enumerate(nested)
    flat: JsonObject = {}
    for key, value in items:
        if isinstance(nested, Mapping) and not isinstance(key, str):
            raise EmitError(
                f"the key {key!r:.80} in {prefix or 'the attributes'} is of type {type(key).__name__}; "
                "use strings"
            )
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key), depth - 1)
    return flat


def _is_leaf_list(nested: object) -> bool:
    kinds = {type(to_builtin(item)) for item in nested} if isinstance(nested, list | tuple) else set()
    return len(kinds) == 1 and kinds <= {str, bool, int, float}


def to_builtin(value: object) -> object:
    """Convert a primitive of a subclass, of numpy or of torch to the builtin type; keep other values."""
    try:
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
    except Exception:  # attributes of a proxy may raise anything
        return value


def encode_value(value: object) -> object:
    """Convert a value for a span; values that are not primitive become JSON text. Never raises.

    A value that cannot be read, such as an integer with more digits than Python prints, becomes its type.
    """
    try:
        leaf = to_builtin(value)
        if isinstance(leaf, list | tuple) and (not leaf or _is_leaf_list(leaf)):
            leaf = [to_builtin(item) for item in leaf]
        elif not isinstance(leaf, str | bool | int | float):
            return json.dumps(leaf, default=str)
        if not isinstance(leaf, str):
            repr(leaf)  # raises for an integer with too many digits
        return leaf
    except Exception:  # recording must not fail the agent, and __str__ of its objects may raise anything
        return _type_name(value)


def _type_name(value: object) -> str:
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def as_attributes(nested: Mapping[str, object] | None) -> Attributes:
    """Convert the caller's further attributes of a span. Values of other types become JSON text.

    Raises:
        EmitTypeError: `nested` is not a dict.
        EmitError: a key is not a string.
    """
    if nested is not None and not isinstance(nested, Mapping):
        raise EmitTypeError(f"attributes must be a dict, not {type(nested).__name__}")
    return {key: encode_value(value) for key, value in flatten(nested or {}).items()}


def strict_attributes(annotation: Mapping[str, object]) -> Attributes:
    """Convert attributes that readers of the trace compute with: primitives, and lists of these.

    Raises:
        EmitTypeError: `annotation` is not a dict.
        EmitError: a key is not a string, or a value has another type.
    """
    attributes = as_attributes(annotation)
    for key, value in flatten(annotation).items():
        leaf = to_builtin(value)
        if (
            not isinstance(leaf, str | bool | int | float | list | tuple | Mapping)
            or (isinstance(leaf, Mapping) and leaf)
            or attributes[key] == _type_name(value)
        ):
            raise EmitError(
                f"annotation {key!r} is {attributes[key]!s:.80} of type {type(value).__name__}; give a str, "
                "bool, int or float, or dicts and lists of these (emit_object takes other objects)"
            )
    return attributes


def value_attributes(prefix: str, value: object) -> Attributes:
    """Return the attributes that record an argument or a result under `prefix`. Never raises."""
    try:
        flat = flatten({prefix: value})
    except Exception:  # a key is not a string, or the user's container cannot be iterated
        flat = {}
    if not 0 < len(flat) <= MAX_KEYS:
        return {prefix: encode_value(value)}
    return {key: encode_value(leaf) for key, leaf in flat.items()}


def exception_attributes(error: BaseException) -> Attributes:
    """Return the `exception.*` attributes of OpenTelemetry's semantic conventions, the type as the plain name
    of the class."""
    return {
        "exception.type": type(error).__name__,
        "exception.message": exception_message(error),
        "exception.escaped": True,
        "exception.stacktrace": "".join(traceback.format_exception(error)),
    }


def exception_message(error: BaseException) -> str:
    """Return the message of an exception, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its message cannot be read: {type(broken).__name__})"
