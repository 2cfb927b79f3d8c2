"""Capture: the store receives what is sampled for an attempt, token for token.

Nothing is sampled for a client that has disconnected.
"""

import asyncio
import json
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pytest
from asgi_helpers import response_body, start, stream_start
from capture_helpers import (
    ASKED,
    ENGINE,
    INSIDE,
    Call,
    FakeApp,
    Sink,
    add_token,
    chunk,
    send_event,
    settle,
    whole,
)
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope
from template_helpers import make_tokenizer, says, template, user

from raylight import semconv
from raylight.engines.capture_context import CURRENT, AttemptScope
from raylight.errors import StoreLostError
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.http.errors import RequestError
from raylight.http.field_bounds import MAX_CHOICES
from raylight.serving.capture import captured_request, middleware, retry_queue
from raylight.serving.capture.middleware import (
    REMEMBERED_LOADS,
    CaptureMiddleware,
    ConversationLoader,
    count_choices,
)
from raylight.serving.capture.recorder import Recorder
from raylight.serving.conversations.conversations import Conversations, Prompt
from raylight.serving.dialects.translate import ANSWER_ID
from raylight.store.client import StoreClient
from raylight.store.reading import ChatTurn
from raylight.store.service import StoreService
from raylight.traces.attributes import call_key_of
from raylight.traces.messages import read_call
from raylight.types import HistoryNote, IntArray

pytestmark = pytest.mark.timeout(60)
STREAMED = ASKED | {"stream": True}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


Sent: TypeAlias = tuple[AttemptScope, Any]
NOTE = HistoryNote("white_space", "reason", 1, 2, "was", "sent")


class Known:
    """Fake conversations: they record their calls, and splice the given tokens."""

    def __init__(self, spliced: list[int] | None = None) -> None:
        self.spliced = spliced
        self.whole = True
        self.remembered: list[tuple[AttemptScope, Any, Any, list[int]]] = []
        self.prompt_lengths: list[int] = []
        self.forgotten: list[AttemptScope] = []

    def read(self, scope: AttemptScope, body: Any) -> Sent:
        return scope, body

    def prompt(self, sent: Sent, files: Any) -> Prompt:
        if not self.spliced:
            return Prompt(None, "rendered", HistoryNote("new"))
        return Prompt(self.spliced, "spliced" if self.whole else "partly", NOTE)

    def unknown_answer(self, sent: Sent) -> bytes | None:
        """Answers are identified by their text alone."""
        answers = [m["content"] for m in sent[1]["messages"] if m["role"] == "assistant"]
        return answers[-1].encode() if answers and not self.knows(sent, {"content": answers[-1]}) else None

    def remember(self, sent: Sent, message: Any, tokens: IntArray, prompt_length: int) -> None:
        self.remembered.append((*sent, message, tokens.tolist()))
        self.prompt_lengths.append(prompt_length)

    def forget(self, scope: AttemptScope) -> None:
        self.forgotten.append(scope)

    def knows(self, sent: Sent, message: Any) -> bool:
        return any(
            known == sent[0] and said["content"] == message["content"]
            for known, _, said, _ in self.remembered
        )


