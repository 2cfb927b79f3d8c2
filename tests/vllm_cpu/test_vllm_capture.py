"""Capture of requests to vLLM's own application."""

import json
from typing import Any

import pytest
from vllm_helpers import HI, TOLERANCE, abandon, difference

from raylight.types.request_fields import LABELS

RECORDED = "raylight_recorded"
TOKENS = {"return_token_ids": True}
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def test_chat_is_captured_token_for_token(bench: Any) -> None:
    answer = await bench.openai.chat.completions.create(model="policy", messages=HI, max_tokens=24)
    sample = bench.sample
    assert sample.prompt_ids.tolist() == bench.engine.tokenizer.apply_chat_template(
        HI, add_generation_prompt=True, return_dict=False
    )
    assert len(sample.output_ids) == answer.usage.completion_tokens
    assert sample.finish_reason == answer.choices[0].finish_reason
    assert sample.sampling["temperature"] == 1.0
    assert difference(bench.reference(), sample).max() < TOLERANCE
    assert answer.choices[0].logprobs is None, "asked for by the capture, not by the agent"


async def test_logprobs_are_of_the_distribution_sampled_from(bench: Any) -> None:
    await bench.openai.chat.completions.create(model="policy", messages=HI, max_tokens=24, temperature=0.5)
    assert bench.sample.sampling["temperature"] == 0.5
    assert difference(bench.reference(), bench.sample, temperature=0.5).max() < TOLERANCE


async def test_logprobs_that_the_agent_asked_for_are_answered_as_captured(bench: Any) -> None:
    answer = await bench.openai.chat.completions.create(
        model="policy", messages=HI, max_tokens=8, logprobs=True, top_logprobs=3
    )
    expected = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in expected] == pytest.approx(bench.sample.logprobs, abs=1e-5)
    assert {len(entry.top_logprobs) for entry in expected} == {3}


@pytest.mark.parametrize("options", [{"logprobs": True}, {"response_format": {"type": "json_object"}}])
async def test_an_agent_cannot_send_the_mark_of_recorded_requests(bench: Any, options: dict) -> None:
    """The mark would make vLLM send numbers where arrays are expected."""
    answer = await bench.openai.chat.completions.create(
        model="policy",
        messages=HI,
        max_tokens=8,
        extra_body={"vllm_xargs": {RECORDED: 1, "own": 2}},
        **options,
    )
    assert len(bench.sample.logprobs) == answer.usage.completion_tokens
    if "logprobs" in options:
        assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


@pytest.mark.parametrize("requested", [None, 2, 24])
async def test_a_budget_limits_the_tokens_of_each_choice(bench: Any, requested: int | None) -> None:
    bench.max_tokens = 3
    try:
        limit = {} if requested is None else {"max_tokens": requested}
        answer = await bench.openai.chat.completions.create(
            model="policy", messages=HI, n=2, extra_body={"ignore_eos": True}, **limit
        )
    finally:
        bench.max_tokens = None
    samples = bench.context.samples.values()
    assert [len(sample.output_ids) for sample in samples] == [min(requested or 3, 3)] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


