"""A new dialect is one class in one file and one line in the registry; the whole gateway then serves it."""

import json
from typing import Any

import httpx
import pytest
from capture_helpers import ENGINE, FakeApp, Sink
from gateway_helpers import KEY, MINE, SECRET, value_of, within

from raylight.http.sse import SseReader
from raylight.semconv import DIALECT, RESPONSE_ID
from raylight.serving.capture.recorder import Recorder
from raylight.serving.dialects.dialect import Dialect
from raylight.serving.dialects.registry import DIALECTS
from raylight.serving.gateway.gateway import build_gateway
from raylight.serving.gateway.metrics import Metrics
from unit.serving.dialects.toy_dialect import ToyDialect

QUESTION = {"model": "policy", "question": "hi"}


class Replica:
    """A gateway around a fake engine, and the records that its store received."""

    def __init__(self) -> None:
        self.engine_app, self.sink, self.metrics = FakeApp(), Sink(), Metrics()
        app = build_gateway(self.engine_app, ENGINE, SECRET, Recorder(self.sink), None, metrics=self.metrics)
        self._transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    async def post(self, body: dict[str, Any], key: str = KEY, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | headers
        async with httpx.AsyncClient(transport=self._transport, base_url="http://x") as client, within():
            return await client.post(f"{MINE}/v1/toy", headers=headers, json=body)

    def value(self, name: str, **labels: str) -> float | None:
        return value_of(self.metrics, name, **labels)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setitem(DIALECTS, "toy", ToyDialect)
    return Replica()


async def test_a_call_is_answered_captured_and_counted(replica: Replica) -> None:
    answer = await replica.post(QUESTION)
    await replica.sink.has(1, 1)
    ((key, generation, span),) = replica.sink.closed
    assert answer.json() == {"id": f"toy-{key.call_id}", "text": "hello"}
    assert replica.engine_app.requests[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert generation.output_ids.tolist() == list(map(ord, "hello"))
    attributes = dict(span.attributes)
    assert (span.name, attributes[DIALECT]) == ("openai.chat.toy", "toy")
    assert attributes[RESPONSE_ID] == answer.json()["id"]
    assert replica.value("requests_total", route="toy", status="200") == 1


async def test_an_answer_is_streamed(replica: Replica) -> None:
    answer = await replica.post(QUESTION | {"stream": True})
    events = [json.loads(event.data) for event in SseReader().feed(answer.content)]
    assert [event.get("piece") for event in events] == [*"hello", None]
    assert events[-1]["id"].startswith("toy-")
    await replica.sink.has(1, 1)


async def test_a_retry_gets_the_kept_answer(replica: Replica) -> None:
    first = await replica.post(QUESTION)
    again = await replica.post(QUESTION, **{"x-stainless-retry-count": "1"})
    assert again.json() == first.json()
    assert (len(replica.engine_app.requests), replica.value("replays_total")) == (1, 1)


async def test_errors_of_every_layer_have_its_shape(replica: Replica) -> None:
    wrong_key = await replica.post(QUESTION, key="x")
    crash = await replica.post({"model": "policy"})
    replica.engine_app.status = 418
    engine_error = await replica.post(QUESTION)
    replica.sink.over.add("at-1")
    finished = await replica.post(QUESTION)
    answers = [wrong_key, crash, engine_error, finished]
    assert [answer.status_code for answer in answers] == [401, 500, 418, 401]
    assert [list(answer.json()) for answer in answers] == [["toy_error"]] * 4
    assert engine_error.json() == {"toy_error": "no"}


@pytest.mark.parametrize("name", ["health", "metrics", "models", "traces"])
async def test_a_dialect_may_have_the_name_of_a_route(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIALECTS, name, type("Named", (ToyDialect,), {"name": name}))
    replica = Replica()
    answer = await replica.post(QUESTION)
    assert answer.json()["text"] == "hello"
    await replica.sink.has(1, 1)


async def test_an_unregistered_dialect_has_no_route() -> None:
    assert (await Replica().post(QUESTION)).status_code == 404


def test_an_incomplete_dialect_is_refused_when_it_is_defined() -> None:
    with pytest.raises(TypeError, match="dialect Half does not define path and span_name"):
        type("Half", (Dialect,), {"name": "half"})
