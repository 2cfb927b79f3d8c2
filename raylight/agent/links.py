"""Links and tags of spans: the attributes that record them, and functions that read them back.

A link names spans by the values of their attributes, so that an annotation can refer to a span whose id is
not known, such as that of a model's response.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from raylight.agent.attributes import to_builtin
from raylight.errors import EmitError, EmitTypeError
from raylight.semconv import LINK_PREFIX, TAG_PREFIX
from raylight.traces.attributes import unflatten
from raylight.traces.rewards import SpanLike
from raylight.types import Attributes

SpanT = TypeVar("SpanT", bound=SpanLike)


class SpanLink(BaseModel):
    """A link to the spans with a given attribute."""

    key_match: str
    """Name of the attribute; `trace_id` and `span_id` are the ids of the span."""
    value_match: str


def make_tag_attributes(tags: Iterable[str]) -> Attributes:
    """Return the attributes that tag a span, `agentlightning.tag.N`.

    Raises:
        EmitTypeError: a tag is not a string.
    """
    if isinstance(tags, str):
        raise EmitTypeError(f"make_tag_attributes takes a list of tags, not the string {tags!r:.80}")
    return {f"{TAG_PREFIX}.{index}": _text(tag, "a tag") for index, tag in enumerate(tags)}


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """Return the tags that a span's attributes record, in order.

    Raises:
        EmitError: a tag is not a string, or the indices do not count from 0.
    """
    return [_text(tag, "a tag") for tag in _entries(attributes, TAG_PREFIX)]


def make_link_attributes(links: Mapping[str, str]) -> Attributes:
    """Return the attributes that link a span to others: to those whose attributes have all the given values.

    Args:
        links: values by attribute, such as `{"gen_ai.response.id": "chatcmpl-1"}`. The keys `trace_id` and
            `span_id` match the ids of a span.

    Raises:
        EmitTypeError: a key or a value is not a string.
    """
    flat: Attributes = {}
    for index, (key, value) in enumerate(links.items()):
        flat[f"{LINK_PREFIX}.{index}.key_match"] = _text(key, "the key of a link")
        flat[f"{LINK_PREFIX}.{index}.value_match"] = _text(value, f"the link {key!r}")
    return flat


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[SpanLink]:
    """Return the links that a span's attributes record, in order.

    Raises:
        EmitError: a link lacks its key or its value, or the indices do not count from 0.
    """
    links = []
    for entry in _entries(attributes, LINK_PREFIX):
        fields = entry if isinstance(entry, dict) else {}
        key = _text(fields.get("key_match"), "the key_match of a link")
        value = _text(fields.get("value_match"), f"the link {key!r}")
        links.append(SpanLink(key_match=key, value_match=value))
    return links


def query_linked_spans(spans: Sequence[SpanT], links: Iterable[SpanLink]) -> list[SpanT]:
    """Return the spans, of raylight or of the OpenTelemetry SDK, that match all the links."""
    wanted = [(link.key_match, link.value_match) for link in links]
    return [span for span in spans if all(_value(span, key) == value for key, value in wanted)]


def _value(span: Any, key: str) -> Any:
    if key not in ("trace_id", "span_id"):
        return (span.attributes or {}).get(key)
    number = getattr(span.context, key, None)
    if not isinstance(number, int):  # raylight's ids are text
        return number
    return f"{number:032x}" if key == "trace_id" else f"{number:016x}"


def _entries(attributes: Mapping[str, Any], prefix: str) -> list[Any]:
    entries = unflatten(attributes, prefix)
    indices = {key[len(prefix) + 1 :].split(".")[0] for key in attributes if key.startswith(f"{prefix}.")}
    if indices != {str(index) for index in range(len(indices))}:
        raise EmitError(f"the indices of {prefix}.N are {', '.join(sorted(indices))}; they must count from 0")
    return entries or []


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EmitTypeError(f"{what} is {value!r:.80} of type {type(value).__name__}; it must be a string")
    return to_builtin(value)
