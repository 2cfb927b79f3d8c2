"""The engine on a tiny random model: what it samples is what plain transformers computes, whatever else runs."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from unit_helpers import within

from raylight.errors import WeightSyncError
from raylight.serving.engine import RequestError, Sampled, SamplingParams
from raylight.serving.transformers_engine import TransformersEngine

MakeEngine = Callable[..., TransformersEngine]
GREEDY = SamplingParams(12, temperature=0.0)


@pytest.fixture(scope="session")
def plain(tied_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()


@torch.inference_mode()
def logprobs_of(module: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    logits = module(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()


def prompts(count: int, longest: int = 300, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.choice([1, 2, 7, 40, longest]))] for _ in range(count)]


async def generate_all(engine: TransformersEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[Sampled]:
    async with within(30):
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in requests))


async def check_greedy(engine: TransformersEngine, module: Any, prompt: list[int]) -> None:
    """The engine's most probable tokens are those of a plain module, with its log-probabilities."""
    (sampled,) = await generate_all(engine, [(prompt, GREEDY)])
    assert sampled.logprobs == pytest.approx(logprobs_of(module, prompt, sampled.output_ids), abs=1e-4)
    with torch.inference_mode():
        best = module(torch.tensor([prompt + sampled.output_ids])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    assert sampled.output_ids == best


class Brake:
    """Holds the engine's thread in its nth forward pass until it is let go."""

    def __init__(self, engine: TransformersEngine, at: int) -> None:
        self.passes, self._at = 0, at
        self._loop, self.reached, self._go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        engine._module.register_forward_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.passes += 1
        if self.passes == self._at:
            self._loop.call_soon_threadsafe(self.reached.set)
            self._go.wait(10)

    def let_go(self) -> None:
        self._go.set()


@pytest.mark.parametrize("slots", [40, 7], ids=["all at once", "more requests than slots"])
async def test_logprobs_equal_plain_transformers(make_engine: MakeEngine, plain: Any, slots: int) -> None:
    engine, draw = make_engine(slots=slots), random.Random(1)
    requests = [(p, SamplingParams(draw.randint(1, 30), temperature=draw.choice([1.0, 0.7, 1.5]))) for p in prompts(40)]
    for (prompt, params), sampled in zip(requests, await generate_all(engine, requests), strict=True):
        expected = logprobs_of(plain, prompt, sampled.output_ids, params.temperature)
        assert sampled.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(sampled.output_ids) == len(sampled.weight_versions) <= params.max_tokens
        assert set(sampled.weight_versions) == {0}


async def test_greedy_equals_plain_generation(make_engine: MakeEngine, plain: Any) -> None:
    chosen = prompts(8, longest=120, seed=2)
    results = await generate_all(make_engine(), [(p, SamplingParams(20, temperature=0.0)) for p in chosen])
    for prompt, sampled in zip(chosen, results, strict=True):
        ids = torch.tensor([prompt])
        whole = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert sampled.output_ids == whole[0, len(prompt) :].tolist()


async def test_a_seed_reproduces_whatever_else_runs(make_engine: MakeEngine) -> None:
    mine = (prompts(1, seed=3)[0], SamplingParams(20, seed=7))
    (alone,) = await generate_all(make_engine(seed=1), [mine])
    others = [(p, SamplingParams(15)) for p in prompts(10, seed=4)]
    *_, beside = await generate_all(make_engine(seed=2), [*others, mine])
    assert beside.output_ids == alone.output_ids


async def test_the_engines_seed_reproduces_and_another_one_differs(make_engine: MakeEngine) -> None:
    request = [([1, 2, 3], SamplingParams(20))]
    first, again, other = [(await generate_all(make_engine(seed=s), request))[0].output_ids for s in (5, 5, 6)]
    assert first == again != other


async def test_a_response_ends_at_max_tokens_or_right_after_the_end_token(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=40)
    results = await generate_all(engine, [([i], SamplingParams(40, temperature=2.0)) for i in range(60)])
    end = engine.tokenizer.eos_token_id
    assert {r.finish_reason for r in results} == {"stop", "length"}
    for result in results:
        assert end not in result.output_ids[:-1]
        if result.finish_reason == "stop":
            assert result.output_ids[-1] == end
        else:
            assert len(result.output_ids) == 40
            assert result.output_ids[-1] != end


async def test_a_response_ends_with_the_token_that_completes_a_stop_string(make_engine: MakeEngine) -> None:
    engine, request = make_engine(), SamplingParams(60, temperature=2.0, seed=1)
    (free,) = await generate_all(engine, [([65], request)])
    token = next(t for t in free.output_ids[3:] if t < 94)  # an ASCII letter: one token, one letter
    first, letter = free.output_ids.index(token), engine.tokenizer.decode([token])
    assert letter.isascii()
    params = SamplingParams(60, temperature=2.0, seed=1, stop=("no such text", letter))
    (stopped,) = await generate_all(engine, [([65], params)])
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert stopped.finish_reason == "stop"


async def test_max_tokens_never_leads_beyond_the_models_length(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=20)
    results = await generate_all(engine, [([1] * n, SamplingParams(100, temperature=0.0)) for n in (1, 10, 19)])
    assert [len(r.output_ids) for r in results if r.finish_reason == "length"] == [
        20 - n for n, r in zip((1, 10, 19), results, strict=True) if r.finish_reason == "length"
    ]
    assert len(results[2].output_ids) == 1


async def test_the_models_own_length_limits_the_asked_one(make_engine: MakeEngine) -> None:
    assert make_engine(max_model_len=10**6).max_model_len == 1024


@pytest.mark.parametrize(("prompt", "message"), [([], "empty"), ([1] * 20, "20 tokens"), ([1] * 50, "at most 19")])
async def test_a_prompt_that_leaves_no_room_is_refused(make_engine: MakeEngine, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await make_engine(max_model_len=20).generate(prompt, GREEDY)
    assert caught.value.status == 400


async def test_too_many_waiting_requests_are_refused_and_the_others_answered(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2, max_waiting=3)
    async with within():
        results = await asyncio.gather(*(engine.generate([i + 1], GREEDY) for i in range(9)), return_exceptions=True)
    refused = [r for r in results if isinstance(r, RequestError)]
    assert len(refused) == 4
    assert {r.status for r in refused} == {503}
    await generate_all(engine, [([1], GREEDY)] * 5)  # there is room again


async def test_cancelling_a_call_frees_its_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=1, max_waiting=1)
    brake = Brake(engine, at=3)
    never_ends = SamplingParams(1000, temperature=0.0)
    async with within():
        long = asyncio.create_task(engine.generate([5], never_ends))
        await brake.reached.wait()
        long.cancel()
        await asyncio.wait([long])
        brake.let_go()
        await engine.generate([6], SamplingParams(2, temperature=0.0))
    assert brake.passes <= 7


async def test_cancelling_a_waiting_call_takes_it_out_of_the_queue(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=1, max_waiting=2)
    brake = Brake(engine, at=2)
    async with within():
        active = asyncio.create_task(engine.generate([5], SamplingParams(4, temperature=0.0)))
        await brake.reached.wait()
        waiting = asyncio.create_task(engine.generate([6], SamplingParams(500, temperature=0.0)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        brake.let_go()
        await active
        await engine.generate([7], SamplingParams(2, temperature=0.0))
    assert brake.passes <= 8


async def test_a_pass_that_fails_is_an_error_of_its_callers_and_the_engine_goes_on(make_engine: MakeEngine, plain: Any) -> None:
    engine = make_engine()
    async with within(1):
        with pytest.raises(IndexError):
            await engine.generate([99_999], GREEDY)  # no such token, so the forward pass fails
    await check_greedy(engine, plain, [1, 2, 3])


# weights


def other_weights(path: str, seed: int = 9) -> tuple[dict[str, Any], Any]:
    """Weights unlike the model's, and a plain module that has them."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}, module


@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
async def test_after_loading_the_engine_computes_with_the_new_weights(
    make_engine: MakeEngine, request: pytest.FixtureRequest, model: str
) -> None:
    path = request.getfixturevalue(model)
    weights, module = other_weights(path)
    engine = make_engine(path)
    await engine.load_weights(3, weights)
    await check_greedy(engine, module, [1, 2, 3])
    (sampled,) = await generate_all(engine, [([1], GREEDY)])
    assert set(sampled.weight_versions) == {3}


async def test_a_tied_output_layer_need_not_be_sent(make_engine: MakeEngine, tied_model: str) -> None:
    weights, module = other_weights(tied_model)
    del weights["lm_head.weight"]
    engine = make_engine()
    await engine.load_weights(1, weights)
    await check_greedy(engine, module, [4, 5, 6])


async def test_weights_loaded_in_flight_change_the_version_between_two_tokens(make_engine: MakeEngine, tied_model: str) -> None:
    weights, module = other_weights(tied_model)
    engine = make_engine()
    brake = Brake(engine, at=10)
    async with within():
        running = [asyncio.create_task(engine.generate([i], SamplingParams(30, temperature=0.0))) for i in range(1, 9)]
        await brake.reached.wait()
        loading = asyncio.create_task(engine.load_weights(1, weights))
        await asyncio.sleep(0)
        brake.let_go()
        await loading
        results = await asyncio.gather(*running)
    assert any(set(r.weight_versions) == {0, 1} for r in results)
    for result in results:
        assert result.weight_versions == sorted(result.weight_versions)
        assert len(result.weight_versions) == len(result.output_ids)
        assert result.weight_versions.count(0) <= 10
    await check_greedy(engine, module, [1, 2, 3])


def change(weights: dict[str, Any], how: str) -> dict[str, Any]:
    last = list(weights)[-2]  # so that others come before it
    if how == "missing":
        return {name: array for name, array in weights.items() if name != last}
    if how == "unknown":
        return {**weights, "model.nowhere.weight": weights[last]}
    return {**weights, last: weights[last][..., :-1]}


@pytest.mark.parametrize("how", ["missing", "unknown", "another shape"])
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    make_engine: MakeEngine, tied_model: str, plain: Any, how: str
) -> None:
    weights, _ = other_weights(tied_model)
    engine = make_engine()
    with pytest.raises(WeightSyncError):
        await engine.load_weights(1, change(weights, how))
    assert engine.version == 0
    await check_greedy(engine, plain, [1, 2, 3])


# the end


async def test_closing_ends_those_who_wait_and_those_who_run(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    brake = Brake(engine, at=3)
    async with within():
        calls = [asyncio.create_task(engine.generate([i], SamplingParams(500, temperature=0.0))) for i in range(1, 6)]
        await brake.reached.wait()
        brake.let_go()
        engine.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, RequestError) and r.status == 503 for r in results)


async def test_a_closed_engine_refuses_instead_of_hanging(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.close()
    async with within(1):
        with pytest.raises(RequestError):
            await engine.generate([1], GREEDY)


async def test_weights_for_a_closed_engine_are_refused_instead_of_hanging(make_engine: MakeEngine, tied_model: str) -> None:
    engine = make_engine()
    engine.close()
    async with within(1):
        with pytest.raises((WeightSyncError, RequestError)):
            await engine.load_weights(1, other_weights(tied_model)[0])
