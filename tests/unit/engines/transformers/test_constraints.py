"""Records of constrained responses: log-probs of the policy alone, and the number of allowed tokens."""

from typing import Any

import pytest
import torch
from transformers_helpers import MakeEngine, generate_all, logprobs_of, open_context

from raylight.engines.capture_context import Sample
from raylight.engines.transformers.sampling import SamplingParams
from unit.engines.transformers.test_app import ask
from unit.engines.transformers.test_engine import plain as plain
from unit.engines.transformers.test_tools import AS_JSON

PROMPT = [1, 2, 3]


def distributions(module: Any, sample: Sample, temperature: float) -> torch.Tensor:
    """The policy's log-probs of all tokens at each position of a response."""
    ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.output_ids]])
    with torch.no_grad():
        logits = module(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


async def sampled(engine: Any, **params: Any) -> Sample:
    (sample,) = await generate_all(engine, [(PROMPT, SamplingParams(**{"max_tokens": 12, **params}))])
    return sample


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_a_schemas_tokens_have_the_logprobs_of_the_policy(
    make_engine: MakeEngine, plain: Any, temperature: float
) -> None:
    context = open_context()
    await ask(make_engine(), response_format=AS_JSON, max_tokens=400, temperature=temperature, seed=3)
    sample = context.samples[0]
    heat = temperature or 1.0
    expected = logprobs_of(plain, sample.prompt_ids.tolist(), sample.output_ids, heat)
    assert sample.policy_logprobs == pytest.approx(expected, abs=1e-4)
    assert len(sample.allowed) == len(sample.output_ids)
    assert sample.allowed.count(1) >= 1  # the first is "{" in any case
    assert max(sample.allowed) > 1
    for allowed, logprob, policy in zip(sample.allowed, sample.logprobs, sample.policy_logprobs, strict=True):
        assert logprob >= policy - 1e-5  # the allowed tokens share the whole probability
        assert allowed != 1 or logprob == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "constraint",
    [
        {"min_tokens": 12},
        {"logit_bias": ((5, 3.0), (6, -100.0))},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.7},
        {"logit_bias": ((5, 3.0),), "top_k": 3},
    ],
    ids=lambda constraint: "+".join(constraint),
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_other_constraints_are_recorded_too(
    make_engine: MakeEngine, plain: Any, constraint: dict[str, Any], temperature: float
) -> None:
    sample = await sampled(make_engine(), temperature=temperature, seed=1, **constraint)
    policy = distributions(plain, sample, temperature)
    tokens = torch.tensor(sample.output_ids)[:, None]
    assert sample.policy_logprobs == pytest.approx(policy.gather(-1, tokens)[:, 0].tolist(), abs=1e-4)
    vocabulary = policy.shape[-1]
    assert set(sample.allowed) <= {0, vocabulary, vocabulary - 1, 3}
    changed = [abs(a - b) > 1e-4 for a, b in zip(sample.logprobs, sample.policy_logprobs, strict=True)]
    assert all(allowed for allowed, differs in zip(sample.allowed, changed, strict=True) if differs)
    assert any(changed)


async def test_a_constraint_that_is_not_in_force_yet_is_none(make_engine: MakeEngine) -> None:
    """A presence penalty has no effect on the first token, min_tokens none on the last."""
    assert (await sampled(make_engine(), presence_penalty=1.5)).allowed[0] == 0
    held = await sampled(make_engine(), min_tokens=3, seed=1)
    assert [bool(count) for count in held.allowed[:4]] == [True, True, True, False]


async def test_responses_without_a_constraint_have_no_such_record(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free, biased = await generate_all(
        engine,
        [(PROMPT, SamplingParams(8)), (PROMPT, SamplingParams(8, logit_bias=((5, 2.0),)))],
    )
    assert (free.allowed, free.policy_logprobs) == ([], [])
    assert len(biased.allowed) == len(biased.output_ids)
    truncated = await sampled(engine, top_k=2)
    assert truncated.allowed == []
