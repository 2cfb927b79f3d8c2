"""Features of every dialect on every engine, through the SDKs; `--feature-table PATH` writes a table.

The model is random, so tests assert the form of an answer only if the engine enforces it.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from engine_server import ENGINES
from feature_conversation import Conversation, user
from feature_dialects import Call

from raylight.semconv import PROMPT_SOURCE

CHAT_LIKE = ("chat", "responses", "messages")
EVERY = ("chat", "completions", "responses", "messages")
OPENAI = ("chat", "completions")
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HI = user("hi")
LONG = 800
"""Token limit with room for the white space that the model puts into its JSON."""

REJECTED = {(engine, dialect, "images") for engine in ENGINES for dialect in CHAT_LIKE}
"""Combinations of engine, dialect and feature that the engine rejects with 400. All others work."""

LABELS: dict[str, Any] = {
    "metadata": {"user_id": "me"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
    "user": "me",
}
CACHE_HINT = {"cache_control": {"type": "ephemeral"}}
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


def feature(name: str, *dialects: str) -> Callable[[Callable[[Conversation], None]], Any]:
    """Mark a test of a feature in some dialects, on every engine. In REJECTED, it must be rejected."""

    def mark(test: Callable[[Conversation], None]) -> Any:
        @functools.wraps(test)
        def run(conversation: Conversation) -> None:
            if (conversation.server.kind, conversation.dialect.name, name) in REJECTED:
                with conversation.refusal():
                    test(conversation)
            else:
                test(conversation)

        return pytest.mark.feature(name)(pytest.mark.parametrize("dialect", dialects)(run))

    return mark


def check_call(call: Call) -> None:
    """Assert that the arguments of a call match its tool's schema."""
    arguments = json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments
    jsonschema.validate(arguments, SCHEMAS[call.name])


@feature("answer", *EVERY)
def test_answer(conversation: Conversation) -> None:
    answer = conversation.ask(HI, max_tokens=16, temperature=1.0)
    assert 1 <= answer.tokens <= 16
    (generation,) = conversation.recorded().generations or [None]
    if generation is not None:
        assert answer.text == conversation.server.tokenizer.decode(
            generation.output_ids.tolist(), skip_special_tokens=True
        )
        assert answer.prompt_tokens == len(generation.prompt_ids)


@feature("streaming", *EVERY)
def test_streaming(conversation: Conversation) -> None:
    whole = conversation.ask(HI, max_tokens=16, temperature=0)
    streamed = conversation.ask(HI, max_tokens=16, temperature=0, stream=True)
    assert (streamed.text, streamed.end, streamed.tokens) == (whole.text, whole.end, whole.tokens)
    assert streamed.prompt_tokens == whole.prompt_tokens
    if streamed.announced is not None:  # an upstream sends the count at its stream's end
        assert streamed.announced == (whole.prompt_tokens if conversation.server.tokenizer else 0)
    pieces = [streamed.pieces]
    while max(pieces) == 1 and len(pieces) < 5:  # a busy machine may send several tokens in a chunk
        pieces.append(conversation.ask(HI, max_tokens=128, temperature=0, stream=True).pieces)
    assert max(pieces) > 1
    conversation.recorded()


@feature("async client", *EVERY)
def test_async_client(conversation: Conversation) -> None:
    answer = conversation.ask_together(["one", "two", "three"], max_tokens=8, temperature=1.0)
    answer = conversation.ask_together(["four", "five"], max_tokens=8, stream=True)
    assert all(1 <= one.tokens <= 8 for one in answer)
    assert len(answer) == 5
    conversation.recorded()


@feature("temperature 0", *EVERY)
def test_the_most_probable_tokens(conversation: Conversation) -> None:
    texts = {conversation.ask(HI, max_tokens=16, temperature=0).text for _ in range(3)}
    assert len(texts) == 1
    conversation.recorded()


