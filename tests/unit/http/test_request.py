"""Checks of request bodies: size, sound JSON, and rejection before any inner layer."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgi_helpers import DISCONNECT, EMPTY_BODY, talk
from asgi_helpers import request as request_body
from gateway_helpers import BODY, CHAT, MINE, POSTED, SECRET, Site, asgi_scope, is_refusal
from hypothesis import example, given
from hypothesis import strategies as st

from raylight.http import request
from raylight.http.request import MAX_VALUES

BAD = {
    "nothing": b"",
    "cut off": b"{",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "python": b"{'a': 1}",
    "more after": b'{"a": 1} x',
    "two": b"{}{}",
    "deep lists": b'{"a": ' + b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and whole": b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
    "endless digits": b'{"n": ' + b"1" * 5000 + b"}",
    "beyond 64 bits": b'{"n": 1180591620717411303424}',
    "below 64 bits": b'{"n": [-9223372036854775809]}',
    "NaN": b'{"t": NaN}',
    "Infinity": b'{"t": -Infinity}',
    "too large a float": b'{"t": {"x": [1e999]}}',
    "half a character": b'{"a": "\\ud800"}',
    "half a key": b'{"\\udfff": 1}',
    "surrogate bytes": b'{"a": "\xed\xa0\x80"}',
    "newline": b'{"a": "\n"}',
    "list": b"[]",
    "text": b'"x"',
    "null": b"null",
    "number": b"7",
}


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
async def test_a_body_that_is_no_sound_json_object_is_a_bad_request(path: str, content: bytes) -> None:
    site = Site()
    answer = await site.post(MINE + path, content=content)
    assert (answer.status_code, is_refusal(answer, path)) == (400, True)
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert site.inner.seen == []


@pytest.mark.parametrize(
    ("content", "field", "number"),
    [
        (b'{"t": NaN}', "t", "nan"),
        (b'{"temperature": 1e400}', "temperature", "inf"),
        (b'{"a": [1, {"b": -Infinity}]}', "a[1].b", "-inf"),
        (b'{"top_k": 18446744073709551616}', "top_k", "184"),
        (
            b'{"input": [{"parsed": 18446744073709551616, "x": 18446744073709551617}]}',
            "input[0].x",
            "184",
        ),
        (b'{"tools": [{"input": 18446744073709551616}]}', "tools[0].input", "184"),
        (b'{"input": 18446744073709551616}', "input", "184"),
    ],
)
async def test_a_number_that_no_engine_takes_is_named(content: bytes, field: str, number: str) -> None:
    error = (await Site().post(content=content)).json()["error"]
    message = f"{field}: it must be a finite number of at most 64 bits, not {number}"
    assert error["message"].startswith(message)
    if "[" not in field:
        assert error["param"] == field


def test_what_was_read_from_an_answer_may_have_any_whole_number() -> None:
    parts = [
        {"type": "tool_use", "input": {"a": [2**70]}},
        {"type": "output_text", "parsed": {"a": -(2**70)}},
    ]
    call = {"type": "function", "function": {"name": "f", "parsed_arguments": {"a": 2**70}}}
    message = {"role": "assistant", "content": parts, "tool_calls": [call], "parsed": {"a": 2**70}}
    for field in ("messages", "input"):
        body = {field: [message]}
        assert request.decode_fields(json.dumps(body).encode()) == body


async def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "BODY_GRACE_S", 0.01)
    sent = await talk(Site().app, asgi_scope(CHAT), request_body(b"{", more=True), silent=True)
    assert sent[0]["status"] == 408
    assert b"did not arrive within" in sent[1]["body"]


async def test_a_body_has_more_time_the_more_of_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "BODY_GRACE_S", 0.05)
    monkeypatch.setattr(request, "BODY_RATE", 1)
    pieces = [b"x" * 60, b"y"]

    async def receive() -> Any:
        if len(pieces) == 1:
            await asyncio.sleep(0.2)
        return request_body(pieces.pop(0), more=bool(pieces))

    assert await request.read_body(receive, 1000) == b"x" * 60 + b"y"


async def test_half_sent_bodies_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_ARRIVING", 3)

    async def receive() -> Any:
        return await asyncio.Event().wait()

    reading = [asyncio.create_task(request.read_body(receive, 10)) for _ in range(3)]
    await asyncio.sleep(0)
    site = Site()
    assert (await site.post(content=b"{}")).status_code == 503
    assert (await site.get("/health", key=None)).status_code == 200
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert (await site.post(content=b'{"model": "x"}')).status_code != 503


GOOD = [
    b"{}",
    b' {"a": "\\ud83d\\ude00"} ',
    b'{"n": 18446744073709551615, "m": -9223372036854775808}',
    b'{"a": "\\u0000"}',
    b'{"t": 1e308}',
    b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}",
]


@pytest.mark.parametrize("content", GOOD)
async def test_a_sound_body_goes_on_as_it_came(content: bytes) -> None:
    site = Site()
    assert (await site.post(content=content)).status_code == 200
    assert site.inner.seen[0][2] == content


MANY = {
    "numbers": b"[" + b"1," * MAX_VALUES + b"1]",
    "objects": b"[" + b"{}," * MAX_VALUES + b"{}]",
    "fields": b"{" + b",".join(b'"%d":1' % i for i in range(MAX_VALUES)) + b"}",
    "texts": b"[" + b'"\\"",' * MAX_VALUES + b'""]',
    "nested": b"[" + b'[[{"a":[1]}]],' * (MAX_VALUES // 4) + b"1]",
    "after a text": b'["' + b"," * MAX_VALUES + b'"' + b",1" * MAX_VALUES + b"]",
}


@pytest.mark.parametrize("value", MANY.values(), ids=MANY)
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    monkeypatch.setattr(request, "msgspec", None)
    answer = await site.post(content=b'{"a":' + value + b"}")
    assert (answer.status_code, is_refusal(answer, CHAT)) == (400, True)
    assert "too many values" in answer.text
    assert site.inner.seen == []


MUCH_TEXT = {
    "commas": b"," * MAX_VALUES * 2,
    "escaped quotes": b'\\",' * MAX_VALUES * 2,
    "escaped backslashes": b"[\\\\{" * MAX_VALUES,
}


@pytest.mark.parametrize("text", MUCH_TEXT.values(), ids=MUCH_TEXT)
async def test_marks_within_texts_are_no_values(text: bytes) -> None:
    content = b'{"a":"' + text + b'","b":[{"c":"' + text + b'"}]}'
    site = Site()
    assert (await site.post(content=content)).status_code == 200
    assert site.inner.seen[0][2] == content


async def test_a_long_prompt_in_tokens_is_taken() -> None:
    content = b'{"prompt":[' + b"151643," * (MAX_VALUES - 10) + b"1]}"
    assert (await Site().post(content=content)).status_code == 200


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"],
)
async def test_another_type_of_content_is_refused(kind: str) -> None:
    """A web page can send these types to a server on loopback without its consent."""
    site = Site()
    answer = await site.post(content=json.dumps(BODY).encode(), headers={"content-type": kind})
    assert (answer.status_code, is_refusal(answer, CHAT)) == (415, True)
    assert site.inner.seen == []


async def test_the_type_may_name_its_charset() -> None:
    answer = await Site().post(content=b"{}", headers={"content-type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200


async def test_an_encoded_body_is_refused() -> None:
    answer = await Site().post(content=b"{}", headers={"content-encoding": "gzip"})
    assert (answer.status_code, "encoding" in answer.text) == (415, True)


# the limit


@pytest.mark.parametrize("path", ["/v1/messages", CHAT])
async def test_a_body_over_the_limit_is_refused_unread(path: str) -> None:
    scope = asgi_scope(path)
    scope["headers"] += [(b"content-length", b"101")]
    sent = await talk(Site(max_body=100).app, scope)  # which fails if it receives
    assert sent[0]["status"] == 413


async def test_a_body_that_does_not_tell_its_length_is_read_up_to_the_limit() -> None:
    site, taken = Site(max_body=100), 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield b" " * 30

    headers = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"}
    answer = await site.client.post(CHAT, headers=headers, content=pieces())
    assert (answer.status_code, is_refusal(answer, CHAT), taken) == (413, True, 4)


async def test_a_body_of_just_the_limit_is_taken() -> None:
    content = b"{}" + b" " * 98
    assert (await Site(max_body=100).post(content=content)).status_code == 200
    assert (await Site(max_body=99).post(content=content)).status_code == 413


@pytest.mark.parametrize("length", ["-1", "x", "9" * 400, "²"])
async def test_an_odd_length_is_no_failure(length: str) -> None:
    scope = asgi_scope(CHAT)
    scope["headers"] += [(b"content-length", length.encode("utf-8"))]
    sent = await talk(Site(max_body=100).app, scope, EMPTY_BODY)
    assert sent[0]["status"] in (200, 413)


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_given_no_answer() -> None:
    site = Site()
    sent = await talk(site.app, asgi_scope(CHAT), request_body(b"{", more=True), DISCONNECT)
    assert (sent, site.inner.seen) == ([], [])
    assert site.value("requests_total", route="chat", status="499") == 1


@given(st.binary(max_size=60))
@example(b"{}")
def test_no_bytes_are_a_failure_of_the_server(content: bytes) -> None:
    try:
        is_object = isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        is_object = False
    answer = asyncio.run(Site().post(content=content))
    if answer.status_code == 200:
        assert is_object
    else:
        assert answer.status_code == 400
        assert is_refusal(answer, CHAT)
