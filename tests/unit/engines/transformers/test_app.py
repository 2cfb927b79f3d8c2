"""The engine's routes through the real OpenAI SDK: chat, completions, models, tokens, rejected requests."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from transformers_helpers import HERMES, Brake, MakeEngine, client_of, open_context, restyle, script
from unit_helpers import within

from raylight.engines.transformers.chat import begin_chat
from raylight.http.errors import RequestError

HI = [{"role": "user", "content": "hi"}]


async def ask(engine: Any, **more: Any) -> Any:
    """Request a chat completion without streaming."""
    async with within(30):
        return await (await client_of(engine)).chat.completions.create(
            **{"model": "policy", "messages": HI, "max_tokens": 30, **more}
        )


async def ask_stream(engine: Any, **more: Any) -> list[Any]:
    """Request a streamed chat completion and return its chunks."""
    return [chunk async for chunk in await ask(engine, stream=True, **more)]


def text_of(chunks: list[Any], index: int = 0) -> str:
    deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(delta or "" for delta in deltas)


def values_of(tokens: list[Any]) -> list[float]:
    """Return the log-probs of tokens and of their alternatives."""
    return [entry.logprob for token in tokens for entry in (token, *token.top_logprobs)]


async def complete(engine: Any, **more: Any) -> Any:
    async with within(30):
        return await (await client_of(engine)).completions.create(
            **{"model": "policy", "prompt": "ab", **more}
        )


async def post(engine: Any, path: str, content: Any) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(await engine.app()), base_url="http://engine"
    ) as client:
        return await (
            client.post(path, content=content)
            if isinstance(content, bytes)
            else client.post(path, json=content)
        )


# chat


async def test_an_answer_has_the_shape_of_openais(make_engine: MakeEngine) -> None:
    engine = make_engine()
    script(engine, "héllo")
    answer = await ask(engine)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "héllo",
        "stop",
    )
    assert (answer.object, answer.model, choice.logprobs) == ("chat.completion", "policy", None)
    prompt = engine.tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        len(prompt),
        7,
        len(prompt) + 7,
    )


async def test_a_stream_tells_the_same_without_half_characters(make_engine: MakeEngine) -> None:
    engine = make_engine()
    script(engine, "a€b")
    chunks = await ask_stream(engine, stream_options={"include_usage": True})
    parts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(parts) == "a€b"  # a busy machine may send several characters in one chunk
    assert not any("\ufffd" in part for part in parts)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert {c.id for c in chunks} == {chunks[0].id}
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [6]
    assert chunks[-1].choices == []
    assert all(c.usage is None for c in await ask_stream(engine))


async def test_each_chunk_counts_the_tokens_so_far_if_asked_to(make_engine: MakeEngine) -> None:
    engine = make_engine()
    options = {"include_usage": True, "continuous_usage_stats": True}
    streams = [
        await ask_stream(engine, stream_options=options),
        [c async for c in await complete(engine, stream=True, stream_options=options)],
    ]
    for chunks in streams:
        counts = [c.usage.completion_tokens for c in chunks]
        assert counts == sorted(counts)
        assert {c.usage.prompt_tokens for c in chunks} == {chunks[-1].usage.prompt_tokens}
    alone = await ask_stream(engine, stream_options={"continuous_usage_stats": True})
    assert all(c.usage is None for c in alone)


async def test_streamed_and_whole_answers_agree(make_engine: MakeEngine) -> None:
    engine = make_engine()
    settings = {"n": 3, "seed": 4, "temperature": 1.5, "logprobs": True, "top_logprobs": 3, "max_tokens": 40}
    whole, chunks = await ask(engine, **settings), await ask_stream(engine, **settings)
    assert len({choice.message.content for choice in whole.choices}) == 3
    for choice in whole.choices:
        assert text_of(chunks, choice.index) == choice.message.content
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        streamed = [t for p in parts if p.logprobs for t in p.logprobs.content]
        assert [t.token for t in streamed] == [t.token for t in choice.logprobs.content]
        # in the last digits, a step's sums depend on the other requests of the batch
        assert values_of(streamed) == pytest.approx(values_of(choice.logprobs.content), abs=1e-4)
        assert parts[-1].finish_reason == choice.finish_reason
        assert len(choice.logprobs.content[0].top_logprobs) == 3


async def test_a_seed_and_temperature_zero_reproduce(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for settings in ({"seed": 3}, {"temperature": 0}):
        first, again = [(await ask(engine, **settings)).choices[0].message.content for _ in range(2)]
        assert first == again
    assert (await ask(engine)).choices[0].message.content != (await ask(engine)).choices[0].message.content


@pytest.mark.parametrize(
    ("stop", "expected"), [("l", "he"), (["o", "l"], "he"), ("lo", "hel"), ("zz", "hello"), ([], "hello")]
)
async def test_the_text_ends_before_the_first_stop_word(
    make_engine: MakeEngine, stop: Any, expected: str
) -> None:
    engine, context = make_engine(), open_context()
    script(engine, "hello")
    answer = await ask(engine, stop=stop)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    assert text_of(await ask_stream(engine, stop=stop)) == expected
    sampled = engine.tokenizer.decode(context.samples[0].output_ids, skip_special_tokens=True)
    assert sampled.startswith(expected)  # what was sampled holds the stop word, and nothing after it
    assert len(sampled) == len(expected) + (0 if expected == "hello" else len("lo" if stop == "lo" else "l"))


async def test_length_is_told(make_engine: MakeEngine) -> None:
    engine = make_engine()
    script(engine, "hello")
    for settings in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 4}):
        choice = (await ask(engine, **settings)).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("hel", "length")


async def test_a_prompt_in_tokens_is_sampled_from_as_it_is(make_engine: MakeEngine) -> None:
    engine, context = make_engine(), open_context()
    answer = await ask(
        engine, extra_body={"kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}, "return_token_ids": True}
    )
    assert context.samples[0].prompt_ids.tolist() == [5, 6, 7] == answer.prompt_token_ids
    assert answer.choices[0].token_ids == context.samples[0].output_ids
    chunks = await ask_stream(engine, extra_body={"return_token_ids": True})
    assert chunks[0].prompt_token_ids == context.samples[0].prompt_ids.tolist()
    assert [i for c in chunks for i in c.choices[0].token_ids] == context.samples[0].output_ids


async def test_messages_reach_the_template_as_it_expects_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    restyle(engine, "{{ messages | tojson }}")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    ]
    context = open_context()
    await ask(engine, messages=messages, max_tokens=1)
    assert json.loads(engine.tokenizer.decode(context.samples[0].prompt_ids.tolist())) == [
        {"role": "system", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "thinking": "hm",
        },
    ]


async def test_how_the_prompt_ends_can_be_told(make_engine: MakeEngine) -> None:
    engine, context = make_engine(), open_context()
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    await ask(engine, messages=messages, max_tokens=1, extra_body=how)
    assert engine.tokenizer.decode(context.samples[0].prompt_ids.tolist()).endswith("Well,")
    restyle(engine, "{{ mood }}{{ reasoning_effort }}")
    await ask(
        engine, max_tokens=1, reasoning_effort="low", extra_body={"chat_template_kwargs": {"mood": "calm"}}
    )
    assert engine.tokenizer.decode(context.samples[0].prompt_ids.tolist()) == "calmlow"


TOOL = {"type": "function", "function": {"name": "add"}}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
NAMED = {"type": "function", "function": {"name": "nowhere"}}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n:"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [IMAGE]}, r"messages\[0\]\.content"),
        ({"unheard": 1, "of": 2}, r"unheard.*of"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 2}, "requires logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"kv_transfer_params": {"other": 1}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"prompt_token_ids": []}}, "kv_transfer"),
        ({"kv_transfer_params": {"prompt_token_ids": [320]}}, "between 0 and 319"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"tools": [TOOL]}, "tool"),
        ({"tool_choice": "required"}, "requires tools"),
        ({"continue_final_message": True}, "add_generation"),
        ({"chat_template_kwargs": {"tokenize": False}}, "tokenize"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, "2019 tokens"),
        ({"seed": 2**63}, "seed"),
        ({"top_k": 2**63}, "top_k: it must be a whole number from -1 to 2147483647"),
        ({"n": 117}, "n: this engine takes at most 116 choices"),
    ],
)
async def test_what_it_does_not_support_is_refused_by_name(
    idle_engine: Any, wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=f"(?s){named}") as caught:
        await begin_chat(idle_engine, {"model": "policy", "messages": HI, **wrong})
    assert caught.value.status == 400


@pytest.mark.parametrize("top_k", [321, 2**31 - 1])
async def test_a_top_k_beyond_the_vocabulary_is_no_limit(make_engine: MakeEngine, top_k: int) -> None:
    engine = make_engine()
    free, limited = [
        await ask(engine, seed=3, max_tokens=8, extra_body={"top_k": value}) for value in (-1, top_k)
    ]
    assert limited.choices[0].message == free.choices[0].message


async def test_refusals_have_openais_shape(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(openai.BadRequestError, match="unheard") as caught:
        await ask(engine, extra_body={"unheard": 1})
    assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match=r"`gpt`.*'policy'"):
        await ask(engine, model="gpt")
    engine.close()
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        await ask(engine)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b"null", b"[]", b'{"model": "\\ud800"}', b'{"\\udcff": 1}', b"\xff"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_request_is_refused(idle_engine: Any, path: str, body: bytes) -> None:
    answer = await post(idle_engine, path, body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]


async def test_text_that_is_no_unicode_is_refused(idle_engine: Any) -> None:
    bad = [{"role": "user", "content": "\udcff"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": bad}),
        ("/v1/completions", {"prompt": "\udcff"}),
    ):
        answer = await post(idle_engine, path, json.dumps({"model": "policy", **body}).encode())
        assert answer.status_code == 400


async def test_an_error_in_mid_stream_reaches_the_client(make_engine: MakeEngine) -> None:
    engine = make_engine()
    brake = Brake(engine, at=3)
    async with within(30):
        task = asyncio.create_task(ask_stream(engine, max_tokens=500))
        await brake.reached.wait()
        brake.release()
        await asyncio.to_thread(engine.close)
        with pytest.raises(openai.APIError, match="shutting down"):
            await task


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_places(make_engine: MakeEngine, stream: bool) -> None:
    engine, context = make_engine(slots=2, max_waiting=0), open_context()
    app, brake, gone, first = await engine.app(), Brake(engine, at=3), asyncio.Event(), asyncio.Event()
    sent: list[Any] = []
    body = json.dumps(
        {"model": "policy", "messages": HI, "stream": stream, "n": 2, "ignore_eos": True}
    ).encode()
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        first.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
        "query_string": b"",
        "asgi": {},
    }
    async with within(30):
        task = asyncio.create_task(app(scope, receive, send))
        await brake.reached.wait()
        gone.set()
        await task
        brake.release()
        script(engine, "x")
        assert (await ask(engine, n=2)).choices[1].message.content == "x"
    assert len(context.samples[0].output_ids) < 10


HUGE = {
    "tools": {"tools": [{}] * 90_000},
    "messages": {"messages": [{"role": "user", "content": ""}] * 60_000},
    "parts": {"messages": [{"role": "user", "content": [{}] * 90_000}]},
    "stop words": {"stop": ["a"] * 100_000},
    "one stop word too many": {"stop": ["a"] * 65},
    "a long stop word": {"stop": "a" * 1_001},
    "biases": {"logit_bias": dict.fromkeys(map(str, range(90_000)), "x")},
    "fields": dict.fromkeys(map(str, range(90_000)), 1),
    "some fields": dict.fromkeys(map(str, range(1_000)), 1),
    "a long name": {"x" * 100_000: 1},
}


@pytest.mark.parametrize("wrong", HUGE.values(), ids=HUGE)
async def test_a_great_many_problems_are_told_in_short(idle_engine: Any, wrong: dict[str, Any]) -> None:
    answer = await post(idle_engine, "/v1/chat/completions", {"model": "policy", "messages": HI, **wrong})
    assert answer.status_code == 400
    assert len(answer.text) < 5_000


async def test_the_first_problems_are_named(idle_engine: Any) -> None:
    answer = await post(
        idle_engine, "/v1/chat/completions", {"model": "policy", "messages": HI, **HUGE["some fields"]}
    )
    assert [f"{i}: this field is not supported" in answer.text for i in (0, 9, 10)] == [True, True, False]
    assert "and 990 more" in answer.text


LONG = {
    "many messages": {"messages": [{"role": "user", "content": ""}] * 9_000},
    "a field that the template shows": {"messages": [{"role": "user", "content": "", "note": "a" * 100_000}]},
    "tools": {
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": "f", "description": "a" * 100_000}}],
    },
}


@pytest.mark.parametrize("long", LONG.values(), ids=LONG)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_what_cannot_fit_is_never_tokenized(
    make_engine: MakeEngine, path: str, long: dict[str, Any]
) -> None:
    engine = make_engine()
    restyle(engine, HERMES + "{{ messages | tojson }}")
    answer = await post(engine, path, {"model": "policy", **long})
    assert answer.status_code == 400
    assert "maximum context length is 1024 tokens. However, your messages resulted in at least" in answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"


# completions


async def test_completions_of_every_kind_of_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = engine.tokenizer.encode("ab")
    asked = [await complete(engine, prompt=p, seed=1) for p in ("ab", ids, ["ab"], [ids])]
    assert len({answer.choices[0].text for answer in asked}) == 1
    assert asked[0].usage.prompt_tokens == 2
    assert asked[0].usage.completion_tokens <= 16  # OpenAI's default
    several = await complete(engine, prompt=["ab", "cde"], n=2, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == asked[0].choices[0].text
    assert several.usage.prompt_tokens == 5


async def test_streamed_and_whole_completions_agree(make_engine: MakeEngine) -> None:
    engine = make_engine()
    settings = {"n": 2, "seed": 4, "logprobs": 2, "max_tokens": 20, "extra_body": {"return_token_ids": True}}
    whole = await complete(engine, **settings)
    chunks = [
        c
        async for c in await complete(engine, stream=True, stream_options={"include_usage": True}, **settings)
    ]
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(p.text for p in parts) == choice.text
        assert [t for p in parts for t in p.logprobs.tokens] == choice.logprobs.tokens
        assert [t for p in parts for t in p.logprobs.text_offset] == choice.logprobs.text_offset
        assert [t for p in parts for t in p.token_ids] == choice.token_ids
        assert parts[0].prompt_token_ids == choice.prompt_token_ids
        assert len(choice.logprobs.top_logprobs) == len(choice.token_ids)
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
    ],
)
async def test_what_completions_do_not_support_is_refused(
    idle_engine: Any, wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        await complete(idle_engine, **wrong)


# models and tokens


async def test_models_and_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    client = await client_of(engine)
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).max_model_len == 1024
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt")
    chat = (await post(engine, "/tokenize", {"model": "policy", "messages": HI})).json()
    assert chat["tokens"] == engine.tokenizer.apply_chat_template(
        HI, add_generation_prompt=True, return_dict=False
    )
    assert (chat["count"], chat["max_model_len"], chat["token_strs"]) == (len(chat["tokens"]), 1024, None)
    plain = (await post(engine, "/tokenize", {"prompt": "ab", "return_token_strs": True})).json()
    assert plain["token_strs"] == ["a", "b"]
    assert (await post(engine, "/detokenize", {"tokens": plain["tokens"]})).json() == {"prompt": "ab"}
    for path, body in (
        ("/detokenize", {"tokens": [-1]}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"messages": HI, "foo": 1}),
    ):
        assert (await post(engine, path, body)).status_code == 400


async def test_tools_count_when_a_chat_is_tokenized(make_engine: MakeEngine) -> None:
    engine = make_engine()
    restyle(engine, HERMES)
    with_tools = (await post(engine, "/tokenize", {"messages": HI, "tools": [TOOL]})).json()
    assert '"add"' in engine.tokenizer.decode(with_tools["tokens"])


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "3", [1], 3, '{"INVALID_JSON": "{"}'])
async def test_a_malformed_earlier_call_is_shown_as_text(make_engine: MakeEngine, arguments: Any) -> None:
    engine = make_engine()
    restyle(engine, HERMES)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "c", "content": "no"}]
    context = open_context()
    await ask(engine, messages=[*HI, *turns], max_tokens=1)
    shown = engine.tokenizer.decode(context.samples[0].prompt_ids.tolist())
    assert '"arguments": {"INVALID_JSON": ' in shown


async def test_thinking_blocks_of_an_answer_are_its_reasoning(make_engine: MakeEngine) -> None:
    engine = make_engine()
    restyle(engine, "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}")
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "four"}]
    context = open_context()
    await ask(engine, messages=[*HI, {"role": "assistant", "content": blocks}, *HI], max_tokens=1)
    assert "hm|four;" in engine.tokenizer.decode(context.samples[0].prompt_ids.tolist())