@feature("seed", *OPENAI)
def test_seed(conversation: Conversation) -> None:
    first, again, other = (
        conversation.ask(HI, max_tokens=24, temperature=1.0, seed=seed).text for seed in (7, 7, 8)
    )
    assert first == again != other
    conversation.recorded()


@feature("max tokens", *EVERY)
def test_max_tokens(conversation: Conversation) -> None:
    answer = conversation.ask(HI, max_tokens=3, temperature=0)
    assert (answer.tokens, answer.end) == (3, conversation.dialect.truncated)
    conversation.recorded()


@feature("stop words", "chat", "completions", "messages")
def test_stop(conversation: Conversation) -> None:
    text = conversation.ask(HI, max_tokens=16, temperature=0).text
    word = text[4:6]
    stopped = conversation.ask(HI, max_tokens=16, temperature=0, stop=[word, "nowhere to be seen"])
    assert stopped.text == text[: text.index(word)]
    if conversation.dialect.name == "messages":
        assert stopped.end == "stop_sequence"
    assert stopped.end in ("stop", "stop_sequence", "end_turn")
    conversation.recorded()


@feature("several choices", *OPENAI)
def test_several_choices(conversation: Conversation) -> None:
    answer = conversation.ask(HI, max_tokens=12, temperature=1.0, n=3)
    assert len(set(answer.texts)) == 3
    generations = conversation.recorded().generations
    if generations:
        decode = conversation.server.tokenizer.decode
        assert sorted(answer.texts) == sorted(
            decode(g.output_ids.tolist(), skip_special_tokens=True) for g in generations
        )


@feature("log-probs", *OPENAI)
def test_logprobs(conversation: Conversation) -> None:
    answer = conversation.ask(HI, max_tokens=8, temperature=0.7, logprobs=2)
    assert answer.logprobs is not None
    assert all(value <= 0 for value in answer.logprobs)
    (generation,) = conversation.recorded().generations or [None]
    if generation is not None:
        assert answer.logprobs == pytest.approx(
            generation.logprobs.tolist()[: len(answer.logprobs)], abs=1e-4
        )
    assert answer.tokens - len(answer.logprobs) in (0, 1)  # the end of text may be missing


@feature("system prompt", *CHAT_LIKE)
def test_system_prompt(conversation: Conversation) -> None:
    bare, prompted = (
        conversation.ask(HI, max_tokens=4),
        conversation.ask(HI, max_tokens=4, system="Be brief."),
    )
    assert prompted.prompt_tokens > bare.prompt_tokens + len("Be brief.")
    generations = conversation.recorded().generations
    if generations:
        prompts = [
            conversation.server.tokenizer.decode(generation.prompt_ids.tolist()) for generation in generations
        ]
        assert ["Be brief." in prompt for prompt in prompts] == [False, True]


@feature("tool call", *CHAT_LIKE)
def test_tool_call(conversation: Conversation) -> None:
    answer = conversation.ask(HI, max_tokens=LONG, tools=[LAMP, MOVE], tool_choice="required", parallel=False)
    (call,) = answer.calls
    check_call(call)
    conversation.recorded()


@feature("tool call, streamed", *CHAT_LIKE)
def test_streamed_tool_call(conversation: Conversation) -> None:
    answer = conversation.ask(
        HI, max_tokens=LONG, tools=[LAMP, MOVE], tool_choice="required", parallel=False, stream=True
    )
    (call,) = answer.calls
    check_call(call)
    assert call.id
    conversation.recorded()


@feature("named tool", *CHAT_LIKE)
def test_named_tool(conversation: Conversation) -> None:
    (call,) = conversation.ask(HI, max_tokens=LONG, tools=[LAMP, MOVE], tool_choice="move").calls
    assert call.name == "move"
    check_call(call)
    conversation.recorded()


@feature("parallel tool calls", *CHAT_LIKE)
def test_parallel_tool_calls(conversation: Conversation) -> None:
    for _ in range(20):
        answer = conversation.ask(HI, max_tokens=LONG, tools=[MOVE], tool_choice="required", parallel=True)
        assert answer.calls
        if len(answer.calls) > 1:
            break
    for call in answer.calls[:-1] if answer.end == conversation.dialect.truncated else answer.calls:
        check_call(call)
    assert len({call.id for call in answer.calls}) == len(answer.calls) > 1
    conversation.recorded()


