"""Encoding of what users pass through the store: inputs, metadata and resources.

The encoding is MessagePack with extensions. Decoding executes no code, so that a store file of somebody else
is safe to open.

Laws:
- A value is read as written, type for type, or refused when it is written. Three kinds are converted:
  a subclass of dict to a dict, a bytearray or memoryview to bytes, and a datetime's time zone to its offset.
- An error names the place of the value that cannot be stored.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec

from raylight.errors import StoreError

if TYPE_CHECKING:
    from pydantic import BaseModel

STORABLE = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, datetime, date, numpy arrays and numbers, "
    "LLM, ProxyLLM and PromptTemplate"
)
"""Types that the store holds, as errors list them."""
TUPLE, SET, FROZENSET, INTEGER, DATETIME, DATE, ARRAY, OBJECTS, RESOURCE = range(9)
"""Codes of the MessagePack extensions."""
BYTE_KINDS = "biufcSUMm"
"""Kinds of numpy types whose values are plain bytes."""


def encode_payload(value: object, what: str = "the value") -> bytes:
    """Encode a value of a user.

    Args:
        what: name of the value in messages.

    Raises:
        StoreError: the value, or one inside it, has a type that the store does not hold.
    """
    try:
        return pack(value)
    except Exception as error:  # also errors of the value's own classes
        if isinstance(error, RecursionError) or "recursion limit" in str(error):
            raise StoreError(
                f"{what} is nested too deeply, or contains itself, and cannot be stored; pass plain data"
            ) from None
        place, culprit = next(_find_culprits(value, ""), ("", value))
        raise StoreError(_refusal(f"{what}{place}", culprit)) from None


def pack(value: object) -> bytes:
    """Encode a value; without a message for a user.

    Raises:
        TypeError: the value, or one inside it, has a type that the store does not hold.
        ValueError: it is nested too deeply.
    """
    return msgpack.packb(value, default=_encode_other, strict_types=True, unicode_errors="surrogatepass")


def decode_payload(data: bytes) -> Any:
    """Decode a value that `encode_payload` encoded.

    Raises:
        StoreError: the bytes are damaged.
    """
    try:
        return msgpack.unpackb(
            data, ext_hook=_decode_extension, strict_map_key=False, unicode_errors="surrogatepass"
        )
    except StoreError:  # of a value inside this one
        raise
    except Exception as error:  # msgpack's, and errors of every type's own decoding
        raise damaged(error) from None


def decode_json(text: str) -> Any:
    """Decode a value that the store keeps as JSON.

    Raises:
        StoreError: the text is damaged.
    """
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(error) from None


def damaged(error: Exception) -> StoreError:
    """Return the error for a stored value that raises `error` when it is read."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return StoreError(
        f"the store's file is damaged: a stored value cannot be decoded ({reason:.200}); copy the file "
        "again, or start a new run"
    )


def json_text(value: object) -> str:
    """Encode a value as JSON.

    Raises:
        TypeError: JSON has no such value.
        ValueError: it contains itself.
    """
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, TypeError):  # surrogates without their pair, which JSON can escape
        return json.dumps(value)


def _encode_other(value: Any) -> object:
    """Encode a value of a type that MessagePack does not have.

    Raises:
        TypeError: the store does not hold the type.
    """
    kind = type(value)
    if kind in _ENCODERS:
        code, encode = _ENCODERS[kind]
        return msgpack.ExtType(code, encode(value))
    if kind.__module__ == "numpy":
        return _encode_numpy(value)
    if isinstance(value, dict):  # an OrderedDict, for example
        return dict(value)
    if kind in _resource_types().values():
        fields = {name: getattr(value, name) for name in kind.model_fields}
        return msgpack.ExtType(RESOURCE, pack([kind.__name__, fields]))
    raise TypeError