class Bench:
    """Capture between a fake engine and a sink."""

    def __init__(
        self, conversations: Any = None, history: Any = None, timeout_s: float = 5.0, capacity: int = 100
    ) -> None:
        self.sink, self.app, self.times = Sink(), FakeApp(), iter(range(10, 10_000))
        self.recorder = Recorder(self.sink, capacity, timeout_s)
        self.capture = CaptureMiddleware(
            self.app, ENGINE, self.recorder, conversations, history, clock=lambda: float(next(self.times))
        )

    def call(self, body: Any = ASKED, *args: Any, **kwargs: Any) -> Call:
        return Call(self.capture, body, *args, **kwargs)

    def translated(self, dialect: str) -> ASGIApp:
        """Return the application behind the translation of a dialect."""

        async def app(scope: AsgiScope, receive: Receive, send: Send) -> None:
            await self.capture({**scope, "raylight.dialect": dialect}, receive, send)

        return app

    async def record(self, body: Any = ASKED, *args: Any, **kwargs: Any) -> tuple[Call, Any, Any]:
        """A call, its generation and its span."""
        call = await self.call(body, *args, **kwargs).answered()
        await self.sink.has(1, 1)
        ((_, generation, span),) = self.sink.closed
        return call, generation, span


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_ends_before_its_client_has_the_answer(bench: Bench, streamed: bool) -> None:
    call = bench.call(STREAMED if streamed else ASKED)
    received: list[float] = []
    sent = call.sent

    class Watched(list):
        def append(self, message: Any) -> None:
            received.append(float(next(bench.times)))
            sent.append(message)

    call.sent = Watched()
    await call.answered()
    await bench.sink.has(1, 1)
    ((_, generation, span),) = bench.sink.closed
    assert generation.end_time == span.end_time < received[-1]  # a reward that comes at once is for this call


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_is_recorded_token_for_token(bench: Bench, streamed: bool) -> None:
    call, generation, span = await bench.record(
        STREAMED if streamed else ASKED, attempt=AttemptScope("ro-1", "at-1", "planner")
    )
    assert call.status == 200
    key = generation.key
    assert bench.sink.opened == [(key, 10.0)]
    assert (key.rollout_id, key.attempt_id) == ("ro-1", "at-1")
    assert generation.prompt_ids.tolist() == [ord("h"), ord("i")]
    assert generation.output_ids.tolist() == [ord(letter) for letter in "hello"]
    assert (generation.logprobs.tolist(), generation.weight_versions.tolist()) == ([-0.5] * 5, [3] * 5)
    assert (generation.model, generation.finish_reason, generation.agent) == ("policy", "stop", "planner")
    assert (generation.temperature, generation.start_time) == (0.5, 10.0)
    assert span.name == "openai.chat.completion"
    assert (span.span_id, span.trace_id) == (key.call_id[:16], key.call_id)
    assert (span.rollout_id, span.attempt_id) == ("ro-1", "at-1")
    assert (span.start_time, span.end_time) == (10.0, generation.end_time)
    told = dict(span.attributes)
    assert json.loads(told.pop(semconv.INPUT_MESSAGES)) == ASKED["messages"]
    assert json.loads(told.pop(semconv.OUTPUT_MESSAGES)) == [says("hello")]
    stream = {"stream": True} if streamed else {}
    assert json.loads(told.pop(semconv.REQUEST_PARAMETERS)) == {"model": "policy"} | stream
    assert told.pop(semconv.TIME_TO_FIRST_TOKEN, None) == (1.0 if streamed else None)
    assert told == {
        semconv.CALL_ID: key.call_id,
        semconv.AGENT_NAME: "planner",
        semconv.REQUEST_MODEL: "policy",
        semconv.RESPONSE_ID: f"chatcmpl-{key.call_id}",
        semconv.DIALECT: "chat",
        semconv.PROMPT_SOURCE: "rendered",
        semconv.FINISH_REASONS: ["stop"],
    }


async def test_the_answer_is_named_after_its_call_so_that_the_agents_own_spans_are_found(
    bench: Bench,
) -> None:
    call, generation, span = await bench.record(x_request_id="the agent's own")
    assert call.json["id"] == f"chatcmpl-{generation.key.call_id}"
    assert call_key_of(span.attributes) == call.json["id"]


