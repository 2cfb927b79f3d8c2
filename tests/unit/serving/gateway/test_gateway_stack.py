"""All layers together, called by the real SDKs."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from app_clients import anthropic_client, openai_client
from capture_helpers import ENGINE, FakeApp, Sink
from gateway_helpers import ANSWER, BODY, CHAT, KEY, MINE, SECRET, value_of, within
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from raylight.agent.attempt_keys import KeyUse, attempt_key
from raylight.config import EngineConfig
from raylight.engines.upstream import UpstreamEngine
from raylight.http import request
from raylight.http.request import decode_fields, json_request
from raylight.http.sse import sse_bytes
from raylight.semconv import DIALECT, OUTPUT_MESSAGES
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.serving.gateway.metrics import Metrics

MESSAGES: Any = [{"role": "user", "content": "hi"}]


class Stack:
    """A replica's whole application around a fake engine, with the records that its store received."""

    def __init__(
        self,
        engine: Any = ENGINE,
        engine_app: Any = None,
        secret: str | None = SECRET,
        records: bool = True,
        **settings: Any,
    ) -> None:
        self.engine_app = engine_app or FakeApp()
        self.sink, self.metrics = Sink(), Metrics()
        self.recorder = Recorder(self.sink) if records else None
        self.app = build_gateway(
            self.engine_app, engine, secret, self.recorder, None, metrics=self.metrics, **settings
        )

    def openai(self, path: str = MINE) -> openai.AsyncOpenAI:
        return openai_client(self.app, f"http://localhost{path}/v1", KEY)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic_client(self.app, f"http://localhost{MINE}", KEY)

    async def post(self, path: str, key: str = KEY, body: Any = BODY, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client, within():
            return await client.post(path, headers={"authorization": f"Bearer {key}"} | headers, json=body)

    def value(self, name: str, **labels: str) -> float | None:
        return value_of(self.metrics, name, **labels)


@pytest.fixture
def stack() -> Stack:
    return Stack()


async def test_every_dialect_is_answered_and_recorded(stack: Stack) -> None:
    async with within(), stack.openai() as client, stack.anthropic() as other:
        chat = await client.chat.completions.create(model="policy", messages=MESSAGES)
        completion = await client.completions.create(model="policy", prompt="hi")
        response = await client.responses.create(model="policy", input="hi")
        message = await other.messages.create(model="policy", messages=MESSAGES, max_tokens=5)
    assert chat.choices[0].message.content == completion.choices[0].text == response.output_text == "hello"
    assert message.content[0].text == "hello"  # type: ignore[union-attr]
    await stack.sink.has(4, 4)
    spans = [dict(span.attributes)[DIALECT] for _, _, span in stack.sink.closed if span is not None]
    assert spans == ["chat", "completions", "responses", "messages"]
    assert {
        tuple(generation.output_ids.tolist()) for _, generation, _ in stack.sink.closed if generation
    } == {tuple(map(ord, "hello"))}
    assert stack.value("output_tokens_total") == 20


@pytest.mark.parametrize(
    ("was_asked", "retry_count", "replays"),
    [(True, "1", 1), (False, "1", 0), (True, "0", 0), (True, None, 0)],
)
async def test_only_a_retry_of_an_answered_request_counts_as_a_replay(
    stack: Stack, was_asked: bool, retry_count: str | None, replays: int
) -> None:
    if was_asked:
        await stack.post(MINE + CHAT)
    headers = {} if retry_count is None else {"x-stainless-retry-count": retry_count}
    assert (await stack.post(MINE + CHAT, **headers)).status_code == 200
    sampled = 1 + was_asked - replays
    assert (stack.value("replays_total"), stack.value("output_tokens_total")) == (replays, 5 * sampled)
    assert len(stack.engine_app.requests) == sampled


async def test_the_runs_secret_records_nothing(stack: Stack) -> None:
    assert (await stack.post(CHAT, SECRET)).status_code == 200
    assert (await stack.post("/v1/messages", SECRET, BODY | {"max_tokens": 5})).status_code == 200
    assert (stack.sink.opened, stack.engine_app.contexts) == ([], [None, None])


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_all_layers_and_the_engine_share_one_decoded_body(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []

    def decode(content: bytes) -> dict[str, Any]:
        decoded.append(content)
        return decode_fields(content)

    async def engine_app(scope: Scope, receive: Receive, send: Send) -> None:
        fields = (await json_request(scope, receive)).fields
        await JSONResponse(ANSWER | {"model": fields["model"]})(scope, receive, send)

    monkeypatch.setattr(request, "decode_fields", decode)
    stack = Stack(engine_app=engine_app)
    asked = {"input": "x"} if path == "/v1/responses" else {"messages": MESSAGES, "max_tokens": 5}
    answer = await stack.post(MINE + path, body={"model": "policy"} | asked)
    assert answer.status_code == 200, answer.text
    assert len(decoded) == 1


async def test_the_recorders_backlog_is_shown(stack: Stack) -> None:
    stack.sink.gate.clear()
    asking = asyncio.create_task(stack.post(MINE + CHAT))
    async with within():
        await stack.engine_app.sampling.wait()
        assert (stack.value("recorder_open_calls"), stack.value("recorder_unsent_records")) == (1, 1)
        stack.sink.gate.set()
        await asking
        await stack.sink.has(1, 1)
    assert stack.value("recorder_open_calls") == 0


async def test_a_server_of_its_own_needs_no_store() -> None:
    stack = Stack(secret=None, records=False)
    assert (await stack.post(CHAT, "")).status_code == 200
    assert (await stack.post("/v1/messages", "", BODY | {"max_tokens": 5})).json()["content"][0][
        "text"
    ] == "hello"
    assert (await stack.post("/v1/traces", "")).status_code == 404
    assert (await stack.post(MINE + CHAT)).status_code == 404


@pytest.mark.parametrize("streams", [False, True])
async def test_an_upstream_model_is_traced_and_has_no_tokens(streams: bool) -> None:
    """Tokens in the upstream's answer, as vLLM sends for `return_token_ids`, are ignored."""
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        said = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "finish_reason": "stop", "delta" if streams else "message": said}
        body = ANSWER | {"prompt_token_ids": [3], "choices": [choice | {"token_ids": [1, 2]}]}
        if not streams:
            return httpx2.Response(200, json=body)
        content = sse_bytes(body) + sse_bytes("[DONE]")
        return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})

    upstream = UpstreamEngine(
        "http://up/v1", "up-key", "policy", "up-model", transport=httpx2.MockTransport(answer)
    )
    stack = Stack(upstream, await upstream.app())
    async with within(), stack.openai() as client:
        asked: Any = {"model": "policy", "messages": MESSAGES, "extra_body": {"return_token_ids": True}}
        if streams:
            pieces = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
            assert [piece.choices[0].delta.content for piece in pieces] == ["hello"]
        else:
            assert (await client.chat.completions.create(**asked)).choices[0].message.content == "hello"
    await stack.sink.has(1, 1)
    ((_, generation, span),) = stack.sink.closed
    assert generation is None
    assert '"hello"' in str(dict(span.attributes)[OUTPUT_MESSAGES])
    assert json.loads(seen[0].content)["model"] == "up-model"
    assert seen[0].headers["authorization"] == "Bearer up-key"