def _encode_numpy(value: object) -> msgpack.ExtType:
    """Encode a numpy array, or a number, which is an array without dimensions."""
    import numpy as np

    array = np.asarray(value)
    if type(value) not in (np.ndarray, array.dtype.type):
        raise TypeError
    if array.dtype.kind == "O":
        return msgpack.ExtType(OBJECTS, pack([list(array.shape), array.ravel().tolist()]))
    if array.dtype.kind not in BYTE_KINDS:
        raise TypeError
    is_number = not isinstance(value, np.ndarray)
    return msgpack.ExtType(ARRAY, pack([is_number, array.dtype.str, list(array.shape), array.tobytes()]))


def _decode_array(data: bytes) -> object:
    import numpy as np

    is_number, dtype, shape, values = decode_payload(data)
    array = np.frombuffer(values, dtype=dtype).reshape(shape)
    return array[()] if is_number else array.copy()  # the buffer is read-only


def _decode_objects(data: bytes) -> object:
    import numpy as np

    shape, values = decode_payload(data)
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array.reshape(shape)


def _decode_extension(code: int, data: bytes) -> object:
    return _DECODERS[code](data)


@functools.cache
def _resource_types() -> dict[str, type[BaseModel]]:
    """Resources that raylight defines, by name."""
    from raylight.agent.prompts import PromptTemplate
    from raylight.agent.resources import LLM, ProxyLLM

    return {kind.__name__: kind for kind in (LLM, ProxyLLM, PromptTemplate)}


def _decode_resource(data: bytes) -> object:
    name, fields = decode_payload(data)
    return _resource_types()[name](**fields)


def _pack_items(value: Iterable[object]) -> bytes:
    return pack(list(value))


_ENCODERS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    tuple: (TUPLE, _pack_items),
    set: (SET, _pack_items),
    frozenset: (FROZENSET, _pack_items),
    int: (INTEGER, lambda value: str(value).encode()),  # of more than 64 bits
    datetime: (DATETIME, lambda value: value.isoformat().encode()),
    date: (DATE, lambda value: value.isoformat().encode()),
}
_DECODERS: dict[int, Callable[[bytes], object]] = {
    TUPLE: lambda data: tuple(decode_payload(data)),
    SET: lambda data: set(decode_payload(data)),
    FROZENSET: lambda data: frozenset(decode_payload(data)),
    INTEGER: int,
    DATETIME: lambda data: datetime.fromisoformat(data.decode()),
    DATE: lambda data: date.fromisoformat(data.decode()),
    ARRAY: _decode_array,
    OBJECTS: _decode_objects,
    RESOURCE: _decode_resource,
}


# errors


def _find_culprits(value: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield place and value of the innermost values that cannot be encoded."""
    if _is_storable(value):
        return
    found = False
    for step, item in _items(value):
        for culprit in _find_culprits(item, place + step):
            found = True
            yield culprit
    if not found:
        yield place, value


def _is_storable(value: object) -> bool:
    try:
        pack(value)
    except Exception:  # also errors of the value's own classes
        return False
    return True


def _items(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the values inside a value, each with its step of the place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f" key {key!r:.80}", key
            yield f"[{key!r:.80}]", item
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f" item {item!r:.80}", item) for item in value)
    elif _is_array(value) and value.dtype.kind == "O":
        import numpy as np

        yield from ((f"[{', '.join(map(str, index))}]", item) for index, item in np.ndenumerate(value))
    elif type(value) in _resource_types().values():
        yield from ((f".{name}", getattr(value, name)) for name in type(value).model_fields)


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _refusal(where: str, value: object) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{where} is of the type {name} and cannot be stored; {_advice(value)}. Storable are {STORABLE}"


def _advice(value: Any) -> str:
    """Conversion of a value to one that can be stored."""
    if _is_array(value):
        return f"pass .tolist(), because its values are of the type {value.dtype!s:.80}"
    if hasattr(type(value), "model_dump"):
        return f"pass .model_dump(), and call {type(value).__name__}.model_validate(...) in the agent"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"pass dataclasses.asdict(...), and build the {type(value).__name__} in the agent"
    if isinstance(value, enum.Enum):
        return "pass its .value"
    if isinstance(value, tuple):
        return "pass ._asdict()"
    if callable(value):
        return "pass its name, and look the function up in the agent"
    return "pass plain data, such as its text or bytes, and build the object in the agent"
