"""Classes of request fields."""

from typing import Any

import pytest

from raylight.config import EngineConfig
from raylight.engines.transformers.requests import ChatRequest, CompletionRequest
from raylight.errors import ConfigError
from raylight.serving.dialects.messages_request import MessagesRequest
from raylight.serving.dialects.responses_request import ResponsesRequest
from raylight.types.request_fields import LABELS, PROTECTED, drop_field


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("a", {"b": {"c": 1, "d": 2}, "list": [{"c": 1}, {"d": 2}, 3]}),
        ("b.c", {"a": 0, "b": {"d": 2}, "list": [{"c": 1}, {"d": 2}, 3]}),
        ("list.c", {"a": 0, "b": {"c": 1, "d": 2}, "list": [{}, {"d": 2}, 3]}),
    ],
)
def test_a_field_is_dropped_at_any_depth(name: str, left: Any) -> None:
    fields = {"a": 0, "b": {"c": 1, "d": 2}, "list": [{"c": 1}, {"d": 2}, 3]}
    assert drop_field(fields, name.split(".")) == left
    assert fields["b"] == {"c": 1, "d": 2}


@pytest.mark.parametrize("name", ["missing", "a.b", "b.missing", "list.missing", "b.c.d"])
def test_a_body_without_the_field_stays_the_same_object(name: str) -> None:
    fields = {"a": 0, "b": {"c": 1}, "list": [{"c": 1}]}
    assert drop_field(fields, name.split(".")) is fields


@pytest.mark.parametrize(
    "name",
    ["messages", "model", "temperature", "n", "stream", "logprobs", "tools", "tools.function.name", "thread"],
)
def test_a_field_that_shapes_an_answer_cannot_be_ignored(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"ignore_fields: .*'{name}' cannot be dropped: it shapes"):
        EngineConfig(ignore_fields=[name])


@pytest.mark.parametrize("name", ["", "a..b", ".a"])
def test_an_ignored_field_needs_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="not a field name"):
        EngineConfig(ignore_fields=[name])


def test_a_field_named_twice_is_dropped_once() -> None:
    assert EngineConfig(ignore_fields=["a", "a"]).ignore_fields == ["a"]


def test_no_label_shapes_an_answer() -> None:
    assert not LABELS & PROTECTED


@pytest.mark.parametrize(
    ("model", "harmless"),
    [
        (ChatRequest, {"modalities", "reasoning_effort", "thinking_token_budget"}),
        (CompletionRequest, set()),
        (ResponsesRequest, {"background", "include", "reasoning", "truncation"}),
        (MessagesRequest, {"cache_control", "context_management", "thinking"}),
    ],
)
def test_a_new_field_is_protected_unless_it_may_be_ignored(model: Any, harmless: set[str]) -> None:
    assert model.model_fields.keys() - PROTECTED - LABELS == harmless