@pytest.mark.parametrize(
    ("dialect", "prefix", "name"),
    [("messages", "msg_", "anthropic.message"), ("responses", "resp_", "openai.response")],
)
async def test_what_was_translated_says_so_and_has_the_id_that_the_agent_sees(
    bench: Bench, dialect: str, prefix: str, name: str
) -> None:
    await Call(bench.translated(dialect), ASKED | {"tools": TOOLS}).answered()
    await bench.sink.has(1, 1)
    span = bench.sink.closed[0][2]
    assert (span.name, span.attributes[semconv.DIALECT]) == (name, dialect)
    assert span.attributes[semconv.RESPONSE_ID] == prefix + span.attributes[semconv.CALL_ID]
    assert json.loads(span.attributes[semconv.TOOL_DEFINITIONS]) == TOOLS
    assert read_call(span.attributes).completeness == (True, True, True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_choice_is_a_call(bench: Bench, streamed: bool) -> None:
    await bench.call(ASKED | {"n": 3, "stream": streamed}).answered()
    await bench.sink.has(3, 3)
    assert [key for key, _ in bench.sink.opened] == [key for key, _, _ in bench.sink.closed]
    assert len({key.call_id for key, _, _ in bench.sink.closed}) == 3
    for key, generation, span in bench.sink.closed:
        assert generation.key == key
        assert span.attributes[semconv.CALL_ID] == key.call_id
    keys = {call_key_of(span.attributes) for _, _, span in bench.sink.closed}
    assert len(keys) == 3


async def test_completions_are_recorded_too(bench: Bench) -> None:
    _, generation, span = await bench.record({"model": "policy", "prompt": "once"}, "/v1/completions")
    assert generation.output_ids.tolist() == [ord(letter) for letter in "hello"]
    assert (span.name, span.attributes[semconv.DIALECT]) == ("openai.completion", "completions")
    assert json.loads(span.attributes[semconv.OUTPUT_MESSAGES]) == [says("hello")]
    assert json.loads(span.attributes[semconv.INPUT_MESSAGES]) == [{"role": "user", "content": "once"}]


@pytest.mark.parametrize(
    ("body", "chat", "expected"),
    [
        ({}, True, 1),
        ({"n": 4}, True, 4),
        ({"n": 1}, True, 1),
        ({"n": None}, True, 1),
        ({"prompt": "a", "n": 2}, False, 2),
        ({"prompt": ["a", "b"], "n": 2}, False, 4),
        ({"prompt": [1, 2, 3]}, False, 1),
        ({"prompt": [[1], [2, 3], [4]]}, False, 3),
        ({"prompt": []}, False, 1),
        ({"prompt": ["a", "b"]}, True, 1),
    ],
)
def test_how_many_calls_a_request_is(body: dict[str, Any], chat: bool, expected: int) -> None:
    assert count_choices(body, chat) == expected


async def test_outside_an_attempt_nothing_is_recorded_or_changed(bench: Bench) -> None:
    call = await bench.call(
        ASKED | {"kv_transfer_params": {"a": 1}}, attempt=None, x_request_id="mine"
    ).answered()
    assert call.status == 200
    assert bench.app.requests == [ASKED | {"kv_transfer_params": {"a": 1}}]
    assert bench.app.headers[0][b"x-request-id"] == b"mine"
    await bench.call(ASKED, "/tokenize").answered()
    await settle()
    assert bench.app.contexts == [None, None]
    assert bench.sink.tries == 0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object"),
        (ASKED | {"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
        (ASKED | {"n": 10**9}, "at most"),
        (ASKED | {"n": MAX_CHOICES + 1}, "at most"),
        (ASKED | {"use_beam_search": True}, "use_beam_search"),
    ],
)
async def test_what_cannot_be_recorded_is_refused(bench: Bench, body: Any, why: str) -> None:
    call = await bench.call(body).answered()
    assert call.status == 400
    assert why in call.json["error"]["message"]
    await settle()
    assert (bench.app.requests, bench.sink.tries) == ([], 0)


# what the store must know


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_byte_leaves_before_the_store_knows_but_sampling_does_not_wait(
    bench: Bench, streamed: bool
) -> None:
    bench.sink.gate.clear()
    call = bench.call(STREAMED if streamed else ASKED)
    await bench.app.sampling.wait()
    await settle()
    assert call.sent == []
    bench.sink.gate.set()
    await call.answered()
    assert call.status == 200


async def test_a_call_is_announced_while_it_is_still_sampled(bench: Bench) -> None:
    bench.app.gate.clear()
    call = bench.call()
    await bench.sink.has(1, 0)
    assert bench.sink.closed == []
    bench.app.gate.set()
    await call.answered()
    await bench.sink.has(1, 1)


@pytest.mark.parametrize("listens", [False, True])
async def test_the_key_of_a_decided_attempt_opens_nothing_any_more(listens: bool) -> None:
    known = Known()
    bench = Bench(known)
    bench.sink.over.add("at-1")
    bench.app.listens = listens
    bench.app.gate.clear()
    call = await bench.call().answered()
    assert (call.status, call.json["error"]["code"]) == (401, "invalid_api_key")
    assert "its API key has been revoked" in call.json["error"]["message"]
    assert (bench.app.cancelled, bench.app.disconnects) == ((0, 1) if listens else (1, 0)), (
        "nobody samples on"
    )
    await bench.sink.has(1, 1)
    assert (await bench.call().answered()).status == 401
    assert len(bench.app.requests) == 1, "the next one is refused at once"
    assert known.forgotten == [INSIDE]
    bench.app.gate.set()
    assert (await bench.call(attempt=AttemptScope("ro-1", "at-2")).answered()).status == 200


async def test_a_store_that_is_away_pushes_back_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_queue, "FIRST_PAUSE_S", 0.001)
    bench = Bench(timeout_s=0.02)
    bench.sink.error = StoreLostError("gone")
    call = await bench.call().answered()
    assert (call.status, call.json["error"]["code"]) == (503, "server_is_overloaded")
    assert "send the request again" in call.json["error"]["message"]
    bench.sink.error = None
    await bench.sink.has(1, 1)
    assert bench.sink.closed[0][1].finish_reason == "aborted", "nobody got the answer"
    assert bench.sink.closed[0][1].output_ids.tolist() == [ord(letter) for letter in "hello"]
    assert (await bench.call().answered()).status == 200
    await bench.sink.has(2, 2)


