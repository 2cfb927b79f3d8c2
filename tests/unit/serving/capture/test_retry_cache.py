"""Retries of SDKs: what was sampled already is answered again, and is recorded once."""

import asyncio
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest
from anthropic import AsyncAnthropic
from capture_helpers import ASKED, ENGINE, INSIDE, Call, FakeApp, Sink, send_json, settle
from openai import AsyncOpenAI
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope
from unit_helpers import within

from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.serving.capture.middleware import CaptureMiddleware
from raylight.serving.capture.recorder import Recorder
from raylight.serving.capture.retry_cache import RetryCache
from raylight.serving.dialects.translate import TranslationMiddleware
from raylight.types import REPEATED

STREAMED = ASKED | {"stream": True}


class Bench:
    """A retry cache and capture around a fake engine."""

    def __init__(self, **limits: Any) -> None:
        self.sink, self.app, self.now = Sink(), FakeApp(), 0.0
        capture = CaptureMiddleware(self.app, ENGINE, Recorder(self.sink), None)
        self.cache = RetryCache(TranslationMiddleware(capture), clock=lambda: self.now, **limits)

    def call(
        self,
        body: Any = ASKED,
        tries: int = 0,
        path: str = "/v1/chat/completions",
        attempt: AttemptScope | None = INSIDE,
    ) -> Call:
        return Call(self.cache, body, path, attempt, x_stainless_retry_count=str(tries))

    async def join(self, body: Any = ASKED) -> tuple[Call, Call]:
        """Return a request that is being sampled, and a retry that joins it."""
        self.app.gate.clear()
        first = self.call(body)
        await self.app.sampling.wait()
        again = self.call(body, tries=1)
        await settle()
        return first, again

    async def cut_off(self) -> None:
        """Make a request whose client leaves while it is sampled."""
        self.app.gate.clear()
        self.app.sampling.clear()
        call = self.call()
        await self.app.sampling.wait()
        call.left.set()
        await call.answered()
        self.app.gate.set()

    async def lose(self, place: int, of: int) -> list[Call]:
        """Return equal requests that are answered at once; the answer of one is lost."""
        self.app.gate.clear()
        calls = [self.call() for _ in range(of)]
        await settle()
        calls[place].lose_answer = True
        self.app.gate.set()
        for call in calls:
            await call.answered()
        return calls

    @property
    def sampled(self) -> int:
        return len(self.app.requests)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_retry_of_what_is_unknown_here_is_marked(bench: Bench) -> None:
    """Another replica had it, which may have died."""
    await bench.call(tries=0).answered()
    await bench.call(tries=1).answered()
    await bench.call(STREAMED | {"seed": 1}, tries=1).answered()
    first, second = [key.request for key, _ in bench.sink.opened]
    assert not first.endswith(REPEATED)
    assert second.endswith(REPEATED)


async def test_a_retry_stays_marked_when_it_fails_here(bench: Bench) -> None:
    bench.app.status = 503
    await bench.call(tries=1).answered()
    bench.app.status = 200
    await bench.call(tries=2).answered()
    assert [key.request.endswith(REPEATED) for key, _ in bench.sink.opened] == [True, True]


@pytest.mark.parametrize("body", [ASKED, STREAMED])
async def test_a_retry_gets_the_same_bytes_and_nothing_is_sampled(bench: Bench, body: Any) -> None:
    first = await bench.call(body).answered()
    for tries in (1, 2):
        again = await bench.call(body, tries).answered()
        assert (again.sent, again.status) == (first.sent, 200)
    await bench.sink.has(1, 1)
    assert bench.sampled == 1
    assert [generation.finish_reason for _, generation, _ in bench.sink.closed] == ["stop"]


async def test_the_same_request_without_a_retrys_header_is_sampled_anew(bench: Bench) -> None:
    """An agent that sends equal requests wants two samples."""
    await bench.call().answered()
    await bench.call().answered()
    assert bench.sampled == 2