async def test_an_upstream_speaks_every_dialect() -> None:
    behind = FakeApp()
    behind.samples = False  # it is in this process, and would find the context
    upstream = UpstreamEngine("http://up/v1", None, "policy", transport=httpx2.ASGITransport(app=behind))
    stack = Stack(upstream, await upstream.app())
    async with within(), stack.openai() as client, stack.anthropic() as other:
        assert (await client.responses.create(model="policy", input="hi")).output_text == "hello"
        message = await other.messages.create(model="policy", messages=MESSAGES, max_tokens=5)
        assert message.content[0].text == "hello"  # type: ignore[union-attr]
        named = await other.messages.create(model="other", messages=MESSAGES, max_tokens=5)
        assert named.model == "other"
    await stack.sink.has(3, 3)


async def test_an_upstream_gets_labels_and_hints_as_the_agent_sent_them_unless_they_are_ignored() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(json.loads(request.content))
        message = "Unrecognized request argument supplied: thinking_token_budget"
        error = {"message": message, "type": "invalid_request_error"}
        return httpx2.Response(400, json={"error": error})

    upstream = UpstreamEngine("http://up/v1", None, "policy", transport=httpx2.MockTransport(answer))
    stack = Stack(
        upstream, await upstream.app(), config=EngineConfig(ignore_fields=["verbosity", "metadata"])
    )
    given: Any = {"user": "me", "service_tier": "flex", "reasoning_effort": "low"}
    ignored: Any = {"verbosity": "low", "metadata": {"a": "b"}}
    async with within(), stack.openai() as client, stack.anthropic() as other:
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
            await client.chat.completions.create(model="policy", messages=MESSAGES, **given, **ignored)
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match=r"supplied: thinking\.budget_tokens"):
            await other.messages.create(model="policy", messages=MESSAGES, max_tokens=5, thinking=thinking)
    assert seen[0] == {"model": "policy", "messages": MESSAGES, **given}
    assert (seen[1]["thinking_token_budget"], "thinking" in seen[1]) == (1024, False)


