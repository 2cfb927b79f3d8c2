"""The chat dialect as data: what it refuses, what it asks the engine for, what it answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from unit_helpers import FakeEngine, until

from raylight.semconv import AGENT_NAME, CALL_ID, CHAT_SPAN, INPUT_MESSAGES, OUTPUT_MESSAGES, REQUEST_MODEL, RESPONSE_ID
from raylight.serving.capture import SCOPE, CapturingEngine, Closed, Recorder, Scope
from raylight.serving.chat import complete_chat
from raylight.serving.engine import RequestError, SamplingParams
from raylight.store.rows import span_row
from raylight.types import Span


async def nowhere(opened: list, closed: list) -> None: ...


def chat_with(engine: FakeEngine) -> CapturingEngine:
    return CapturingEngine(engine, Recorder(nowhere))


def body(**more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **more}


async def ask(engine: FakeEngine | None = None, **more: Any) -> dict[str, Any]:
    return await complete_chat(chat_with(engine or FakeEngine()), body(**more))


async def params_for(**more: Any) -> SamplingParams:
    engine = FakeEngine()
    await ask(engine, **more)
    return engine.calls[0][1]


@pytest.mark.parametrize(("wrong", "named"), [
    ({"tools": []}, "tools"), ({"response_format": {"type": "json_object"}}, "response_format"), ({"stream": True}, "stream"),
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"n": 0}, "n:"),
    ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, r"messages\.0\.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\.0\.content"),
    ({"logit_bias": {}}, "logit_bias"),
    ({"temperature": float("nan")}, "temperature"),
])  # fmt: skip
async def test_what_it_does_not_support_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        await ask(**wrong)
    assert caught.value.status == 400


@pytest.mark.parametrize("wrong", [None, 3, "text", [], [body()]])
async def test_a_body_that_is_no_object_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="body"):
        await complete_chat(chat_with(FakeEngine()), wrong)


async def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(RequestError, match=r"(?s)n:.*tools|tools.*n:"):
        await ask(n=0, tools=[])


async def test_another_model_does_not_exist() -> None:
    with pytest.raises(RequestError, match=r"'gpt'.*'policy'") as caught:
        await ask(model="gpt")
    assert caught.value.status == 404


async def test_a_template_that_refuses_is_a_refused_request() -> None:
    engine = FakeEngine()

    def refuse(*args: Any, **settings: Any) -> list[int]:
        raise ValueError("roles must alternate")

    engine.tokenizer.apply_chat_template = refuse
    with pytest.raises(RequestError, match="roles must alternate"):
        await ask(engine)


async def test_settings_reach_the_engine() -> None:
    assert await params_for(max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, stop="x", seed=3) == SamplingParams(
        5, 0.5, 0.9, 7, ("x",), 3
    )


async def test_missing_settings_are_openais_defaults() -> None:
    assert await params_for() == SamplingParams(FakeEngine.max_model_len)
    assert await params_for(temperature=None, top_p=None, stop=None, n=None, stream=None) == SamplingParams(
        FakeEngine.max_model_len
    )


async def test_zero_temperature_is_not_the_default_one() -> None:
    assert (await params_for(temperature=0)).temperature == 0


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_no_limit_has_two_spellings(top_k: int) -> None:
    assert (await params_for(top_k=top_k)).top_k == 0


async def test_the_newer_name_of_max_tokens_wins() -> None:
    assert (await params_for(max_tokens=5, max_completion_tokens=6)).max_tokens == 6


async def test_an_answer_has_the_shape_of_openais() -> None:
    engine = FakeEngine("hello")
    answer = await ask(engine)
    assert engine.calls[0][0] == [ord("h"), ord("i")]
    assert (answer["object"], answer["model"]) == ("chat.completion", "policy")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}


@pytest.mark.parametrize(("stop", "expected"), [("l", "he"), (["o", "l"], "he"), ("lo", "hel"), ("zz", "hello"), ([], "hello")])
async def test_the_text_ends_before_the_first_stop_string(stop: str | list[str], expected: str) -> None:
    assert (await ask(FakeEngine("hello"), stop=stop))["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("stop", ["", [""], ["x", ""]])
async def test_an_empty_stop_string_is_refused_or_without_effect(stop: str | list[str]) -> None:
    try:
        answer = await ask(FakeEngine("hello"), stop=stop)
    except RequestError:
        return
    assert answer["choices"][0]["message"]["content"] == "hello"


async def test_several_choices_of_a_seeded_request_have_seeds_of_their_own() -> None:
    engine = FakeEngine()
    answer = await ask(engine, n=3, seed=40)
    assert sorted(params.seed for _, params in engine.calls) == [40, 41, 42]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 15


async def test_several_choices_without_a_seed_have_none() -> None:
    engine = FakeEngine()
    await ask(engine, n=3)
    assert [params.seed for _, params in engine.calls] == [None] * 3


async def test_logprobs_come_for_every_token() -> None:
    content = (await ask(FakeEngine("hé"), logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [(item["token"], item["logprob"], item["bytes"]) for item in content] == [("h", -0.5, [104]), ("é", -0.5, [195, 169])]


async def test_an_engines_refusal_passes_through() -> None:
    engine = FakeEngine()
    engine.error = RequestError("full", 503)
    with pytest.raises(RequestError, match="full"):
        await ask(engine)


# what is recorded of it


class Recorded:
    """What the store was told of the calls of one attempt."""

    def __init__(self, answer: str = "hello") -> None:
        self.engine = FakeEngine(answer)
        self.closed: list[Closed] = []
        self.opened = 0

    async def sink(self, opened: list[Any], closed: list[Closed]) -> None:
        self.opened += len(opened)
        self.closed += closed

    async def ask(self, agent: str | None = None, **more: Any) -> dict[str, Any]:
        token = SCOPE.set(Scope("ro-1", "at-1", agent))
        try:
            return await complete_chat(CapturingEngine(self.engine, Recorder(self.sink)), body(**more))
        finally:
            SCOPE.reset(token)

    async def spans(self, number: int) -> list[Span]:
        await until(lambda: len(self.closed) == number)
        return [span for _, _, span in self.closed if span is not None]


async def test_the_span_of_a_call_shows_request_and_answer_and_has_the_answers_id() -> None:
    recorded = Recorded()
    answer = await recorded.ask("planner", stop="lo")
    (span,) = await recorded.spans(1)
    assert span.name == CHAT_SPAN
    assert span.attributes[RESPONSE_ID] == answer["id"] == f"chatcmpl-{span.attributes[CALL_ID]}"
    assert span.attributes[REQUEST_MODEL] == "policy"
    assert span.attributes[AGENT_NAME] == "planner"
    assert json.loads(span.attributes[INPUT_MESSAGES]) == [{"role": "user", "content": "hi"}]
    assert json.loads(span.attributes[OUTPUT_MESSAGES]) == [{"role": "assistant", "content": "hel"}]
    (generation,) = [generation for _, generation, _ in recorded.closed]
    assert generation.output_ids == [ord(letter) for letter in "hello"]  # all that was sampled, not the text that was cut
    assert generation.key.call_id == span.attributes[CALL_ID]


async def test_several_choices_are_calls_of_their_own_under_one_answer() -> None:
    recorded = Recorded()
    answer = await recorded.ask(n=3, seed=1)
    spans = await recorded.spans(3)
    assert {span.attributes[RESPONSE_ID] for span in spans} == {answer["id"]}
    calls = [span.attributes[CALL_ID] for span in spans]
    assert len(set(calls)) == len({span.span_id for span in spans}) == 3
    assert answer["id"].removeprefix("chatcmpl-") in calls
    assert sorted(generation.sampling["seed"] for _, generation, _ in recorded.closed) == [1, 2, 3]


async def test_when_one_of_several_choices_fails_all_are_closed_without_a_record() -> None:
    recorded = Recorded()
    recorded.engine.error = RequestError("full", 503)
    with pytest.raises(RequestError, match="full"):
        await recorded.ask(n=3)
    assert await recorded.spans(3) == []
    assert {(generation, span) for _, generation, span in recorded.closed} == {(None, None)}


async def test_a_refused_request_is_no_call() -> None:
    recorded = Recorded()
    with pytest.raises(RequestError):
        await recorded.ask(n=0)
    assert (recorded.opened, recorded.engine.calls) == (0, [])


async def test_any_text_can_be_recorded() -> None:
    recorded = Recorded("\ud800 \u2028 é")
    await recorded.ask(messages=[{"role": "user", "content": "\udcff", "extra": [1, None]}])
    (span,) = await recorded.spans(1)
    assert json.loads(span.attributes[INPUT_MESSAGES])[0]["content"] == "\udcff"
    assert span_row(span)
