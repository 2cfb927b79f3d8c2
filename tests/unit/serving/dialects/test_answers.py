"""Answers as bytes, with their events and errors (`raylight/http`), turns and blocks."""

import json
from typing import Any

import pytest
from dialect_helpers import Say, call
from hypothesis import given, settings
from hypothesis import strategies as st
from template_helpers import says

from raylight.http.errors import RequestError, error_body, error_response, read_error
from raylight.http.sse import ServerSentEvent, SseReader, sse_bytes
from raylight.serving.dialects import answers
from raylight.serving.dialects.answers import Answer, AnswerReader, BlockReader, Choice
from raylight.serving.dialects.messages import MessagesDialect
from raylight.serving.dialects.registry import dialect_of

# events


@pytest.mark.parametrize(
    ("wire", "events"),
    [
        (b"data: a\n\n", [ServerSentEvent(None, "a")]),
        (b"event: x\r\ndata: a\r\n\r\n", [ServerSentEvent("x", "a")]),
        (b"data: a\r\rdata: b\r\r", [ServerSentEvent(None, "a"), ServerSentEvent(None, "b")]),
        (b"data: a\ndata:b\ndata\n\n", [ServerSentEvent(None, "a\nb\n")]),
        (b": ping\nid: 1\nretry: 3\ndata: a\n\n", [ServerSentEvent(None, "a")]),
        (b"event: lonely\n\ndata: a\n\n", [ServerSentEvent(None, "a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [ServerSentEvent(None, "a")]),
        (b"data:  two: spaces\n\n", [ServerSentEvent(None, " two: spaces")]),
        (b"data: never ended\n", []),
    ],
)
def test_reading_events(wire: bytes, events: list[ServerSentEvent]) -> None:
    assert SseReader().feed(wire) == events


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"data: ", b"data:", b"event: ", b": ", b"data", b"\xef\xbb\xbf", b""]),
            st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=5),
            st.sampled_from([b"\n", b"\r", b"\r\n"]),
        ),
        max_size=12,
    ),
    st.data(),
)
def test_however_the_bytes_are_cut_the_events_are_the_same(
    lines: list[tuple[bytes, str, bytes]], data: st.DataObject
) -> None:
    wire = b"".join(field + text.encode() + end for field, text, end in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    reader = SseReader()
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert [event for piece in pieces for event in reader.feed(piece)] == SseReader().feed(wire)
    singly = SseReader()
    assert [event for byte in wire for event in singly.feed(bytes([byte]))] == SseReader().feed(wire)


@settings(deadline=None)
@given(
    st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"])),
    st.sampled_from([None, "delta"]),
)
def test_what_is_written_is_read(text: str, name: str | None) -> None:
    assert SseReader().feed(sse_bytes(text, name)) == [ServerSentEvent(name, text)]
    assert json.loads(SseReader().feed(sse_bytes({"a": text}, name))[0].data) == {"a": text}


# answers


def read(streams: bool, *pieces: bytes) -> Answer:
    reader = AnswerReader(streams)
    for piece in pieces:
        reader.feed(piece)
    return reader.finish()


SAYS = [
    Say("hello"),
    Say("hello", reasoning="hm"),
    Say("", reasoning="hm", named="reasoning_content", finish="length"),
    Say("see", calls=[call("t1", '{"city": "Bern"}'), call("t2", "{}", "other")]),
    Say(calls=[call("t1", "")]),
]


@pytest.mark.parametrize("batch", [0, 20, answers.BATCH_BYTES])
@pytest.mark.parametrize("say", SAYS)
def test_a_streamed_answer_is_read_as_the_whole_one(
    say: Say, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "BATCH_BYTES", batch)
    whole = json.dumps(say.answer(1)).encode()
    stream = b"".join(sse_bytes(chunk) for chunk in say.chunks(1)) + b"data: [DONE]\n\n"
    answer = read(False, whole[:9], whole[9:])
    assert read(True, *(stream[at : at + 7] for at in range(0, len(stream), 7))) == answer
    message: dict[str, Any] = {"role": "assistant", "content": say.content or (None if say.calls else "")}
    message |= {"reasoning_content": say.reasoning} if say.reasoning else {}
    message |= {"tool_calls": say.calls} if say.calls else {}
    assert answer == Answer("chatcmpl-1", [Choice(0, message, None, say.finish_reason)])


def test_several_choices_of_chat_come_mixed() -> None:
    def chunk(index: int, finish: str | None = None, **delta: Any) -> bytes:
        return sse_bytes({"id": "x", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]})

    answer = read(
        True,
        chunk(1, content="b"),
        chunk(0, content="a"),
        chunk(1, "stop", content="B"),
        chunk(0, "length"),
    )
    assert [(c.index, c.message["content"], c.finish_reason) for c in answer.choices] == [
        (0, "a", "length"),
        (1, "bB", "stop"),
    ]


def test_parallel_calls_whose_pieces_are_mixed() -> None:
    def chunk(*pieces: dict[str, Any]) -> bytes:
        return sse_bytes({"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": list(pieces)}}]})

    def piece(index: int, arguments: str, **head: Any) -> dict[str, Any]:
        name = {"name": head.pop("name")} if head else {}
        return {"index": index, **head, "function": name | {"arguments": arguments}}

    first = chunk(piece(0, "{", id="a", name="f"), piece(1, "[", id="b", name="g"))
    answer = read(True, first, chunk(piece(1, "]"), piece(0, "}")))
    assert answer.choices[0].message["tool_calls"] == [call("a", "{}", "f"), call("b", "[]", "g")]


