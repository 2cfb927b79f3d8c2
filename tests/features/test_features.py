"""Features of every dialect on every engine, through the SDKs; `--feature-table PATH` writes a table.

The model is random, so that an answer's form is asserted only where the engine enforces it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from feature_site import ENGINES
from feature_speakers import Call
from feature_talk import Talk, user

from raylight.semconv import PROMPT_SOURCE

CHAT_LIKE = ("chat", "responses", "messages")
EVERY = ("chat", "completions", "responses", "messages")
OPENAI = ("chat", "completions")
TOOL_FEATURES = ("tool call", "tool call, streamed", "named tool", "parallel tool calls", "tool results")
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HI = user("hi")
LONG = 800
"""Token limit with room for the white space that the model puts into its JSON."""

REFUSED = {(engine, dialect, "images") for engine in ENGINES for dialect in CHAT_LIKE}
"""Combinations of engine, dialect and feature that are answered with 400; all others work."""
if importlib.util.find_spec("xgrammar") is None:
    constrained = (*TOOL_FEATURES, "JSON schema")
    REFUSED |= {(e, dialect, name) for e in ENGINES[:2] for dialect in CHAT_LIKE for name in constrained}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "on": {"type": "boolean"}},
    "required": ["colour", "on"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
LAMP = {"name": "set_lamp", "description": "Sets the lamp.", "parameters": SCHEMA}
MOVE = {"name": "move", "description": "Moves the lamp.", "parameters": PLACE}
SCHEMAS = {"set_lamp": SCHEMA, "move": PLACE}


def feature(name: str, *dialects: str) -> Callable[[Callable[[Talk], None]], Any]:
    """Mark a test of a feature in some dialects, on every engine. Where it is rejected, it tests that."""

    def mark(test: Callable[[Talk], None]) -> Any:
        @functools.wraps(test)
        def run(talk: Talk) -> None:
            if (talk.site.kind, talk.dialect.name, name) in REFUSED:
                with talk.refusal():
                    test(talk)
            else:
                test(talk)

        return pytest.mark.feature(name)(pytest.mark.parametrize("dialect", dialects)(run))

    return mark


def check_call(call: Call) -> None:
    """The arguments of a call fit its tool."""
    arguments = json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments
    jsonschema.validate(arguments, SCHEMAS[call.name])


@feature("answer", *EVERY)
def test_answer(talk: Talk) -> None:
    answer = talk.ask(HI, max_tokens=16, temperature=1.0)
    assert 1 <= answer.tokens <= 16
    (generation,) = talk.recorded().generations or [None]
    if generation is not None:
        assert answer.text == talk.site.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        assert answer.prompt_tokens == len(generation.prompt_ids)


@feature("streaming", *EVERY)
def test_streaming(talk: Talk) -> None:
    whole = talk.ask(HI, max_tokens=16, temperature=0)
    streamed = talk.ask(HI, max_tokens=16, temperature=0, stream=True)
    assert (streamed.text, streamed.end, streamed.tokens) == (whole.text, whole.end, whole.tokens)
    assert streamed.prompt_tokens == whole.prompt_tokens
    assert streamed.pieces > 1
    talk.recorded()


@feature("async client", *EVERY)
def test_async_client(talk: Talk) -> None:
    answer = talk.ask_together(["one", "two", "three"], max_tokens=8, temperature=1.0)
    answer = talk.ask_together(["four", "five"], max_tokens=8, stream=True)
    assert all(1 <= one.tokens <= 8 for one in answer)
    assert len(answer) == 5
    talk.recorded()


@feature("temperature 0", *EVERY)
def test_the_most_probable_tokens(talk: Talk) -> None:
    texts = {talk.ask(HI, max_tokens=16, temperature=0).text for _ in range(3)}
    assert len(texts) == 1
    talk.recorded()


@feature("seed", *OPENAI)
def test_seed(talk: Talk) -> None:
    first, again, other = (talk.ask(HI, max_tokens=24, temperature=1.0, seed=seed).text for seed in (7, 7, 8))
    assert first == again != other
    talk.recorded()


@feature("max tokens", *EVERY)
def test_max_tokens(talk: Talk) -> None:
    answer = talk.ask(HI, max_tokens=3, temperature=0)
    assert (answer.tokens, answer.end) == (3, talk.dialect.truncated)
    talk.recorded()


@feature("stop words", "chat", "completions", "messages")
def test_stop(talk: Talk) -> None:
    text = talk.ask(HI, max_tokens=16, temperature=0).text
    word = text[4:6]
    stopped = talk.ask(HI, max_tokens=16, temperature=0, stop=[word, "nowhere to be seen"])
    assert stopped.text == text[: text.index(word)]
    if talk.dialect.name == "messages":
        assert stopped.end == "stop_sequence"
    assert stopped.end in ("stop", "stop_sequence", "end_turn")
    talk.recorded()


@feature("several choices", *OPENAI)
def test_several_choices(talk: Talk) -> None:
    answer = talk.ask(HI, max_tokens=12, temperature=1.0, n=3)
    assert len(set(answer.texts)) == 3
    generations = talk.recorded().generations
    if generations:
        decode = talk.site.tokenizer.decode
        assert sorted(answer.texts) == sorted(
            decode(g.output_ids, skip_special_tokens=True) for g in generations
        )


@feature("log-probs", *OPENAI)
def test_logprobs(talk: Talk) -> None:
    answer = talk.ask(HI, max_tokens=8, temperature=0.7, logprobs=2)
    assert answer.logprobs is not None
    assert all(value <= 0 for value in answer.logprobs)
    (generation,) = talk.recorded().generations or [None]
    if generation is not None:
        assert answer.logprobs == pytest.approx(generation.logprobs[: len(answer.logprobs)], abs=1e-4)
    assert answer.tokens - len(answer.logprobs) in (0, 1)  # the end of text may be missing


@feature("system prompt", *CHAT_LIKE)
def test_system_prompt(talk: Talk) -> None:
    bare, told = talk.ask(HI, max_tokens=4), talk.ask(HI, max_tokens=4, system="Be brief.")
    assert told.prompt_tokens > bare.prompt_tokens + len("Be brief.")
    generations = talk.recorded().generations
    if generations:
        prompts = [talk.site.tokenizer.decode(generation.prompt_ids) for generation in generations]
        assert ["Be brief." in prompt for prompt in prompts] == [False, True]


@feature("tool call", *CHAT_LIKE)
def test_tool_call(talk: Talk) -> None:
    answer = talk.ask(HI, max_tokens=LONG, tools=[LAMP, MOVE], tool_choice="required", parallel=False)
    (call,) = answer.calls
    check_call(call)
    talk.recorded()


@feature("tool call, streamed", *CHAT_LIKE)
def test_streamed_tool_call(talk: Talk) -> None:
    answer = talk.ask(
        HI, max_tokens=LONG, tools=[LAMP, MOVE], tool_choice="required", parallel=False, stream=True
    )
    (call,) = answer.calls
    check_call(call)
    assert call.id
    talk.recorded()


@feature("named tool", *CHAT_LIKE)
def test_named_tool(talk: Talk) -> None:
    (call,) = talk.ask(HI, max_tokens=LONG, tools=[LAMP, MOVE], tool_choice="move").calls
    assert call.name == "move"
    check_call(call)
    talk.recorded()


@feature("parallel tool calls", *CHAT_LIKE)
def test_parallel_tool_calls(talk: Talk) -> None:
    for _ in range(20):
        answer = talk.ask(HI, max_tokens=LONG, tools=[MOVE], tool_choice="required", parallel=True)
        assert answer.calls
        if len(answer.calls) > 1:
            break
    for call in answer.calls[:-1] if answer.end == talk.dialect.truncated else answer.calls:
        check_call(call)
    assert len({call.id for call in answer.calls}) == len(answer.calls) > 1
    talk.recorded()


@feature("tool results", *CHAT_LIKE)
def test_tool_results(talk: Talk) -> None:
    asked = talk.ask(HI, max_tokens=LONG, tools=[LAMP], tool_choice="required", parallel=False)
    results = talk.dialect.results(*((call, "done") for call in asked.calls))
    talk.ask(HI, *asked.turn, *results, max_tokens=8, tools=[LAMP])
    check_spliced(talk)


def check_spliced(talk: Talk) -> None:
    """The second prompt continues the tokens of the first call, if they are known."""
    found = talk.recorded()
    sources = [span.attributes[PROMPT_SOURCE] for span in found.spans if PROMPT_SOURCE in span.attributes]
    if talk.site.tokenizer is None:
        assert sources == ["rendered", "rendered"]
        return
    first, second = found.generations
    assert sources == ["rendered", "spliced"]
    known = first.prompt_ids + first.output_ids
    assert second.prompt_ids[: len(known)] == known


@feature("JSON schema", *CHAT_LIKE)
def test_json_schema(talk: Talk) -> None:
    answer = talk.ask(HI, max_tokens=LONG, schema=SCHEMA)
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    talk.recorded()


@feature("images", *CHAT_LIKE)
def test_images(talk: Talk) -> None:
    talk.ask(HI, max_tokens=4, image=PIXEL)


@feature("token counting", "messages")
def test_token_counting(talk: Talk) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": [HI], "system": "Be brief."}
    counted = talk.client.messages.count_tokens(**asked)
    assert counted.input_tokens == talk.ask(HI, max_tokens=4, system="Be brief.").prompt_tokens > 10
    talk.recorded()


@feature("previous_response_id", "responses")
def test_previous_response_id(talk: Talk) -> None:
    first = talk.ask(HI, max_tokens=8)
    second = talk.ask(user("and then?"), max_tokens=8, previous=first.id)
    assert second.prompt_tokens > first.prompt_tokens + first.tokens
    check_spliced(talk)
