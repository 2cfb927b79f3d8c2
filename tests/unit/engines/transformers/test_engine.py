"""The engine on a tiny random model samples what plain transformers computes, under any other load."""

import asyncio
import dataclasses
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers_helpers import (
    GREEDY,
    Brake,
    MakeEngine,
    check_greedy,
    generate_all,
    logprobs_of,
    open_context,
)
from unit_helpers import within

from raylight.engines.protocol import EngineLoad
from raylight.engines.transformers.sampling import SamplingParams
from raylight.http.errors import RequestError
from raylight.weights.starts import derive_seed


@pytest.fixture(scope="session")
def plain(tied_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()


def prompts(count: int, longest: int = 300, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.choice([1, 2, 7, 40, longest]))] for _ in range(count)]


@pytest.mark.parametrize("slots", [40, 7], ids=["all at once", "more requests than slots"])
async def test_logprobs_equal_plain_transformers(make_engine: MakeEngine, plain: Any, slots: int) -> None:
    engine, draw = make_engine(slots=slots), random.Random(1)
    requests = [
        (p, SamplingParams(draw.randint(1, 30), temperature=draw.choice([1.0, 0.7, 1.5])))
        for p in prompts(40)
    ]
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
    *_, batched = await generate_all(make_engine(seed=2), [*others, mine])
    assert batched.output_ids == alone.output_ids


async def test_the_engines_seed_reproduces_and_another_one_differs(make_engine: MakeEngine) -> None:
    request = [([1, 2, 3], SamplingParams(20))]
    first, again, other = [
        (await generate_all(make_engine(seed=s), request))[0].output_ids for s in (5, 5, 6)
    ]
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
    results = await generate_all(
        engine, [([1] * n, SamplingParams(100, temperature=0.0)) for n in (1, 10, 19)]
    )
    assert [len(r.output_ids) for r in results if r.finish_reason == "length"] == [
        20 - n for n, r in zip((1, 10, 19), results, strict=True) if r.finish_reason == "length"
    ]
    assert len(results[2].output_ids) == 1


async def test_a_budget_limits_the_asked_tokens(make_engine: MakeEngine) -> None:
    context, engine = open_context(), make_engine()
    context.max_tokens = 3
    sampled = await engine.generate([5], SamplingParams(1000, ignore_eos=True))
    assert (len(sampled.output_ids), sampled.finish_reason) == (3, "length")


async def test_the_models_own_length_limits_the_asked_one(make_engine: MakeEngine) -> None:
    assert make_engine(max_model_len=10**6).max_model_len == 1024


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "empty"), ([1] * 20, "20 tokens"), ([1] * 50, "is 20 tokens.*50 tokens")]
)
async def test_a_prompt_that_leaves_no_room_is_refused(
    make_engine: MakeEngine, prompt: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await make_engine(max_model_len=20).generate(prompt, GREEDY)
    assert caught.value.status == 400


async def test_too_many_waiting_requests_are_refused_and_the_others_answered(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2, max_waiting=3)
    async with within():
        results = await asyncio.gather(
            *(engine.generate([i + 1], GREEDY) for i in range(9)), return_exceptions=True
        )
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
        brake.release()
        await engine.generate([6], SamplingParams(2, temperature=0.0))
    assert brake.passes <= 7


async def test_the_load_counts_running_and_waiting_requests_and_the_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2, max_model_len=50)
    assert engine.load() == EngineLoad(capacity=100)
    brake = Brake(engine, at=3)
    async with within():
        calls = [asyncio.create_task(engine.generate([5] * 8, SamplingParams(20))) for _ in range(5)]
        await brake.reached.wait()
        load = engine.load()
        brake.release()
        await asyncio.gather(*calls)
    assert (load.running, load.waiting, load.preemptions, load.paused) == (2, 3, 0, False)
    assert 0.16 <= load.kv_use <= 0.24  # two prompts, and up to four tokens each
    await engine.start_weight_update()
    assert engine.load() == EngineLoad(capacity=100, paused=True)
    await engine.abort_weight_update()
    assert not engine.load().paused


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
        brake.release()
        await active
        await engine.generate([7], SamplingParams(2, temperature=0.0))
    assert brake.passes <= 8


