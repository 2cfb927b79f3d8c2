"""Links and tags: what is written is read back, and links find the spans they name."""

from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from raylight.agent.emit import emit_reward
from raylight.agent.links import (
    SpanLink,
    extract_links_from_attributes,
    extract_tags_from_attributes,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
)
from raylight.errors import EmitError
from raylight.types import Span

LINKS = {"gen_ai.response.id": "r-1", "span_id": "00000000000000aa"}


def test_tags_are_read_back() -> None:
    attributes = make_tag_attributes(["x", "y"])
    assert attributes == {"agentlightning.tag.0": "x", "agentlightning.tag.1": "y"}
    assert extract_tags_from_attributes(attributes | {"other": 1}) == ["x", "y"]
    many = [str(index) for index in range(12)]
    assert extract_tags_from_attributes(make_tag_attributes(many)) == many
    assert make_tag_attributes([]) == make_link_attributes({}) == {}
    assert extract_tags_from_attributes({}) == extract_links_from_attributes({}) == []


def test_links_are_read_back_from_a_span() -> None:
    span = emit_reward(1.0, attributes=make_link_attributes(LINKS), propagate=False)
    assert extract_links_from_attributes(span.attributes) == [
        SpanLink(key_match=key, value_match=value) for key, value in LINKS.items()
    ]


def test_links_find_the_spans_that_match_all_of_them() -> None:
    links = [SpanLink(key_match=key, value_match=value) for key, value in LINKS.items()]
    own = Span.from_attributes(attributes={"gen_ai.response.id": "r-1"}, span_id="00000000000000aa")
    other = Span.from_attributes(attributes={"gen_ai.response.id": "r-1"}, span_id="00000000000000bb")
    assert query_linked_spans([own, other], links) == [own]
    sdk = ReadableSpan("call", SpanContext(1, 0xAA, False), attributes={"gen_ai.response.id": "r-1"})
    without_context = SimpleNamespace(name="none", context=None, attributes=None)
    assert query_linked_spans([sdk, without_context], links) == [sdk]
    trace = SpanLink(key_match="trace_id", value_match=f"{1:032x}")
    assert query_linked_spans([sdk, without_context], [trace]) == [sdk]
    assert query_linked_spans([own, other], []) == [own, other]


def test_what_is_no_tag_or_link_is_refused() -> None:
    for wrong in ("text", [1]):
        with pytest.raises(EmitError):
            make_tag_attributes(wrong)  # type: ignore[arg-type]
    with pytest.raises(EmitError, match="link 'span_id' is 3"):
        make_link_attributes({"span_id": 3})  # type: ignore[dict-item]
    with pytest.raises(EmitError, match="they must count from 0"):
        extract_tags_from_attributes({"agentlightning.tag.1": "x"})
    with pytest.raises(EmitError, match="key_match of a link"):
        extract_links_from_attributes({"agentlightning.link.0.value_match": "x"})