@feature("tool results", *CHAT_LIKE)
def test_tool_results(conversation: Conversation) -> None:
    asked = conversation.ask(HI, max_tokens=LONG, tools=[LAMP], tool_choice="required", parallel=False)
    results = conversation.dialect.results(*((call, "done") for call in asked.calls))
    conversation.ask(HI, *asked.turn, *results, max_tokens=8, tools=[LAMP])
    check_spliced(conversation)


def check_spliced(conversation: Conversation) -> None:
    """Assert that the second prompt continues the tokens of the first call, if they are known."""
    found = conversation.recorded()
    sources = [span.attributes[PROMPT_SOURCE] for span in found.spans if PROMPT_SOURCE in span.attributes]
    if conversation.server.tokenizer is None:
        assert sources == ["rendered", "rendered"]
        return
    first, second = found.generations
    assert sources == ["rendered", "spliced"]
    known = first.token_ids.tolist()
    assert second.prompt_ids.tolist()[: len(known)] == known


@feature("JSON schema", *CHAT_LIKE)
def test_json_schema(conversation: Conversation) -> None:
    answer = conversation.ask(HI, max_tokens=LONG, schema=SCHEMA)
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    conversation.recorded()


@feature("allowed tools", "chat", "responses")
def test_allowed_tools(conversation: Conversation) -> None:
    choice = conversation.dialect.allowed_tools("move")
    answer = conversation.ask(HI, max_tokens=LONG, tools=[LAMP, MOVE], extra_body={"tool_choice": choice})
    assert {call.name for call in answer.calls} == {"move"}
    conversation.recorded()


@feature("invalid tool schema", *CHAT_LIKE)
def test_invalid_tool_schema(conversation: Conversation) -> None:
    wrong = LAMP | {"parameters": {"type": "object", "properties": {"on": {"type": "bool"}}}}
    with conversation.refusal("'set_lamp'", conversation.dialect.tool_schema.format(1), "'bool'"):
        conversation.ask(HI, max_tokens=4, tools=[MOVE, wrong])


@feature("labels", *EVERY)
def test_labels(conversation: Conversation) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    plain = conversation.ask(HI, **asked)
    assert conversation.ask(HI, **asked, extra_body=LABELS).text == plain.text
    conversation.recorded()


@feature("hints that the model does not read", *CHAT_LIKE)
def test_hints(conversation: Conversation) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    plain = conversation.ask(HI, **asked)
    assert conversation.ask(HI, **asked, extra_body=conversation.dialect.hints).text == plain.text
    conversation.recorded()


@feature("cache hints", "chat", "messages")
def test_cache_hints(conversation: Conversation) -> None:
    def turn(**hint: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": "hi", **hint}]}

    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    first = conversation.ask(turn(**CACHE_HINT), **asked)
    conversation.ask(turn(), *first.turn, turn(**CACHE_HINT), extra_body=CACHE_HINT, **asked)
    check_spliced(conversation)


@feature("images", *CHAT_LIKE)
def test_images(conversation: Conversation) -> None:
    conversation.ask(HI, max_tokens=4, image=PIXEL)


@feature("token counting", "messages")
def test_token_counting(conversation: Conversation) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": [HI], "system": "Be brief."}
    counted = conversation.client.messages.count_tokens(**asked)
    assert counted.input_tokens == conversation.ask(HI, max_tokens=4, system="Be brief.").prompt_tokens > 10
    conversation.recorded()


@feature("previous_response_id", "responses")
def test_previous_response_id(conversation: Conversation) -> None:
    first = conversation.ask(HI, max_tokens=8)
    second = conversation.ask(user("and then?"), max_tokens=8, previous=first.id)
    assert second.prompt_tokens > first.prompt_tokens + first.tokens
    check_spliced(conversation)