async def test_a_full_buffer_turns_calls_away() -> None:
    bench = Bench(timeout_s=0.01, capacity=1)
    bench.app.gate.clear()
    first = bench.call()
    await bench.app.sampling.wait()
    assert (await bench.call().answered()).status == 503
    assert len(bench.app.requests) == 1
    bench.app.gate.set()
    assert (await first.answered()).status == 200


async def test_a_hundred_calls_at_once(bench: Bench) -> None:
    bench.app.gate.clear()
    calls = [bench.call({"messages": [{"role": "user", "content": str(i)}]}) for i in range(100)]
    await bench.sink.has(100, 0)
    bench.app.gate.set()
    await asyncio.gather(*(call.task for call in calls))
    await bench.sink.has(100, 100)
    assert {call.status for call in calls} == {200}
    by_id = {generation.key.call_id: generation for _, generation, _ in bench.sink.closed}
    for number, call in enumerate(calls):
        assert by_id[call.json["id"].removeprefix("chatcmpl-")].prompt_ids.tolist() == [
            ord(c) for c in str(number)
        ]


# what goes wrong


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("listens", [False, True])
async def test_when_the_client_leaves_sampling_ends_and_what_there_was_is_recorded_as_aborted(
    bench: Bench, streamed: bool, listens: bool
) -> None:
    bench.app.gate.clear()
    bench.app.listens = listens
    call = bench.call(STREAMED if streamed else ASKED)
    await bench.app.sampling.wait()
    call.left.set()
    await call.answered()
    await bench.sink.has(1, 1)
    assert (bench.app.cancelled, bench.app.disconnects) == ((0, 1) if listens else (1, 0))
    _, generation, span = bench.sink.closed[0]
    assert (generation.finish_reason, generation.output_ids.tolist(), generation.logprobs.tolist()) == (
        "aborted",
        [ord("h")],
        [-0.5],
    )
    assert span.attributes[semconv.FINISH_REASONS] == ["aborted"]


