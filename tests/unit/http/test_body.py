"""Models of request bodies, and the description of their errors."""

from typing import Any

import pytest

from raylight.http.body import RequestModel, field_path, ignore_hint
from raylight.http.errors import RequestError


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ((), "body"),
        (("a",), "a"),
        (("list", 1, "user", "content", 0, "text", "extra"), "list[1].content[0].extra"),
        (("list", 1, "user", "content", 0, "text", "text"), "list[1].content[0].text"),
        (("list", 0, "user", "content", 0, "text", "text"), "list[0].content"),
        (("list", 1, "robot"), "list[1]"),
        (("list", "some-type"), "list"),
        (("a", "str"), "a"),
    ],
)
def test_paths_are_those_of_the_body(location: tuple[int | str, ...], path: str) -> None:
    part = {"type": "text", "text": "x", "extra": 1}
    body = {"a": "x", "list": [{"content": "string"}, {"role": "user", "content": [part]}]}
    assert field_path({"type": "extra_forbidden", "loc": location}, body) == path


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (("missing",), "missing"),
        (("list", 0, "user", "missing"), "list[0].missing"),
        (("list", 0, "text", "text"), "list[0].text"),
    ],
)
def test_a_missing_field_has_a_path(location: tuple[int | str, ...], path: str) -> None:
    assert field_path({"type": "missing", "loc": location}, {"list": [{"type": "text"}]}) == path


class Request(RequestModel):
    n: int
    user: str | None = None


def test_labels_are_no_unknown_fields() -> None:
    assert Request.read({"n": 1, "store": True, "service_tier": 3, "user": "me"}) == Request(n=1, user="me")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (3, "body: Input should be a valid dictionary or instance of Request"),
        (
            {"n": 1, "x": 1},
            "x: this field is not supported; to drop unknown fields, set engine={'ignore_fields': ['x']}",
        ),
        ({"n": 1, "temperature": 1}, "temperature: this field is not supported"),
        ({"n": "1"}, "n: Input should be a valid integer"),
    ],
)
def test_errors_name_fields_and_the_way_out(body: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request.read(body)
    assert caught.value.message == message


def test_the_way_out_names_fields_without_indices_and_once() -> None:
    hint = ignore_hint(["list[0].a", "list[1].a", "messages[0].content", "x" * 100])
    assert hint == "; to drop unknown fields, set engine={'ignore_fields': ['list.a']}"
    assert ignore_hint(["model"]) == ""