@pytest.mark.parametrize(
    "other",
    [
        {"body": ASKED | {"seed": 1}},
        {"path": "/v1/completions"},
        {"attempt": AttemptScope("ro-1", "at-2")},
        {"attempt": AttemptScope("ro-1", "at-1", "critic")},
    ],
)
async def test_another_request_is_not_a_retry_whatever_it_says(bench: Bench, other: dict[str, Any]) -> None:
    await bench.call().answered()
    await bench.call(**({"tries": 1} | other)).answered()
    assert bench.sampled == 2


async def test_a_retry_of_what_never_came_is_sampled(bench: Bench) -> None:
    assert (await bench.call(tries=1).answered()).status == 200
    assert (await bench.call(tries=2).answered()).status == 200
    assert bench.sampled == 1


async def test_retries_of_equal_requests_find_an_answer_each(bench: Bench) -> None:
    first = [await bench.call().answered() for _ in range(3)]
    again = [await bench.call(tries=1).answered() for _ in range(3)]
    assert {call.json["id"] for call in again} == {call.json["id"] for call in first}
    assert bench.sampled == 3
    await bench.call(tries=1).answered()
    assert bench.sampled == 4


async def test_the_answer_that_is_known_to_be_lost_is_the_one_that_is_given_again(bench: Bench) -> None:
    calls = await bench.lose(1, of=3)
    assert calls[1].sent == []
    again = await bench.call(tries=1).answered()
    await bench.sink.has(3, 3)
    assert again.json["id"] not in {calls[0].json["id"], calls[2].json["id"]}
    assert bench.sampled == 3


@pytest.mark.parametrize("body", [ASKED, STREAMED])
async def test_a_retry_joins_what_is_still_being_sampled(bench: Bench, body: Any) -> None:
    """A proxy hid that the client had disconnected."""
    first, again = await bench.join(body)
    first.left.set()  # the loss is noticed only now, but another request waits for the answer
    await settle()
    bench.app.gate.set()
    await again.answered()
    await first.answered()
    assert again.status == 200
    assert (bench.sampled, bench.app.cancelled) == (1, 0)
    await bench.sink.has(1, 1)
    assert bench.sink.closed[0][1].finish_reason == "stop"


async def test_sampling_ends_when_both_have_left(bench: Bench) -> None:
    first, again = await bench.join()
    first.left.set()
    await settle()
    assert bench.app.cancelled == 0
    again.left.set()
    await again.answered()
    await first.answered()
    await bench.sink.has(1, 1)
    assert bench.app.cancelled == 1
    assert bench.sink.closed[0][1].finish_reason == "aborted"


async def test_a_retry_of_what_was_cut_off_is_sampled_anew_and_only_that_is_whole(bench: Bench) -> None:
    await bench.cut_off()
    assert (await bench.call(tries=1).answered()).status == 200
    await bench.sink.has(2, 2)
    assert [generation.finish_reason for _, generation, _ in bench.sink.closed] == ["aborted", "stop"]


async def test_a_retry_that_had_joined_is_sampled_anew_when_the_engine_fails(bench: Bench) -> None:
    bench.app.breaks_at = 1
    first, again = await bench.join()
    bench.app.breaks_at, broken = None, asyncio.create_task(_expect_broken(first))
    await settle()
    first.task.cancel()
    await broken
    bench.app.gate.set()
    assert (await again.answered()).status == 200
    assert bench.sampled == 2


async def _expect_broken(call: Call) -> None:
    with pytest.raises(asyncio.CancelledError):
        await call.task


async def test_an_answer_that_failed_in_mid_stream_is_not_given_again(bench: Bench) -> None:
    bench.app.breaks_at = 3
    with pytest.raises(RuntimeError):
        await bench.call(STREAMED).answered()
    bench.app.breaks_at = None
    assert (await bench.call(STREAMED, tries=1).answered()).status == 200
    await bench.sink.has(2, 2)
    assert [generation.finish_reason for _, generation, _ in bench.sink.closed] == ["aborted", "stop"]


async def test_a_retry_that_has_begun_to_get_what_breaks_off_breaks_off_too(bench: Bench) -> None:
    bench.app.breaks_at = 1
    first, again = await bench.join(STREAMED)
    assert len(again.sent) == len(first.sent) > 0
    bench.app.gate.set()
    with pytest.raises(RuntimeError):
        await first.answered()
    with pytest.raises(ConnectionError, match="broke off"):
        await again.answered()