async def test_a_stream_is_captured(bench: Any) -> None:
    stream = await bench.openai.chat.completions.create(
        model="policy", messages=HI, max_tokens=24, stream=True, seed=3, extra_body=TOKENS
    )
    chunks = [chunk async for chunk in stream]
    assert [
        token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []
    ] == bench.sample.output_ids
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert difference(bench.reference(), bench.sample).max() < TOLERANCE
    whole = await bench.openai.chat.completions.create(model="policy", messages=HI, max_tokens=24, seed=3)
    assert whole.choices[0].message.content == text
    assert bench.contexts[-2].samples[0].output_ids == bench.sample.output_ids
    assert bench.sample.sampling["seed"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_n_choices_is_captured(bench: Any, stream: bool) -> None:
    answer = await bench.openai.chat.completions.create(
        model="policy", messages=HI, max_tokens=12, n=3, stream=stream, extra_body=TOKENS
    )
    expected: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for part in [part async for part in answer] if stream else [answer]:
        for choice in part.choices:
            expected[choice.index] += getattr(choice, "token_ids", None) or []
    samples = bench.context.samples
    assert {index: sample.output_ids for index, sample in samples.items()} == expected
    assert len({tuple(sample.output_ids) for sample in samples.values()}) == 3
    for sample in samples.values():
        assert difference(bench.reference(), sample).max() < TOLERANCE


async def test_each_prompt_of_completions_is_captured(bench: Any) -> None:
    answer = await bench.openai.completions.create(
        model="policy", prompt=["one", "two", "three"], max_tokens=4, n=2, extra_body=TOKENS
    )
    samples = bench.context.samples
    assert sorted(samples) == list(range(6))
    decode = bench.engine.tokenizer.decode
    for choice in answer.choices:
        sample = samples[choice.index]
        assert decode(sample.prompt_ids.tolist()) == ["one", "two", "three"][choice.index // 2]
        assert sample.output_ids == choice.token_ids


async def test_temperature_0_samples_the_most_likely_token(bench: Any) -> None:
    for _ in range(2):
        await bench.openai.chat.completions.create(model="policy", messages=HI, max_tokens=12, temperature=0)
    assert bench.contexts[-1].samples[0].output_ids == bench.contexts[-2].samples[0].output_ids
    assert difference(bench.reference(), bench.sample).max() < TOLERANCE, "at temperature 1"


async def test_a_stop_string_ends_the_answer_with_all_its_tokens_captured(bench: Any) -> None:
    whole = await bench.openai.chat.completions.create(
        model="policy", messages=HI, max_tokens=24, temperature=0
    )
    ids = bench.sample.output_ids
    stop = next(
        letter for letter in whole.choices[0].message.content[3:] if letter.isascii() and letter.isprintable()
    )
    cut = await bench.openai.chat.completions.create(
        model="policy", messages=HI, max_tokens=24, temperature=0, stop=[stop]
    )
    assert cut.choices[0].message.content == whole.choices[0].message.content.split(stop)[0]
    assert cut.choices[0].finish_reason == bench.sample.finish_reason == "stop"
    count = len(bench.sample.output_ids)
    assert count < len(ids)
    assert bench.sample.output_ids == ids[:count]
    assert stop in bench.engine.tokenizer.decode(ids[:count])


def no_blanks(bench: Any) -> dict[str, int]:
    """Logit bias against white space, which JSON allows everywhere and a random model samples often."""
    return {str(token): -100 for token in bench.engine.tokenizer.encode(" \t\n\r")}


async def test_a_tool_is_called(bench: Any) -> None:
    answer = await bench.openai.chat.completions.create(
        model="policy",
        messages=HI,
        tools=[TOOL],
        max_tokens=100,
        logit_bias=no_blanks(bench),
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert '"Paris"' in bench.engine.tokenizer.decode(bench.sample.output_ids)
    assert max(bench.sample.logprobs) <= 0


async def test_an_answer_follows_a_json_schema(bench: Any) -> None:
    schema = {"name": "answer", "strict": True, "schema": TOOL["function"]["parameters"]}
    answer = await bench.openai.chat.completions.create(
        model="policy",
        messages=HI,
        max_tokens=100,
        logit_bias=no_blanks(bench),
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert json.loads(answer.choices[0].message.content) == {"city": "Paris"}
    assert bench.sample.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_prompt_is_used_unchanged(bench: Any, stream: bool) -> None:
    prompt = [300, 301, *b"spliced"]
    body = {
        "model": "policy",
        "messages": HI,
        "max_tokens": 4,
        "stream": stream,
        "kv_transfer_params": {"prompt_token_ids": prompt},
    }
    answer = await bench.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert bench.sample.prompt_ids.tolist() == prompt
    assert difference(bench.reference(), bench.sample).max() < TOLERANCE


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_sampled_before_a_disconnect_are_captured(bench: Any, stream: bool) -> None:
    await abandon(bench, stream)
    sample = bench.sample
    assert sample.finish_reason == "aborted"
    assert 5 < len(sample.output_ids) < 400
    assert difference(bench.reference(), sample).max() < TOLERANCE


async def test_beam_search_is_rejected(bench: Any) -> None:
    body = {"model": "policy", "messages": HI, "max_tokens": 4, "use_beam_search": True, "n": 2}
    answer = await bench.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert "cannot be recorded" in answer.text


@pytest.mark.parametrize(
    ("path", "wrong", "named"),
    [
        (
            "chat/completions",
            {"unheard": 1, "of": None},
            "supported; unheard: this field is not",
        ),
        ("completions", {"best_of": 3}, "best_of"),
        ("chat/completions", {"prompt": "a"}, "prompt"),
        ("chat/completions", {"functions": []}, "functions"),
        ("chat/completions", {"modalities": ["audio"]}, "modalities: "),
        (
            "chat/completions",
            {str(i): 1 for i in range(10_000)},
            "supported; 1: this field",
        ),
        ("completions", {"n": 100_000}, "n: "),
        ("completions", {"n": 500, "prompt": ["a"] * 500}, "250000"),
    ],
)
async def test_requests_that_vllm_would_ignore_or_never_serve_are_rejected(
    bench: Any, path: str, wrong: dict[str, Any], named: str
) -> None:
    base = {"messages": HI} if path == "chat/completions" else {"prompt": "a"}
    answer = await bench.http.post(f"/v1/{path}", json={"model": "policy", "max_tokens": 2, **base, **wrong})
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]
    assert len(answer.text) < 5_000
    assert not bench.context.samples


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_beyond_the_context_is_that_of_the_context(bench: Any, name: str) -> None:
    answer = await bench.openai.chat.completions.create(
        model="policy", messages=HI, temperature=1.0, **{name: 64_000}
    )
    total = answer.usage.total_tokens
    assert answer.choices[0].finish_reason == "stop" or total == bench.engine.max_model_len


async def test_a_budget_of_thinking_that_vllm_cannot_enforce_is_dropped(bench: Any) -> None:
    answer = await bench.openai.chat.completions.create(
        model="policy", messages=HI, max_tokens=2, extra_body={"thinking_token_budget": 9}
    )
    assert answer.usage.completion_tokens <= 2


async def test_labels_without_effect_are_accepted(bench: Any) -> None:
    labels = dict.fromkeys(LABELS, "x")
    answer = await bench.openai.chat.completions.create(
        model="policy", messages=HI, max_tokens=2, extra_body=labels
    )
    assert len(bench.sample.output_ids) == answer.usage.completion_tokens


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b'{"model": "policy"}'])
async def test_vllm_itself_rejects_malformed_requests(bench: Any, content: bytes) -> None:
    answer = await bench.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert 400 <= answer.status_code < 500


async def test_nothing_is_recorded_without_a_capture_context(bench: Any) -> None:
    import httpx

    before = len(bench.contexts)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(bench.bare), base_url="http://engine"
    ) as client:
        answer = await client.post(
            "/v1/chat/completions", json={"model": "policy", "messages": HI, "max_tokens": 2}
        )
    assert answer.status_code == 200
    assert len(bench.contexts) == before


async def test_models_can_be_listed_and_looked_up(bench: Any) -> None:
    assert [card.id async for card in bench.openai.models.list()] == ["policy"]
    assert (await bench.openai.models.retrieve("policy")).id == "policy"
    assert (await bench.http.get("/v1/models/other")).status_code == 404


async def test_log_probs_of_given_tokens(bench: Any) -> None:
    from vllm_helpers import expected_logprobs

    ids = [300, *b"some text"]
    found = await bench.engine.logprobs(ids)
    assert found == pytest.approx(
        expected_logprobs(bench.reference(), ids[:1], ids[1:]).tolist(), abs=TOLERANCE
    )


async def test_sleep_returns_why_it_has_no_effect_on_a_cpu(bench: Any) -> None:
    assert "CPU" in await bench.engine.sleep()
    await bench.engine.wake()
    await bench.engine.check_health()
