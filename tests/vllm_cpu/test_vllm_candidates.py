"""Tokens that could have been sampled in vLLM: with them, plain transformers computes the same log-probs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from replayed_sampling import candidate_ids, reference_logprobs
from vllm_helpers import HI, TOLERANCE

from raylight.types import TokenSets

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
EXTRA = ("top_k", "min_p", "repetition_penalty", "min_tokens")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5, "temperature": 1.3},
    "min_p": {"min_p": 0.3},
    "all of them": {"top_p": 0.95, "top_k": 40, "min_p": 0.001, "temperature": 0.7},
    "little is excluded": {"top_p": 0.995, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "penalties and top_p": {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "top_p": 0.9},
    "a minimum length": {"min_tokens": 12, "top_p": 0.9},
}


@pytest_asyncio.fixture(loop_scope="session")
async def training(bench: Any) -> AsyncIterator[Any]:
    """The bench, with requests of rollouts that are trained."""
    bench.trains = True
    yield bench
    bench.trains = False


async def ask(bench: Any, **sampling: Any) -> Any:
    extra = {name: sampling[name] for name in EXTRA if name in sampling}
    plain = {name: value for name, value in sampling.items() if name not in EXTRA}
    return await bench.openai.chat.completions.create(
        model="policy", messages=HI, extra_body={"ignore_eos": True, **extra}, **{"max_tokens": 24, **plain}
    )


def check(bench: Any, model: Any, sample: Any, sampling: dict[str, Any]) -> TokenSets:
    """Compare the log-probs with plain transformers, and return the candidates."""
    candidates = TokenSets.join(sample.candidates)
    assert len(candidates) == len(sample.output_ids) > 0
    expected = reference_logprobs(
        model, sample.prompt_ids.tolist(), sample.output_ids, candidates, **sampling
    )
    assert sample.logprobs == pytest.approx(expected, abs=TOLERANCE)
    return candidates


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_the_candidates_give_the_logprobs_that_were_sampled_with(
    training: Any, sampling: dict[str, Any]
) -> None:
    answer = await ask(training, **sampling)
    candidates = check(training, training.reference(), training.sample, sampling)
    if "top_k" in sampling:
        sizes = [len(candidate_ids(candidates[i : i + 1], 1000)) for i in range(len(candidates))]
        assert max(sizes) <= sampling["top_k"]
    assert "sampling_mask" not in answer.choices[0].model_dump()
    assert answer.choices[0].logprobs is None


async def test_requests_of_one_step_keep_their_own(training: Any) -> None:
    """Some ask for log-probs, a schema, several choices or no truncation."""
    before = len(training.contexts)
    others = [{}, {"logprobs": True, "top_logprobs": 3}, {"n": 3}, {"max_tokens": 3}]
    each = [*SAMPLINGS.values(), *(other | {"top_p": 0.7} for other in others), *others]
    await asyncio.gather(*(ask(training, **sampling) for sampling in each))
    model = training.reference()
    for context in training.contexts[before:]:
        for sample in context.samples.values():
            if sample.keeps_candidates:
                check(training, model, sample, dict(sample.sampling))
            else:
                assert not sample.candidates
    kept = [s.keeps_candidates for c in training.contexts[before:] for s in c.samples.values()]
    assert (kept.count(True), kept.count(False)) == (len(SAMPLINGS) + 6, 6)


async def test_a_rollout_that_is_not_trained_records_none(bench: Any) -> None:
    await ask(bench, top_p=0.8)
    assert not bench.sample.candidates


async def test_a_client_cannot_ask_for_them(bench: Any) -> None:
    await bench.openai.chat.completions.create(
        model="policy",
        messages=HI,
        max_tokens=4,
        top_p=0.5,
        extra_body={"vllm_xargs": {"raylight_candidates": 1}},
    )
    assert not bench.sample.candidates