@pytest.mark.parametrize("status", [400, 404, 408, 409, 429, 500, 503])
async def test_errors_are_not_given_again(bench: Bench, status: int) -> None:
    bench.app.status = status
    assert (await bench.call().answered()).status == status
    bench.app.status = 200
    assert (await bench.call(tries=1).answered()).status == 200
    assert bench.sampled == 2


async def test_the_retry_after_an_error_does_not_take_the_answer_of_an_equal_request(bench: Bench) -> None:
    """Some of eight equal concurrent requests may be rejected; their retries are sampled afresh."""
    whole = await bench.call().answered()
    bench.app.status = 503
    await bench.call().answered()
    bench.app.status = 200
    again = await bench.call(tries=1).answered()
    assert again.json["id"] != whole.json["id"]
    assert (await bench.call(tries=1).answered()).json["id"] == whole.json["id"], (
        "and the one that lost it gets it still"
    )


async def test_answers_are_kept_for_a_while() -> None:
    bench = Bench(ttl_s=10.0)
    await bench.call().answered()
    bench.now = 9.0
    await bench.call(tries=1).answered()
    assert bench.sampled == 1
    bench.now = 10.1
    await bench.call(tries=2).answered()
    assert bench.sampled == 2
    bench.now = 100.0
    await bench.call(ASKED | {"seed": 1}).answered()
    assert sum(map(len, bench.cache._answers.values())) == 1


async def test_what_arrived_a_while_ago_was_not_lost_and_what_did_not_arrive_was(bench: Bench) -> None:
    calls = await bench.lose(0, of=2)
    bench.now = 60.0
    lost = await bench.call(tries=1).answered()
    assert (bench.sampled, lost.json["id"] == calls[1].json["id"]) == (2, False)
    await bench.call(tries=1).answered()
    assert bench.sampled == 3


async def test_a_retry_of_what_was_cut_off_does_not_take_the_answer_of_an_equal_request(bench: Bench) -> None:
    whole = await bench.call().answered()
    await bench.cut_off()
    assert (await bench.call(tries=1).answered()).json["id"] != whole.json["id"]


async def test_what_is_kept_is_bounded() -> None:
    bench = Bench(per_attempt=2)
    other = AttemptScope("ro-1", "at-2")
    await bench.call(ASKED | {"seed": 9}, attempt=other).answered()
    for seed in range(4):
        await bench.call(ASKED | {"seed": seed}).answered()
    for seed, expected in ((9, 5), (2, 5), (3, 5), (1, 6)):
        await bench.call(ASKED | {"seed": seed}, 1, attempt=other if seed == 9 else INSIDE).answered()
        assert bench.sampled == expected, seed
    assert bench.cache._ended_of_attempt == {("ro-1", "at-1"): 2, ("ro-1", "at-2"): 1}


async def test_the_bytes_that_are_kept_are_bounded() -> None:
    bench = Bench(max_bytes=3000)
    for seed in range(4):
        await bench.call(ASKED | {"seed": seed}).answered()
    assert 0 < bench.cache._ended_bytes <= 3000
    bench.app.answer = "x" * 4000
    large = await bench.call(ASKED | {"seed": 5}).answered()
    assert len(large.json["choices"][0]["message"]["content"]) == 4000
    await bench.call(ASKED | {"seed": 5}, 1).answered()
    assert bench.sampled == 6
    assert bench.cache._ended_bytes <= 3000


async def test_of_what_broke_off_only_that_it_did_is_kept_and_that_not_for_long(bench: Bench) -> None:
    bench.app.breaks_at = 1
    with pytest.raises(RuntimeError):
        await bench.call(STREAMED).answered()
    assert [answer.messages for (answer,) in bench.cache._answers.values()] == [[]]
    bench.now = 1000.0
    bench.app.breaks_at = None
    await bench.call(attempt=None).answered()
    await bench.call(ASKED | {"n": 2}).answered()
    assert len(bench.cache._answers) == 1
    bench.now = 2000.0
    bench.cache._drop_old()
    assert (bench.cache._answers, bench.cache._ended_of_attempt, bench.cache._ended_bytes) == ({}, {}, 0)