async def test_an_application_that_listens_but_does_not_end_is_cancelled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_request, "DISCONNECT_TIMEOUT_S", 0.01)

    async def deaf(scope: AsgiScope, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.Event().wait()

    call = Call(CaptureMiddleware(deaf, ENGINE, bench.recorder, None), ASKED)
    await settle()
    call.left.set()
    await call.answered()
    await bench.sink.has(1, 1)
    assert bench.sink.closed[0][1:] == (None, None)


async def test_a_server_that_gives_the_request_up_ends_it_too(bench: Bench) -> None:
    bench.app.gate.clear()
    call = bench.call()
    await bench.app.sampling.wait()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.answered()
    await bench.sink.has(1, 1)
    assert bench.app.cancelled == 1
    assert bench.sink.closed[0][1].finish_reason == "aborted"


async def test_a_client_that_leaves_after_the_end_changes_nothing(bench: Bench) -> None:
    """Servers report the client's disconnect once the answer is sent; the application may still have work to
    do.
    """
    done = []

    async def tidy(scope: AsgiScope, receive: Receive, send: Send) -> None:
        await bench.app(scope, receive, send)
        await settle()
        done.append(True)

    call = Call(CaptureMiddleware(tidy, ENGINE, bench.recorder, None), ASKED)
    await call.answered()
    await bench.sink.has(1, 1)
    assert done == [True]
    assert bench.sink.closed[0][1].finish_reason == "stop"


async def test_an_error_of_the_engine_closes_its_calls_without_a_record(bench: Bench) -> None:
    bench.app.status = 400
    call = await bench.call(ASKED | {"n": 2}).answered()
    assert (call.status, call.json["error"]["message"]) == (400, "no")
    await bench.sink.has(2, 2)
    assert [record[1:] for record in bench.sink.closed] == [(None, None)] * 2


async def test_an_engine_that_raises_closes_its_calls_and_the_error_passes(bench: Bench) -> None:
    bench.app.breaks_at = 2
    with pytest.raises(RuntimeError, match="the engine died"):
        await bench.call().answered()
    await bench.sink.has(1, 1)
    assert bench.sink.closed[0][1:] == (None, None)


async def test_an_engine_that_fails_in_mid_stream_leaves_an_aborted_call(bench: Bench) -> None:
    bench.app.breaks_at = 2
    with pytest.raises(RuntimeError, match="the engine died"):
        await bench.call(STREAMED).answered()
    await bench.sink.has(1, 1)
    _, generation, span = bench.sink.closed[0]
    assert (generation.finish_reason, generation.output_ids.tolist()) == ("aborted", [ord("h"), ord("e")])
    assert json.loads(span.attributes[semconv.OUTPUT_MESSAGES]) == [{"role": "assistant", "content": "he"}]


@pytest.fixture
def late(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Bench whose application starts a stream, and is silent before its first event."""
    monkeypatch.setattr(captured_request, "START_AFTER_S", 0.01)
    bench.app.first_gate.clear()
    return bench


async def test_a_stream_is_started_before_its_first_event_if_that_is_late(late: Bench) -> None:
    call = late.call(STREAMED)
    await call.begun.wait()
    assert [message["type"] for message in call.sent] == ["http.response.start"]
    late.app.first_gate.set()
    await call.answered()
    assert [message["type"] for message in call.sent].count("http.response.start") == 1
    assert call.body.endswith(b"data: [DONE]\n\n")
    await late.sink.has(1, 1)
    assert late.sink.closed[0][1].output_ids.tolist() == [ord(letter) for letter in "hello"]


async def test_a_late_stream_of_another_dialect_has_its_id_from_the_start(late: Bench) -> None:
    late.app.answer_id = "of-a-provider"
    call = Call(late.translated("responses"), STREAMED)
    await call.begun.wait()
    late.app.first_gate.set()
    await call.answered()
    await late.sink.has(1, 1)
    span = late.sink.closed[0][2]
    assert call.headers[ANSWER_ID].decode() == span.attributes[semconv.CALL_ID]
    assert span.attributes[semconv.RESPONSE_ID] == f"resp_{span.attributes[semconv.CALL_ID]}"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_late_stream_is_not_started_before_the_store_knows_it(late: Bench, fails: bool) -> None:
    late.sink.gate.clear()
    late.app.breaks_at = 0 if fails else None
    call = late.call(STREAMED)
    await asyncio.sleep(0.1)
    assert call.sent == []
    if fails:
        late.app.first_gate.set()
        with pytest.raises(RuntimeError, match="the engine died"):
            await call.answered()
    late.sink.gate.set()
    if fails:
        await late.sink.has(1, 1)
        await settle()
        assert call.sent == []  # another layer has answered with an error meanwhile
        return
    await call.begun.wait()
    late.app.first_gate.set()
    await call.answered()


async def test_a_client_that_leaves_a_late_stream_ends_its_call(late: Bench) -> None:
    call = late.call(STREAMED)
    await call.begun.wait()
    call.left.set()
    await call.answered()
    await late.sink.has(1, 1)
    assert len(call.sent) == 1
    assert late.app.cancelled == 1


async def test_a_choice_that_was_cut_off_is_aborted_and_the_other_is_not(bench: Bench) -> None:
    """An engine may end requests early when new weights arrive."""

    async def cut(scope: AsgiScope, receive: Receive, send: Send) -> None:
        context = CURRENT.get()
        assert context is not None
        for index, reason in enumerate(["stop", "aborted"]):
            sample = context.sample(index, [1], {"temperature": 1.0})
            add_token(sample, 2)
            sample.finish_reason = reason
        answer = {"id": "x", "choices": [whole(i, "x", chat=True) for i in range(2)]}
        await send(start())
        await send(response_body(json.dumps(answer).encode()))

    known = Known()
    await Call(CaptureMiddleware(cut, ENGINE, bench.recorder, known), ASKED | {"n": 2}).answered()
    await bench.sink.has(2, 2)
    assert [generation.finish_reason for _, generation, _ in bench.sink.closed] == ["stop", "aborted"]
    assert len(known.remembered) == 1


async def test_a_model_that_runs_elsewhere_leaves_a_span_without_tokens(bench: Bench) -> None:
    bench.app.samples = False
    call, generation, span = await bench.record()
    assert (call.status, generation) == (200, None)
    assert call_key_of(span.attributes) == call.json["id"]
    assert json.loads(span.attributes[semconv.OUTPUT_MESSAGES]) == [says("hello")]
    assert span.attributes[semconv.FINISH_REASONS] == ["stop"]


# conversations


async def test_a_conversation_that_is_known_goes_to_the_engine_as_tokens() -> None:
    known = Known([7, 8, 9])
    bench = Bench(known)
    _, generation, span = await bench.record()
    assert bench.app.requests == [ASKED | {"kv_transfer_params": {"prompt_token_ids": [7, 8, 9]}}]
    assert b"content-length" not in bench.app.headers[0]  # that of the body without the tokens
    assert (generation.prompt_ids.tolist(), span.attributes[semconv.PROMPT_SOURCE]) == ([7, 8, 9], "spliced")
    assert bench.app.contexts[0].body == ASKED
    ((scope, body, message, tokens),) = known.remembered
    assert (scope, body, message) == (INSIDE, ASKED, says("hello"))
    assert tokens == [7, 8, 9] + [ord(letter) for letter in "hello"]
    assert known.prompt_lengths == [3]
    assert generation.history == NOTE


async def test_it_can_be_switched_off_by_request() -> None:
    bench = Bench(Known([7]))
    _, generation, span = await bench.record(x_raylight_token_in="off")
    assert generation.history.kind == "token_in_off"
    assert bench.app.requests == [ASKED]
    assert span.attributes[semconv.PROMPT_SOURCE] == "rendered"
    assert (await bench.call(x_raylight_token_in="perhaps").answered()).status == 400


async def test_a_conversation_of_which_only_the_beginning_is_known_says_so() -> None:
    known = Known([7])
    known.whole = False
    _, _, span = await Bench(known).record()
    assert span.attributes[semconv.PROMPT_SOURCE] == "partly"


async def test_completions_are_never_spliced() -> None:
    known = Known([7])
    bench = Bench(known)
    await bench.record({"prompt": "x"}, "/v1/completions")
    assert bench.app.requests == [{"prompt": "x"}]
    assert known.remembered == []


async def test_an_answer_is_remembered_before_its_last_byte_leaves() -> None:
    known = Known()
    bench = Bench(known)
    for number, body in enumerate((ASKED, STREAMED)):
        seen: list[tuple[bytes, int]] = []
        await _watched(bench.capture, body, seen, known)
        assert [count for piece, count in seen if (b"[DONE]" in piece if body is STREAMED else piece)] == [
            number + 1
        ]


async def _watched(
    capture: CaptureMiddleware, body: Any, seen: list[tuple[bytes, int]], known: Known
) -> None:
    async def watched(scope: AsgiScope, receive: Receive, send: Send) -> None:
        async def look(message: Any) -> None:
            seen.append((message.get("body", b""), len(known.remembered)))
            await send(message)

        await capture(scope, receive, look)

    await Call(watched, body).answered()


async def test_what_was_cut_off_is_not_remembered() -> None:
    known = Known()
    bench = Bench(known)
    bench.app.gate.clear()
    call = bench.call(STREAMED)
    await bench.app.sampling.wait()
    call.left.set()
    await call.answered()
    assert known.remembered == []


PAST = ASKED | {"messages": [*ASKED["messages"], says("hello"), user("on")]}


async def test_a_conversation_that_another_replica_had_is_asked_for_once() -> None:
    known, asked = Known(), []
    gate = asyncio.Event()

    async def history(rollout_id: str, attempt_id: str) -> list[ChatTurn]:
        asked.append((rollout_id, attempt_id))
        await gate.wait()
        return [ChatTurn("planner", ASKED, says("hello"), np.array([1, 2, 3]), 1)]

    bench = Bench(known, history)
    await bench.call().answered()
    assert asked == [], "it has no past"
    known.remembered.clear()
    calls = [bench.call(PAST) for _ in range(3)]
    await settle()
    assert not any(call.task.done() for call in calls)
    gate.set()
    for call in calls:
        await call.answered()
    assert asked == [("ro-1", "at-1")]
    planner = AttemptScope("ro-1", "at-1", "planner")
    assert known.remembered[0] == (planner, ASKED, says("hello"), [1, 2, 3])
    known.remembered.clear()
    await bench.call(PAST).answered()
    assert len(asked) == 1


async def test_a_history_that_cannot_be_had_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    known, asked = Known(), []

    async def history(rollout_id: str, attempt_id: str) -> list[ChatTurn]:
        asked.append(attempt_id)
        raise StoreLostError("gone")

    bench = Bench(known, history)
    for _ in range(2):
        known.remembered.clear()
        assert (await bench.call(PAST).answered()).status == 200
    assert len(asked) == 2
    assert "could not be loaded, and are rendered: gone" in caplog.text


async def test_one_answer_is_asked_for_once_and_another_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known, asked = Known(), 0

    async def history(rollout_id: str, attempt_id: str) -> list[ChatTurn]:
        nonlocal asked
        asked += 1
        return [ChatTurn(None, ASKED, {"role": "assistant", "content": "sampled"}, np.array([1]), 0)]

    monkeypatch.setattr(middleware, "REMEMBERED_LOADS", 3)
    loader: Any = ConversationLoader(known, history)  # type: ignore[arg-type]
    for _ in range(3):
        await loader.load(INSIDE, b"edited")
    assert (asked, len(known.remembered)) == (1, 1)
    await loader.load(INSIDE, b"edited further")
    assert (asked, len(known.remembered)) == (2, 1), "what is known is not remembered again"
    await loader.load(AttemptScope("ro-1", "at-2"), b"edited")
    assert asked == 3
    await loader.load(INSIDE, b"edited")
    await loader.load(INSIDE, b"one more")
    assert len(loader._loads) == 3 < REMEMBERED_LOADS
    await loader.load(INSIDE, b"edited")
    assert asked == 4, "the one that was not asked for longest is forgotten first"


# with the store


class Replicas:
    """Replicas of one policy with a store, and an agent that calls one after the other."""

    def __init__(self, count: int) -> None:
        self.store, self.asked = StoreClient(StoreService()), 0
        tokenizer = make_tokenizer(template("chatml"))
        self.conversations = [Conversations(tokenizer) for _ in range(count)]
        self.apps = [FakeApp() for _ in range(count)]
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

    async def history(self, rollout_id: str, attempt_id: str) -> list[ChatTurn]:
        self.asked += 1
        return await self.store.chat_history(rollout_id, attempt_id)

    async def talk(self, attempt: AttemptScope, *order: int, edit: str = "") -> None:
        """The store has each answer before the agent continues; the fake engine samples codes of letters."""
        for turn, replica in enumerate(order):
            self.apps[replica].answer = f"answer {len(self.messages)}"
            recorder = Recorder(self.store.capture)
            now = float(len(self.messages))
            capture = CaptureMiddleware(
                self.apps[replica],
                ENGINE,
                recorder,
                self.conversations[replica],
                self.history,
                clock=lambda now=now: now,
            )
            call = await Call(capture, ASKED | {"messages": self.messages}, attempt=attempt).answered()
            assert await recorder.aclose() == 0
            answer = call.json["choices"][0]["message"]
            shown = answer if turn + 1 < len(order) or not edit else {**answer, "content": edit}
            self.messages = [*self.messages, shown, {"role": "user", "content": f"more {turn}"}]

    async def sources(self) -> list[str]:
        spans = sorted(await self.store.query_spans("ro-1"), key=lambda span: span.start_time)
        return [span.attributes[semconv.PROMPT_SOURCE] for span in spans]

    async def trajectories(self) -> int:
        (left,) = await self.store.collect(["ro-1"])
        return len(build_trajectories(left.generations).rows)


async def started(replicas: Replicas) -> AttemptScope:
    rollout = await replicas.store.start_rollout("task", rollout_id="ro-1")
    return AttemptScope("ro-1", rollout.attempt.attempt_id)


@pytest.mark.parametrize("order", [(0, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1, 0, 2, 0)])
async def test_a_conversation_that_changes_replicas_stays_exact(order: tuple[int, ...]) -> None:
    replicas = Replicas(max(order) + 1)
    await replicas.talk(await started(replicas), *order)
    assert await replicas.sources() == ["rendered"] + ["spliced"] * (len(order) - 1)
    assert await replicas.trajectories() == 1
    assert replicas.asked == sum(before != after for before, after in pairwise(order))


async def test_an_answer_that_the_agent_edited_is_rendered_after_what_is_exact() -> None:
    replicas = Replicas(2)
    attempt = await started(replicas)
    await replicas.talk(attempt, 0, 1, edit="an answer that it never sent")
    await replicas.talk(attempt, 1, 1)
    assert await replicas.sources() == ["rendered", "spliced", "partly", "spliced"]
    assert replicas.asked == 2, "for the other one's answer, and without success for the edited one"
    assert await replicas.trajectories() == 2


async def test_an_answer_that_comes_late_to_the_store_is_found_by_the_next_call_that_needs_it() -> None:
    replicas = Replicas(2)
    attempt = await started(replicas)
    await replicas.talk(attempt, 0)
    late, replicas.history = replicas.history, nothing  # type: ignore[method-assign]
    await replicas.talk(attempt, 1)
    replicas.history = late  # type: ignore[method-assign]
    await replicas.talk(attempt, 0, 1)
    assert await replicas.sources() == ["rendered", "rendered", "spliced", "spliced"]


async def nothing(rollout_id: str, attempt_id: str) -> list[ChatTurn]:
    return []


async def test_another_replica_gets_from_the_store_what_the_first_one_remembered() -> None:
    store = StoreClient(StoreService())
    rollout = await store.start_rollout("task", rollout_id="ro-1")
    attempt = AttemptScope("ro-1", rollout.attempt.attempt_id, "planner")
    first, second = Known(), Known()
    body = ASKED | {"tools": TOOLS, "chat_template_kwargs": {"a": 1}, "n": 2}
    recorder = Recorder(store.capture)
    app = FakeApp()
    capture = CaptureMiddleware(app, ENGINE, recorder, first, store.chat_history)
    await Call(capture, body, attempt=attempt).answered()
    await Call(capture, {"prompt": "x"}, "/v1/completions", attempt=attempt).answered()
    app.gate.clear()
    leaving = Call(capture, ASKED, attempt=attempt)
    app.sampling.clear()
    await app.sampling.wait()
    leaving.left.set()
    await leaving.answered()
    app.gate.set()
    assert await recorder.aclose() == 0
    other = Recorder(store.capture)
    await Call(
        CaptureMiddleware(app, ENGINE, other, second, store.chat_history), PAST, attempt=attempt
    ).answered()
    assert await other.aclose() == 0
    assert len(first.remembered) == 2
    assert second.remembered[:2] == first.remembered
    assert second.prompt_lengths[:2] == first.prompt_lengths
    spans = await store.query_spans("ro-1")
    assert sum(semconv.RESPONSE_TOKEN_IDS in span.attributes for span in spans) == 4, (
        "what was cut off is shown without its tokens"
    )
    assert (await store.statistics())["generations"] == 5


async def test_a_rollout_that_is_decided_meanwhile_ends_its_calls() -> None:
    store = StoreClient(StoreService())
    rollout = await store.start_rollout("task", rollout_id="ro-1")
    attempt = AttemptScope("ro-1", rollout.attempt.attempt_id)
    recorder = Recorder(store.capture)
    capture = CaptureMiddleware(FakeApp(), ENGINE, recorder, None)
    assert (await Call(capture, ASKED, attempt=attempt).answered()).status == 200
    await store.finish_attempt(rollout, "succeeded")
    assert (await Call(capture, ASKED, attempt=attempt).answered()).status == 401
    assert (await Call(capture, ASKED, attempt=AttemptScope("ro-1", "at-unknown")).answered()).status == 401
    await recorder.aclose()
    assert (await store.statistics())["generations"] == 1
    assert (await store.statistics())["calls_late"] == 2


async def test_text_that_looks_like_the_end_of_a_stream_is_not() -> None:
    known = Known()
    bench = Bench(known)

    async def odd(scope: AsgiScope, receive: Receive, send: Send) -> None:
        context = CURRENT.get()
        sample = context.sample(0, [1], {"temperature": 1.0})
        add_token(sample, 1)
        sample.finish_reason = "stop"
        await send(stream_start())
        for text in ("data: [DONE]", " more"):
            await send_event(send, {"choices": [chunk(0, text, chat=True)]})
        await send_event(send, "[DONE]")
        await send(response_body())

    await Call(CaptureMiddleware(odd, ENGINE, bench.recorder, known), STREAMED).answered()
    assert known.remembered[0][2]["content"] == "data: [DONE] more"


@pytest.mark.parametrize("n", ["2", 2.0, True, 0, -3, [2]])
def test_a_number_of_choices_that_is_none_is_refused(n: Any) -> None:
    with pytest.raises(RequestError, match="n: it must be a whole number"):
        count_choices({"n": n}, True)