def test_completions_whole_and_streamed() -> None:
    def answer(*choices: tuple[int, str, str | None]) -> dict[str, Any]:
        fields = ("index", "text", "finish_reason")
        return {"id": "cmpl-1", "choices": [dict(zip(fields, choice, strict=True)) for choice in choices]}

    whole = answer((0, "ab", "stop"), (1, "c", "length"))
    pieces = [(0, "a", None), (1, "c", "length"), (0, "b", "stop")]
    stream = [sse_bytes(answer(piece)) for piece in pieces]
    assert read(False, json.dumps(whole).encode()) == read(True, *stream)
    assert read(True, *stream).choices[0] == Choice(0, None, "ab", "stop")


@pytest.mark.parametrize(
    "body", [b"", b'{"id": "x", "cho', b"[1]", b'{"error": {"message": "no"}}', b'{"choices": 3}', b"\xff"]
)
def test_what_is_no_answer_has_no_choices(body: bytes) -> None:
    assert read(False, body) == Answer(None, [])


def test_text_that_is_no_unicode_is_read() -> None:
    chunks = [
        sse_bytes({"id": "x", "choices": [{"delta": {"content": text}}]}) for text in ("a", "\ud800", "b")
    ]
    answer = read(True, *chunks)
    assert answer.choices[0].message == {"role": "assistant", "content": "a\ud800b"}


@pytest.mark.parametrize("end", ["", " to end it", "\n\n", "\ndata: [DONE]\n\n"])
def test_an_answer_that_quotes_the_end_of_a_stream_is_read_to_its_end(end: str) -> None:
    reader = AnswerReader(True)
    chunks = [{"id": "1", "choices": [{"index": 0, "text": text}]} for text in ("data: [DONE]" + end, "more")]
    for piece in map(sse_bytes, chunks):
        start, quoted, rest = piece.partition(b"data: [DONE]")
        for cut in (start, quoted + rest):
            reader.feed(cut)
            assert not reader.done
    last = sse_bytes("[DONE]")
    reader.feed(last[:-1])
    reader.feed(last[-1:])
    assert reader.done
    assert reader.finish().choices == [Choice(0, text=f"data: [DONE]{end}more")]


def test_half_a_stream_has_what_came() -> None:
    say = Say("hello", calls=[call("t1", '{"city": "Bern"}')])
    stream = b"".join(sse_bytes(chunk) for chunk in say.chunks(1))
    choice = read(True, stream[: stream.index(b'"{\\"c"') + 100]).choices[0]
    assert choice.message["content"] == "hello"
    assert '{"city": "Bern"}'.startswith(choice.message["tool_calls"][0]["function"]["arguments"])
    assert choice.finish_reason is None


# blocks


def chunk_of(**delta: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "model": "m", "choices": [{"index": 0, "delta": delta}]}


def test_what_is_said_between_the_pieces_of_a_call_comes_after_it() -> None:
    reader = BlockReader()
    named = {"index": 0, "id": "t", "function": {"name": "f", "arguments": "{"}}
    rest = {"index": 0, "function": {"arguments": "}"}}
    chunks = [{"tool_calls": [named]}, {"content": "a"}, {"content": "b"}, {"tool_calls": [rest]}]
    steps = [step for chunk in chunks for step in reader.feed(chunk_of(**chunk))] + reader.finish()
    assert [(step.kind, step.block.index, step.text) for step in steps] == [
        ("start", 0, ""),
        ("delta", 0, "{"),
        ("delta", 0, "}"),
        ("stop", 0, ""),
        ("start", 1, ""),
        ("delta", 1, "a"),
        ("delta", 1, "b"),
        ("stop", 1, ""),
    ]
    assert reader.turn.message() == says("ab", call("t", "{}", "f"))


def test_going_back_to_a_call_that_is_over_is_an_error() -> None:
    reader = BlockReader()
    for index in (0, 1):
        reader.feed(chunk_of(tool_calls=[{"index": index, "id": str(index), "function": {"name": "f"}}]))
    with pytest.raises(RequestError, match="follows the end of this call") as refused:
        reader.feed(chunk_of(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]))
    assert refused.value.status == 502


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"id": "x", "model": "m"},
        chunk_of(tool_calls=[{"index": 0}]),
        chunk_of(content=["a"]),
        chunk_of(tool_calls=3),
    ],
)
def test_what_is_no_chunk_is_an_error(chunk: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        BlockReader().feed(chunk)


# errors


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "completions"),
        ("/v1/responses", "responses"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/models", "chat"),
        ("/health", "chat"),
        ("/rollout/messages/attempt/responses/v1/completions", "completions"),
        ("/rollout/r/attempt/a/agent/x/v1/messages", "messages"),
    ],
)
def test_the_dialect_of_a_path(path: str, dialect: str) -> None:
    assert dialect_of(path).name == dialect


def test_errors_in_both_shapes() -> None:
    error = RequestError("no \ud800", 418, "odd")
    assert error_body(error) == {"error": {"message": "no ?", "type": "odd", "param": None, "code": None}}
    assert MessagesDialect.error_body(error) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "no ?"},
        "request_id": None,
    }
    assert error_response(error).status_code == 418


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": {"message": "no", "type": "odd"}}', ("no", "odd")),
        (b'{"detail": [{"loc": ["x"]}]}', ('[{"loc": ["x"]}]', "invalid_request_error")),
        (b'{"error": {"reason": 1}}', ('{"reason": 1}', "invalid_request_error")),
        (b"<h1>no</h1>", ("<h1>no</h1>", "invalid_request_error")),
        (b"", ("the engine answered with status 400", "invalid_request_error")),
        (b'{"a": 1}', ('{"a": 1}', "invalid_request_error")),
    ],
)
def test_reading_errors(body: bytes, expected: tuple[str, str]) -> None:
    error = read_error(400, body)
    assert (str(error), error.kind, error.status) == (*expected, 400)