async def test_ignored_fields_are_dropped_in_every_dialect_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = Stack(config=EngineConfig(ignore_fields=["web_search_options", "text.unheard", "container"]))
    async with within(), stack.openai() as client, stack.anthropic() as other:
        for _ in range(2):
            await client.chat.completions.create(model="policy", messages=MESSAGES, web_search_options={})
        text: Any = {"unheard": "high", "format": {"type": "text"}}
        await client.responses.create(model="policy", input="hi", text=text)
        extra = {"container": "c"}
        await other.messages.create(model="policy", messages=MESSAGES, max_tokens=4, extra_body=extra)
        with pytest.raises(openai.BadRequestError, match="conversation"):
            await client.responses.create(model="policy", input="hi", conversation="c")
    names = ("web_search_options", "text.unheard", "container", "conversation")
    assert [stack.value("ignored_fields_total", field=name) for name in names] == [2, 1, 1, None]
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("raylight")]
    assert [message.count("web_search_options") for message in logged].count(1) == 1
    assert len(logged) == 3
    await stack.sink.has(4, 4)
    recorded = [str(span.attributes) for _, _, span in stack.sink.closed if span]
    assert len(recorded) == 4
    assert "web_search_options" not in "".join(recorded)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("body", [BODY, BODY | {"unheard": 1}])
async def test_an_application_that_reads_bodies_itself_gets_them_without_the_ignored_fields(
    path: str, body: dict[str, Any]
) -> None:
    seen: list[Any] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(json.loads((await receive())["body"]))
        await JSONResponse(ANSWER)(scope, receive, send)

    stack = Stack(
        engine_app=application, secret=None, records=False, config=EngineConfig(ignore_fields=["unheard"])
    )
    assert (await stack.post(path, body=body)).status_code == 200
    assert seen == [BODY]


SAMPLING = {"temperature": 0.2, "top_p": 0.5}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "top_k": 3}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), CALLS)
async def test_the_trainer_sets_the_sampling_of_training_rollouts(
    path: str, fields: dict[str, Any], stream: bool
) -> None:
    stack = Stack(training_temperature=1.0)
    body = {"model": "policy", "stream": stream} | SAMPLING | fields
    uses: tuple[KeyUse, ...] = ("train", "model")
    for use in uses:
        answer = await stack.post(MINE + path, attempt_key(SECRET, "ro-1", "at-1", use), body)
        assert answer.status_code == 200, answer.text
    trained, other = stack.engine_app.requests
    assert trained["temperature"] == 1.0
    assert trained.keys().isdisjoint({"top_p", "top_k"})
    assert {name: other[name] for name in SAMPLING} == SAMPLING
    assert trained.get("stream", False) is stream
    assert stack.value("overridden_requests_total") == 1