async def test_a_pass_that_fails_is_an_error_of_its_callers_and_the_engine_goes_on(
    make_engine: MakeEngine, plain: Any
) -> None:
    engine = make_engine()

    def fail(*args: Any) -> None:
        raise IndexError("broken")

    hook = engine._decoder.module.register_forward_pre_hook(fail)
    async with within():
        with pytest.raises(RequestError, match="IndexError: broken") as caught:
            await engine.generate([1], GREEDY)
    assert caught.value.status == 500
    hook.remove()
    await check_greedy(engine, plain, [1, 2, 3])


@pytest.mark.parametrize("wrong", [320, 10**30, -1])
async def test_tokens_that_there_are_not_are_refused(make_engine: MakeEngine, wrong: int) -> None:
    with pytest.raises(RequestError, match="between 0 and 319"):
        await make_engine().generate([1, wrong], GREEDY)


async def test_min_tokens_and_ignore_eos_hold_off_the_end(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=40)
    end = engine.tokenizer.eos_token_id
    late = await generate_all(
        engine, [([i], SamplingParams(40, temperature=2.0, min_tokens=15)) for i in range(60)]
    )
    assert min(len(r.output_ids) for r in late) >= 15
    assert {r.finish_reason for r in late} == {"stop", "length"}
    never = await generate_all(
        engine, [([i], SamplingParams(40, temperature=2.0, ignore_eos=True)) for i in range(60)]
    )
    assert {len(r.output_ids) for r in never} == {40}
    assert any(end in r.output_ids for r in never)


async def test_a_stop_token_ends_a_response_which_includes_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    whole = (await engine.generate([5], SamplingParams(20, temperature=0.0, ignore_eos=True))).output_ids
    token = whole[6]
    place = whole.index(token)
    params = SamplingParams(20, temperature=0.0, ignore_eos=True, stop_token_ids=(token,))
    stopped = await engine.generate([5], params)
    assert (stopped.output_ids, stopped.finish_reason) == (whole[: place + 1], "stop")
    later = await engine.generate([5], dataclasses.replace(params, min_tokens=place + 1))
    assert len(later.output_ids) > place + 1
    assert token not in later.output_ids[: place + 1]


# recording in the capture context


async def test_the_samples_of_a_request_are_those_of_its_context(make_engine: MakeEngine) -> None:
    context = open_context()
    engine = make_engine()
    params = SamplingParams(5, temperature=0.5, top_p=0.9, seed=3, stop=("zz",))
    with engine.begin([[1, 2], [3]], [params, params]) as choices:
        await choices.end()
    assert [s.sample for s in choices.sequences] == [context.samples[0], context.samples[1]]
    assert context.samples[1].prompt_ids.tolist() == [3]
    told = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["zz"]}
    assert context.samples[0].sampling == told
    for sample in context.samples.values():
        assert len(sample.output_ids) == len(sample.logprobs) == len(sample.weight_versions) > 0
        assert sample.finish_reason in ("stop", "length")


async def test_a_cancelled_request_leaves_its_tokens_as_aborted(make_engine: MakeEngine) -> None:
    context, engine = open_context(), make_engine()
    brake = Brake(engine, at=4)
    async with within():
        call = asyncio.create_task(engine.generate([5], SamplingParams(1000, ignore_eos=True)))
        await brake.reached.wait()
        call.cancel()
        await asyncio.wait([call])
        brake.release()
        await engine.check_health()
    sample = context.samples[0]
    assert sample.finish_reason == "aborted"
    assert len(sample.output_ids) == len(sample.weight_versions) == 3


