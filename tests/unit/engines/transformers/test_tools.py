"""Tool calls, reasoning and JSON schemas on the engine's chat route, through the real OpenAI SDK."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from transformers_helpers import HERMES, THINKING, Brake, MakeEngine, open_context, restyle, script
from unit_helpers import within

from raylight.engines.grammar import Grammars
from raylight.engines.transformers.chat import _Choice, begin_chat
from raylight.engines.transformers.message import MessageParser
from raylight.engines.transformers.reply import Increment
from raylight.engines.transformers.tools import FORMATS
from raylight.serving.dialects.answers import BlockReader
from raylight.types.request_fields import log_dropped
from unit.engines.transformers.test_app import ask, ask_stream, text_of

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
SUB = {"type": "function", "function": {**ADD["function"], "name": "sub"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["a", "b"]}},
    "required": ["x"],
    "additionalProperties": False,
}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def make_caller(make_engine: MakeEngine, template: str = HERMES, **how: Any) -> Any:
    engine = make_engine(**how)
    restyle(engine, template)
    return engine


async def test_parallel_tool_calls(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine)
    script(engine, f"I add.\n{CALL}\n{CALL.replace('1', '2')}")
    choice = (await ask(engine, tools=[ADD], max_tokens=300)).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("add", '{"a": 1}'),
        ("add", '{"a": 2}'),
    ]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    only = (await ask(engine, tools=[ADD], max_tokens=300, parallel_tool_calls=False)).choices[0]
    assert len(only.message.tool_calls) == 1


async def test_streamed_tool_calls_come_whole_after_the_text(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine)
    script(engine, f"I add.\n{CALL}\n{CALL.replace('1', '2')}")
    chunks = await ask_stream(engine, tools=[ADD], max_tokens=300)
    assert text_of(chunks) == "I add."
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert [(c.index, c.function.arguments) for c in calls] == [(0, '{"a": 1}'), (1, '{"a": 2}')]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_text_before_a_call_comes_while_it_is_sampled(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine)
    script(engine, f"I add.\n{CALL}")
    brake, texts = Brake(engine, at=5), []
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [ADD],
        "stream": True,
    }
    async with within(30):
        reply = await begin_chat(engine, body)
        with reply.choices:
            async for chunk in reply.events():
                if text := chunk["choices"][0]["delta"].get("content"):
                    texts.append(text)
                    brake.release()  # sampling goes on only after a part of the text has come
    assert len(texts) > 1
    assert "".join(texts) == "I add."


@pytest.mark.parametrize("reasoning", ["", "hm"])
def test_text_after_a_call_stays_after_it_however_the_answer_is_cut(reasoning: str) -> None:
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    text = f"{thought}I add.\n{CALL}\nWaiting now.\n{CALL.replace('1', '2')}\nBye."
    for cut in range(len(text)):
        parser = MessageParser(FORMATS["hermes"], {"add": {}}, False if reasoning else None)
        tokens = SimpleNamespace(count_until=lambda word: 0)
        choice, reader = _Choice(tokens, parser, ""), BlockReader()  # type: ignore[arg-type]
        for piece, reason in ((text[:cut], None), (text[cut:], "stop")):
            for delta in choice.deltas(Increment(0, [], piece, reason, None), True):
                reader.feed({"id": "x", "model": "m", "choices": [{"delta": delta}]})
        reader.finish()
        blocks = [(block.kind, block.text) for block in reader.turn.blocks]
        assert blocks == [
            *([("reasoning", reasoning)] if reasoning else []),
            ("text", "I add."),
            ("call", '{"a": 1}'),
            ("text", "Waiting now."),
            ("call", '{"a": 2}'),
            ("text", "Bye."),
        ]


async def test_a_call_and_the_text_after_it_are_separate_chunks(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine)
    script(engine, f"{CALL}\nWaiting now.")
    for how in ({}, {"logprobs": True}):
        chunks = await ask_stream(engine, tools=[ADD], max_tokens=300, **how)
        parts = [chunk.choices[0] for chunk in chunks]
        assert not any(part.delta.tool_calls and part.delta.content for part in parts)
        assert "".join(part.delta.content or "" for part in parts) == "Waiting now."
        assert [part.finish_reason for part in parts if part.finish_reason] == ["tool_calls"]
        if how:
            words = [item.token for part in parts for item in part.logprobs.content]
            assert "".join(words).startswith(CALL)


async def test_the_sdks_stream_helper_understands_it(make_engine: MakeEngine) -> None:
    from transformers_helpers import client_of

    engine = make_caller(make_engine)
    script(engine, CALL)
    client = await client_of(engine)
    # the helper of openai before 3 takes strict tools only
    strict = ADD | {"function": ADD["function"] | {"strict": True}}
    async with client.chat.completions.stream(
        model="policy", messages=[{"role": "user", "content": "hi"}], tools=[strict], max_tokens=300
    ) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content is None or message.content == ""
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}


@pytest.mark.parametrize("how", [{"tools": [ADD], "tool_choice": "none"}, {}])
async def test_without_leave_to_call_the_text_stays(make_engine: MakeEngine, how: dict[str, Any]) -> None:
    engine = make_caller(make_engine)
    script(engine, CALL)
    choice = (await ask(engine, max_tokens=300, **how)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


async def test_malformed_calls_stay_content(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine)
    script(engine, "<tool_call>add</tool_call>")
    choice = (await ask(engine, tools=[ADD], max_tokens=300)).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("<tool_call>add</tool_call>", "stop")
    assert text_of(await ask_stream(engine, tools=[ADD], max_tokens=300)) == "<tool_call>add</tool_call>"


async def test_thoughts_are_told_apart(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine, THINKING)
    script(engine, f"<think>\nhm\n</think>\n\nfour\n{CALL}")
    message = (await ask(engine, tools=[ADD], max_tokens=300)).choices[0].message
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == ("hm", "four", 1)
    chunks = await ask_stream(engine, tools=[ADD], max_tokens=300)
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks) == "hm"


async def test_a_prompt_may_begin_the_thought(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine, THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}")
    script(engine, "hm</think>four")
    message = (await ask(engine)).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "four")


# held to a schema


async def test_json_that_fits_a_schema_and_the_logprobs_of_what_was_allowed(make_engine: MakeEngine) -> None:
    engine, context = make_engine(), open_context()
    for seed in range(5):
        choice = (
            await ask(
                engine, response_format=AS_JSON, max_tokens=500, seed=seed, logprobs=True, top_logprobs=5
            )
        ).choices[0]
        assert json.loads(choice.message.content)["x"] in ("a", "b")
        assert choice.finish_reason == "stop"
        assert choice.logprobs.content[0].token == "{"
        assert choice.logprobs.content[0].logprob == pytest.approx(0)  # nothing else was allowed
        assert choice.logprobs.content[0].top_logprobs[1].logprob == -9999
        assert context.samples[0].logprobs[0] == pytest.approx(0)
        json.dumps(context.samples[0].sampling)
    text = (
        (await ask(engine, response_format={"type": "json_object"}, max_tokens=20)).choices[0].message.content
    )
    assert text.startswith("{")


async def test_a_batch_mixes_free_answers_and_held_ones(make_engine: MakeEngine) -> None:
    import asyncio

    engine = make_engine()
    free = [(await ask(engine, seed=i)).choices[0].message.content for i in range(3)]
    held = [ask(engine, response_format=AS_JSON, max_tokens=500) for _ in range(3)]
    answers = await asyncio.gather(*held, *(ask(engine, seed=i) for i in range(3)))
    assert [a.choices[0].message.content for a in answers[3:]] == free
    assert all(json.loads(a.choices[0].message.content) for a in answers[:3])


async def test_strict_tools_are_held_to_their_schema(make_engine: MakeEngine) -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    engine = make_caller(make_engine)
    script(engine, '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>')  # 7 is not allowed
    answer = (await ask(engine, tools=[strict], max_tokens=300)).choices[0]
    assert json.loads(answer.message.tool_calls[0].function.arguments)["a"] in (1, 2)


THOUGHT = "<think>\nmaybe <tool_call>{7}</tool_call> or {}\n</think>\n\n"
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}
OPENS_THOUGHT = THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}"
HELD: dict[str, dict[str, Any]] = {
    "strict": {"tools": [STRICT]},
    "required": {"tools": [ADD], "tool_choice": "required"},
    "named": {"tools": [ADD, SUB], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    "schema": {"response_format": AS_JSON},
    "schema and tools": {"response_format": AS_JSON, "tools": [STRICT]},
}


@pytest.mark.parametrize(
    ("template", "how"),
    [
        pytest.param(
            template,
            how,
            id=f"{name}-{how}",
            marks=[] if how in shown else pytest.mark.slow("the others show it"),
        )
        for name, template, shown in [
            ("optional", THINKING, ("strict", "schema and tools")),
            ("opened", OPENS_THOUGHT, ("required",)),
        ]
        for how in HELD
    ],
)
async def test_a_model_thinks_before_what_is_held_to_a_schema(
    make_engine: MakeEngine, template: str, how: str
) -> None:
    engine, context = make_caller(make_engine, template), open_context()
    said = '{"x": "c"}' if how == "schema" else CALL.replace("1", "7")  # neither value is allowed
    text = (THOUGHT if template == THINKING else THOUGHT.removeprefix("<think>")) + said
    script(engine, text)
    choice = (await ask(engine, **HELD[how], max_tokens=400)).choices[0]
    assert choice.message.reasoning_content == "maybe <tool_call>{7}</tool_call> or {}"
    if how == "schema":
        assert json.loads(choice.message.content)["x"] in ("a", "b")
    else:
        assert json.loads(choice.message.tool_calls[0].function.arguments)["a"] in (1, 2)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    sampled = engine.tokenizer.decode(context.samples[0].output_ids)
    assert sampled.startswith(text.partition(said)[0])
    chunks = await ask_stream(engine, **HELD[how], max_tokens=400)
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks) == (
        choice.message.reasoning_content
    )


async def test_a_model_may_leave_out_its_thought(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine, THINKING)
    script(engine, CALL)
    message = (await ask(engine, tools=[ADD], tool_choice="required", max_tokens=300)).choices[0].message
    assert (len(message.tool_calls), hasattr(message, "reasoning_content")) == (1, False)


async def test_a_prompt_that_ends_the_thought_leaves_no_other(make_engine: MakeEngine) -> None:
    closed = THINKING + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"
    engine = make_caller(make_engine, closed)
    script(engine, f"<think>no</think>{CALL}")
    message = (await ask(engine, tools=[ADD], tool_choice="required", max_tokens=300)).choices[0].message
    assert (len(message.tool_calls), hasattr(message, "reasoning_content")) == (1, False)


@pytest.mark.parametrize("template", [THINKING, OPENS_THOUGHT], ids=["optional", "opened"])
async def test_a_schema_without_a_value_is_refused_for_a_model_that_thinks(
    make_engine: MakeEngine, template: str
) -> None:
    endless = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    as_json = {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}}
    with pytest.raises(openai.BadRequestError, match=r"response_format.json_schema.schema: "):
        await ask(make_caller(make_engine, template), response_format=as_json)


async def test_a_schema_is_compiled_once_for_a_model_that_thinks(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_now = Grammars._compile_now

    def count(self: Grammars, method: str, *args: Any) -> Any:
        compiled.append(method)
        return compile_now(self, method, *args)

    monkeypatch.setattr(Grammars, "_compile_now", count)
    await ask(make_caller(make_engine, THINKING), response_format=AS_JSON, max_tokens=2)
    assert compiled == ["compile_structural_tag"]


@pytest.mark.parametrize(
    ("template", "text", "tokens"),
    [
        (THINKING, "<think>hm</think>four", 17),
        (OPENS_THOUGHT, "hm</think>four", 10),
        (THINKING, "<think>hm", None),
        (THINKING, "four</think>", 0),
    ],
)
async def test_tokens_of_reasoning_are_counted(
    make_engine: MakeEngine, template: str, text: str, tokens: int | None
) -> None:
    engine = make_caller(make_engine, template)
    script(engine, text, text + "!")
    limit = 9 if tokens is None else 300  # None: the thought is cut off
    answer = await ask(engine, n=2, max_tokens=limit)
    expected = 2 * (limit if tokens is None else tokens)
    assert answer.usage.completion_tokens_details.reasoning_tokens == expected
    chunks = await ask_stream(engine, n=2, max_tokens=limit, stream_options={"include_usage": True})
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == expected


async def test_a_schema_and_tools_together_allow_either(make_engine: MakeEngine) -> None:
    engine = make_caller(make_engine)
    for text, called in ((CALL, True), ('{"x": "a"}', False)):
        script(engine, text)
        message = (await ask(engine, tools=[ADD], response_format=AS_JSON, max_tokens=300)).choices[0].message
        assert bool(message.tool_calls) == called
        assert called or json.loads(message.content) == {"x": "a"}
        engine = make_caller(make_engine)


STRICT_JSON = {"type": "json_schema", "json_schema": {**AS_JSON["json_schema"], "strict": True}}


@pytest.mark.parametrize(
    "how",
    [
        {"response_format": STRICT_JSON},
        {"response_format": {"type": "json_object"}},
        {"tools": [ADD], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "add", "strict": True}}]},
    ],
)
async def test_without_xgrammar_a_strict_schema_is_refused(
    make_engine: MakeEngine, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grammars, "available", False)
    with pytest.raises(openai.BadRequestError, match="pip install xgrammar"):
        await ask(make_caller(make_engine), **how)


async def test_without_xgrammar_a_schema_that_is_not_strict_is_left_out_and_logged_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Grammars, "available", False)
    engine = make_caller(make_engine)
    script(engine, "free")
    for _ in range(2):
        answer = await ask(engine, response_format=AS_JSON, max_tokens=50)
        assert answer.choices[0].message.content == "free"
    script(engine, CALL)
    loose = {"type": "function", "function": {**ADD["function"], "strict": False}}
    assert (await ask(engine, tools=[loose], max_tokens=300)).choices[0].message.tool_calls
    (record,) = [r for r in caplog.records if "xgrammar" in r.message]
    assert "response_format" in record.message


async def test_a_broken_xgrammar_is_not_blamed_on_the_schema(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grammars, "available", True)
    monkeypatch.setitem(sys.modules, "xgrammar", None)  # its import raises ImportError
    with pytest.raises(openai.InternalServerError, match=r"xgrammar.* cannot be loaded.*reinstall") as caught:
        await ask(make_engine(), response_format=AS_JSON)
    assert caught.value.status_code == 501


async def test_a_failing_library_is_not_blamed_on_the_schema(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import xgrammar

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("libxgrammar_bindings.so: undefined symbol")

    monkeypatch.setattr(xgrammar.GrammarCompiler, "compile_json_schema", fail)
    with pytest.raises(openai.InternalServerError, match="undefined symbol"):
        await ask(make_engine(), response_format=AS_JSON)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "compiled: Unsupported type .*nonsense"),
        ({"$ref": "#/nowhere"}, "compiled: Cannot find field '?nowhere"),
        ({"properties": 3}, "compiled: properties must be an object"),
    ],
)
async def test_a_bad_schema_is_refused(make_engine: MakeEngine, schema: dict[str, Any], reason: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=reason):
        await ask(make_engine(), response_format=wanted)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nowhere"}}}, "nowhere"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ],
)
async def test_impossible_choices_are_refused(
    make_engine: MakeEngine, how: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        await ask(make_caller(make_engine), tools=[ADD], **how)


async def test_tools_that_the_template_or_the_parser_does_not_know_are_refused(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(tool_parser="hermes")
    with pytest.raises(openai.BadRequestError, match="template does not support them"):
        await ask(engine, tools=[ADD])
    restyle(engine, HERMES, tool_parser=None)
    with pytest.raises(openai.BadRequestError, match="tool_parser"):
        await ask(engine, tools=[ADD])


async def test_strict_tools_of_a_format_without_grammar_are_free_and_logged_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    log_dropped.cache_clear()
    engine = make_caller(make_engine)
    restyle(engine, HERMES, tool_parser="olmo3")
    script(engine, "<function_calls>add(a=1)</function_calls>")
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    for _ in range(2):
        (call,) = (await ask(engine, tools=[strict], max_tokens=300)).choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    (record,) = [r for r in caplog.records if "strict" in r.message]
    assert "cannot enforce" in record.message
    with pytest.raises(openai.BadRequestError, match="tool_choice: this model's tool calls cannot be"):
        await ask(engine, tools=[strict], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="response_format: this model's tool calls cannot be"):
        await ask(engine, tools=[strict], response_format=AS_JSON)


async def test_a_budget_of_thinking_is_not_enforced_and_logged_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    log_dropped.cache_clear()
    engine = make_caller(make_engine)
    script(engine, "free")
    for _ in range(2):
        answer = await ask(engine, extra_body={"thinking_token_budget": 9}, max_tokens=50)
        assert answer.choices[0].message.content == "free"
    assert len([r for r in caplog.records if "thinking_token_budget" in r.message]) == 1