async def test_outside_of_attempts_nothing_is_kept(bench: Bench) -> None:
    for tries in (0, 1):
        assert (await bench.call(tries=tries, attempt=None).answered()).status == 200
    assert (bench.sampled, bench.cache._answers) == (2, {})


# the SDKs themselves


class Losing:
    """Application that loses answers: the client sees a broken connection."""

    def __init__(self, app: Any, losses: int) -> None:
        self._app = app
        self.losses = losses
        self.requests: list[Any] = []

    def client(self, library: ModuleType) -> Any:
        """Return a client of `httpx`, or of its successor, which has the same interface."""
        losing, inner = self, library.ASGITransport(self._app)

        class Transport(library.AsyncBaseTransport):  # type: ignore[name-defined, misc]
            async def handle_async_request(self, request: Any) -> Any:
                losing.requests.append(request)
                response = await inner.handle_async_request(request)
                if losing.losses:
                    losing.losses -= 1
                    await response.aread()
                    raise library.ReadError("the connection broke", request=request)
                return response

        return library.AsyncClient(transport=Transport())

    def openai(self) -> AsyncOpenAI:
        http = self.client(httpx)
        return at_once(
            AsyncOpenAI(base_url="http://replica/v1", api_key="k", http_client=http, max_retries=3)
        )


@pytest.fixture
async def losing(bench: Bench) -> Losing:
    async def attempt(scope: AsgiScope, receive: Receive, send: Send) -> None:
        token = SCOPE.set(INSIDE)
        try:
            await bench.cache(scope, receive, send)
        finally:
            SCOPE.reset(token)

    return Losing(attempt, 2)


def at_once(client: Any) -> Any:
    client._calculate_retry_timeout = lambda *args, **kwargs: 0.0
    return client


@pytest.mark.parametrize("streamed", [False, True])
async def test_openais_sdk_loses_two_answers_and_one_generation_is_recorded(
    bench: Bench, losing: Losing, streamed: bool
) -> None:
    async with losing.openai() as client, within():
        made = await client.chat.completions.create(**ASKED, stream=streamed)
        if streamed:
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in made])
        else:
            said = made.choices[0].message.content
    assert said == "hello"
    assert [request.headers["x-stainless-retry-count"] for request in losing.requests] == ["0", "1", "2"]
    await bench.sink.has(1, 1)
    assert (bench.sampled, len(bench.sink.closed)) == (1, 1)
    assert bench.sink.closed[0][1].finish_reason == "stop"


async def test_the_sdks_second_request_is_another_one(bench: Bench, losing: Losing) -> None:
    losing.losses = 0
    async with losing.openai() as client, within():
        for _ in range(2):
            await client.chat.completions.create(**ASKED)
    await bench.sink.has(2, 2)
    assert bench.sampled == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropics_sdk_loses_two_answers_and_one_generation_is_recorded(
    bench: Bench, losing: Losing, streamed: bool
) -> None:
    async with losing.client(httpx2) as http, within():
        client = at_once(
            AsyncAnthropic(base_url="http://replica", api_key="k", http_client=http, max_retries=3)
        )
        asked: Any = {"model": "policy", "max_tokens": 9, "messages": ASKED["messages"]}
        if streamed:
            async with client.messages.stream(**asked) as stream:
                said = await stream.get_final_text()
        else:
            said = (await client.messages.create(**asked)).content[0].text
    assert said == "hello"
    await bench.sink.has(1, 1)
    assert (bench.sampled, len(losing.requests)) == (1, 3)
    assert bench.sink.closed[0][2].name == "anthropic.message"


async def test_openais_sdk_is_turned_away_and_comes_again(bench: Bench, losing: Losing) -> None:
    losing.losses = 0
    turned_away = []
    inner = bench.cache._app

    async def busy(scope: AsgiScope, receive: Receive, send: Send) -> None:
        if not turned_away:
            turned_away.append(True)
            await send_json(send, {"error": {"message": "try again", "type": "overloaded_error"}}, 503)
            return
        await inner(scope, receive, send)

    bench.cache._app = busy
    async with losing.openai() as client, within():
        assert (await client.chat.completions.create(**ASKED)).choices[0].message.content == "hello"
    assert bench.sampled == 1