async def test_a_sample_is_whole_once_it_is_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine()
    brake = Brake(engine, at=4)
    async with within():
        with engine.begin([[5]], [SamplingParams(1000, ignore_eos=True)]) as choices:
            await brake.reached.wait()
        (sequence,) = choices.sequences
        seen = list(sequence.sample.output_ids)
        brake.release()
        await engine.generate([6], GREEDY)  # by then the step that was under way is over
    assert sequence.sample.output_ids == seen
    assert len(seen) == 3


async def test_the_log_probabilities_of_given_tokens(make_engine: MakeEngine, plain: Any) -> None:
    ids = prompts(1, seed=3)[0] + [7, 8]
    async with within():
        told = await make_engine().logprobs(ids)
    assert told == pytest.approx(logprobs_of(plain, ids[:1], ids[1:]), abs=1e-4)


async def test_the_most_probable_tokens_in_the_place_of_given_ones(
    make_engine: MakeEngine, plain: Any
) -> None:
    ids = prompts(1, seed=3)[0] + [7, 8]
    async with within():
        tops = await make_engine().top_logprobs(ids, 3, temperature=0.7)
    with torch.no_grad():
        expected = (plain(torch.tensor([ids])).logits[0, :-1] / 0.7).log_softmax(-1).topk(3)
    assert tops.ids.tolist() == expected.indices.tolist()
    assert tops.logprobs == pytest.approx(expected.values.numpy(), abs=1e-5)


async def test_sleep_on_a_cpu_says_that_it_does_nothing(make_engine: MakeEngine, plain: Any) -> None:
    engine = make_engine()
    assert "only on a GPU" in (await engine.sleep() or "")
    await check_greedy(engine, plain, [1, 2, 3])


async def test_requests_wait_while_the_engine_sleeps(make_engine: MakeEngine, plain: Any) -> None:
    engine = make_engine()
    brake = Brake(engine, at=3)

    def sleep() -> None:
        engine._worker.recompute()
        engine._decoder.offload()
        engine._worker.asleep = True

    async with within():
        running = asyncio.create_task(engine.generate([5], GREEDY))
        await brake.reached.wait()
        sleeping = asyncio.create_task(engine._run(sleep))
        await asyncio.sleep(0)
        brake.release()
        await sleeping
        later = asyncio.create_task(engine.generate([6], GREEDY))
        await engine._run(lambda: None)  # the later request has been taken up
        assert not running.done()
        assert not later.done()
        assert brake.passes == 3
        await engine.wake()
        found = [await running, await later]
    for prompt, sample in zip(([5], [6]), found, strict=True):
        assert sample.logprobs == pytest.approx(logprobs_of(plain, prompt, sample.output_ids), abs=1e-4)


# the end


async def test_closing_ends_those_who_wait_and_those_who_run(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    brake = Brake(engine, at=3)
    async with within():
        calls = [
            asyncio.create_task(engine.generate([i], SamplingParams(500, temperature=0.0)))
            for i in range(1, 6)
        ]
        await brake.reached.wait()
        brake.release()
        engine.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, RequestError) and r.status == 503 for r in results)


async def test_a_closed_engine_refuses_instead_of_hanging(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.close()
    async with within():
        with pytest.raises(RequestError):
            await engine.generate([1], GREEDY)


async def test_a_closed_engine_is_not_healthy(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.check_health()
    engine.close()
    with pytest.raises(RequestError):
        await engine.check_health()


async def test_two_replicas_give_no_identical_responses_in_a_group(make_engine: MakeEngine) -> None:
    seeds = [derive_seed(0, stream) for stream in ("0", "1")]
    group = [(prompts(1)[0], SamplingParams(16, temperature=2.0))] * 16
    one, other = [await generate_all(make_engine(seed=seed), group) for seed in seeds]
    responses = {tuple(sampled.output_ids) for sampled in [*one, *other]}
    assert len(responses) == 32
