"""Encoding of inputs, metadata and resources: type for type, without code, or refused with a place."""

import collections
import contextlib
import dataclasses
import enum
import pathlib
import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylight as rl
from raylight.errors import StoreError
from raylight.store.payloads import decode_payload, encode_payload


class Colour(enum.Enum):
    RED = 1


class Word(str, enum.Enum):  # noqa: UP042  # the kind of enum that passes as a string
    RED = "red"


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Sum:
    a: int = 1


class Task(pydantic.BaseModel):
    question: str = ""


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.datetimes(timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=-3))]))
    | st.dates()
)
HASHABLE = SCALARS | st.tuples(SCALARS, SCALARS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(HASHABLE, inner)
        | st.frozensets(HASHABLE)
        | st.sets(HASHABLE)
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """Return a value that is equal only for equal values of equal types."""
    if isinstance(value, dict):
        return [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), value
    return type(value), value


@given(VALUES)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert typed(decode_payload(encode_payload(value))) == typed(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array([0.1, float("nan")], dtype=np.float32),
        np.array(["a", "bc"]),
        np.array(["2026-01-01"], dtype="datetime64[ms]"),
        np.zeros((0, 4)),
        np.array(3.5),
    ],
)
def test_arrays_keep_type_and_shape(array: np.ndarray) -> None:
    read = decode_payload(encode_payload({"x": array}))["x"]
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert read.tobytes() == array.tobytes()
    assert read.flags.writeable


def test_arrays_of_objects_as_tables_have_them() -> None:
    messages = np.array([{"role": "user", "content": "a"}, {"role": "user", "content": None}], dtype=object)
    read = decode_payload(encode_payload(messages.reshape(2, 1)))
    assert read.dtype == object
    assert read.shape == (2, 1)
    assert read.ravel().tolist() == messages.tolist()


@pytest.mark.parametrize(
    "number", [np.int64(3), np.float64(0.1), np.float32(0.1), np.bool_(True), np.str_("a")]
)
def test_numbers_of_numpy_stay_numbers_of_numpy(number: Any) -> None:
    read = decode_payload(encode_payload([number]))[0]
    assert (type(read), read) == (type(number), number)


@pytest.mark.parametrize(
    "resource",
    [
        rl.LLM(
            endpoint="http://x/v1",
            model="m",
            api_key="k",
            sampling_parameters={"temperature": 0.5},
            traced=True,
        ),
        rl.LLM(api_key=None),
        rl.ProxyLLM(endpoint="http://x/v1", model="m"),
        rl.PromptTemplate(template="{{ a }}", engine="jinja"),
    ],
)
def test_resources_stay_what_they_are(resource: Any) -> None:
    read = decode_payload(encode_payload({"name": resource}))["name"]
    assert (type(read), read) == (type(resource), resource)


def test_the_kinds_that_are_converted() -> None:
    zone = ZoneInfo("Europe/Berlin")
    values = [bytearray(b"a"), memoryview(b"b"), datetime(2026, 7, 1, tzinfo=zone)]
    read = decode_payload(encode_payload(values))
    assert typed(read[:2]) == typed([b"a", b"b"])
    assert read[2].isoformat() == "2026-07-01T00:00:00+02:00"


def test_a_kind_of_dict_becomes_a_dict() -> None:
    read = decode_payload(encode_payload(collections.OrderedDict(b=1, a=collections.Counter("x"))))
    assert typed(read) == typed({"b": 1, "a": {"x": 1}})


@pytest.mark.parametrize(
    ("value", "place", "advice"),
    [
        (Task(), "task", r"pass \.model_dump\(\), and call Task\.model_validate"),
        ({"a": [1, {"b": Sum()}]}, "task['a'][1]['b']", r"dataclasses\.asdict"),
        ((1, Colour.RED), "task[1]", r"pass its \.value"),
        ([Word.RED], "task[0]", r"pass its \.value"),
        (Point(1, 2), "task", r"_asdict"),
        ({"f": len}, "task['f']", "pass its name"),
        ({"lock": threading.Lock()}, "task['lock']", "pass plain data"),
        ({"path": pathlib.Path("a")}, "task['path']", "such as its text"),
        ({Colour.RED: 1}, "task key <Colour.RED: 1>", "value"),
        (rl.LLM(sampling_parameters={"stop": Sum()}), "task.sampling_parameters['stop']", "asdict"),
        ({"a": np.array([[1, Sum()]], dtype=object)}, "task['a'][0, 1]", r"dataclasses\.asdict"),
        ([np.zeros(2, dtype="i4,f4")], "task[0]", r"pass \.tolist\(\), because its values are of the type"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, place: str, advice: str) -> None:
    with pytest.raises(StoreError, match=advice) as raised:
        encode_payload(value, "task")
    assert str(raised.value).startswith(f"{place} is of the type ")


def test_a_value_that_contains_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for value in (circle, {"a": (circle,)}):
        with pytest.raises(StoreError, match="nested too deeply, or contains itself"):
            encode_payload(value)


DAMAGED = encode_payload({"task": [1, (2, 3)], "at": datetime(2026, 1, 2), "x": np.arange(4)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        DAMAGED[:-1],
        DAMAGED + b"\x00",
        b"\xc7\x03\x63abc",  # an extension that does not exist
        b"\xc7\x03\x04abc",  # a datetime without digits
        b"\xc7\x03\x00abc",  # a tuple of three values without their frame
        encode_payload(np.arange(4)).replace(b"<i8", b"<q9"),
        encode_payload(rl.LLM(endpoint="http://x", model="m")).replace(b"LLM", b"LLN"),
        None,
    ],
)
def test_damaged_bytes_are_a_typed_error(data: Any) -> None:
    with pytest.raises(StoreError, match=r"^the store's file is damaged: a stored value cannot be decoded"):
        decode_payload(data)


@given(st.integers(0, len(DAMAGED) - 1), st.integers(0, 255))
def test_a_changed_byte_is_another_value_or_a_typed_error(place: int, byte: int) -> None:
    with contextlib.suppress(StoreError):
        decode_payload(DAMAGED[:place] + bytes([byte]) + DAMAGED[place + 1 :])


def test_decoding_executes_nothing() -> None:
    """A pickle is bytes like any other."""
    assert decode_payload(encode_payload(b"cos\nsystem\n(S'false'\ntR.")) == b"cos\nsystem\n(S'false'\ntR."
