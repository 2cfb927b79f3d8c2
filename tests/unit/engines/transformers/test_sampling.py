"""Sampling: each row has its own parameters, and log-probs of the distribution really sampled from."""

from typing import Any

import numpy as np
import pytest
import torch

from raylight.engines.transformers import sampling
from raylight.engines.transformers.sampling import SampledTokens, SamplingParams, adjust_logits, distribution

VOCABULARY = 12


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    generators: list[torch.Generator | None],
    shared: torch.Generator,
) -> SampledTokens:
    return sampling.draw(distribution(logits, params), params, generators, shared)


def draw(
    logits: torch.Tensor, params: list[SamplingParams], seed: int = 0, seeds: list[int | None] | None = None
) -> tuple:
    own = [None if s is None else torch.Generator().manual_seed(s) for s in seeds or [None] * len(params)]
    drawn = sample(logits, params, own, torch.Generator().manual_seed(seed))
    return torch.tensor(drawn.tokens), torch.tensor(drawn.logprobs)


def expected_logprobs(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Reference implementation of the processed distribution of one row."""
    scaled = logits / (p.temperature or 1.0)
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    kept = order[: p.top_k or len(order)]
    probabilities = torch.softmax(scaled[kept], 0)
    nucleus, reached = [], 0.0
    for token, probability in zip(kept, probabilities.tolist(), strict=True):
        if nucleus and (reached >= p.top_p or probability < p.min_p * probabilities.max()):
            break
        nucleus.append(token)
        reached += probability
    result = torch.full_like(scaled, -torch.inf)
    result[nucleus] = torch.log_softmax(scaled[nucleus], 0)
    return result


SETTINGS = [
    SamplingParams(1),
    SamplingParams(1, temperature=0.5),
    SamplingParams(1, temperature=1.7),
    SamplingParams(1, top_k=3),
    SamplingParams(1, top_p=0.8),
    SamplingParams(1, temperature=0.7, top_k=6, top_p=0.9),
    SamplingParams(1, top_p=1e-9),
    SamplingParams(1, top_k=1),
    SamplingParams(1, top_k=2**63),
    SamplingParams(1, temperature=0.0),
    SamplingParams(1, min_p=0.2),
    SamplingParams(1, temperature=1.5, min_p=0.05),
]


def test_temperature_zero_is_the_most_probable_token() -> None:
    logits = logits_of(50)
    tokens, _ = draw(logits, [SamplingParams(1, temperature=0.0)] * 50)
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params", [SamplingParams(1, top_k=1), SamplingParams(1, top_p=1e-9)], ids=["top_k=1", "tiny top_p"]
)
def test_keeping_one_token_leaves_the_most_probable_with_certainty(params: SamplingParams) -> None:
    logits = logits_of(50)
    tokens, logprobs = draw(logits, [params] * 50)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert logprobs.tolist() == pytest.approx([0.0] * 50)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_logprob_is_that_of_the_processed_distribution(params: SamplingParams) -> None:
    logits = logits_of(30)
    tokens, logprobs = draw(logits, [params] * 30)
    for row, token, logprob in zip(logits, tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(expected_logprobs(row, params)[token].item(), abs=1e-5)


def test_each_row_follows_its_own_settings() -> None:
    logits = logits_of(1).expand(len(SETTINGS), -1)
    for seed in range(20):
        tokens, logprobs = draw(logits, SETTINGS, seed)
        for params, token, logprob in zip(SETTINGS, tokens.tolist(), logprobs.tolist(), strict=True):
            assert logprob == pytest.approx(expected_logprobs(logits[0], params)[token].item(), abs=1e-5)


@pytest.mark.parametrize("params", SETTINGS[:6], ids=str)
def test_frequencies_agree_with_the_probabilities(params: SamplingParams) -> None:
    draws = 20_000
    logits = logits_of(1, seed=3) / 3
    tokens, _ = draw(logits.expand(draws, -1), [params] * draws, seed=11)
    probabilities = expected_logprobs(logits[0], params).exp()
    counts = torch.bincount(tokens, minlength=VOCABULARY)
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    chi_square = ((counts - draws * probabilities)[kept] ** 2 / (draws * probabilities[kept])).sum().item()
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations above the mean


def test_a_seeded_row_is_the_same_wherever_it_stands_and_whatever_else_is_drawn() -> None:
    row = logits_of(1, seed=5)
    alone, _ = draw(row, [SamplingParams(1)], seed=1, seeds=[42])
    for place in range(4):
        logits = torch.cat([logits_of(place, seed=6), row, logits_of(3 - place, seed=7)])
        tokens, _ = draw(
            logits, [SamplingParams(1)] * 4, seed=place, seeds=[42 if i == place else None for i in range(4)]
        )
        assert tokens[place] == alone[0]


def test_different_seeds_differ() -> None:
    row = torch.zeros(1, 1000)
    assert len({draw(row, [SamplingParams(1)], seeds=[seed])[0].item() for seed in range(20)}) > 15


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-45, 1e-300])
def test_a_tiny_temperature_still_gives_a_token_with_a_finite_logprob(temperature: float) -> None:
    logits = logits_of(20)
    tokens, logprobs = draw(logits, [SamplingParams(1, temperature=temperature)] * 20)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert bool(torch.isfinite(logprobs).all())


def test_the_given_logits_stay_as_they_are() -> None:
    logits = logits_of(3)
    before = logits.clone()
    draw(logits, [SamplingParams(1, temperature=0.5, top_k=2, top_p=0.5)] * 3)
    assert torch.equal(logits, before)


def test_the_likeliest_tokens_are_told_in_order_and_of_the_processed_distribution() -> None:
    logits = logits_of(3)
    params = [
        SamplingParams(1, temperature=0.5, top_logprobs=4),
        SamplingParams(1),
        SamplingParams(1, top_k=2, top_logprobs=2),
    ]
    drawn = sample(logits, params, [None] * 3, torch.Generator().manual_seed(0))
    for row, given, tops in zip(logits, params, drawn.top_logprobs, strict=True):
        expected = expected_logprobs(row, given).topk(4)
        assert [token for token, _ in tops[: given.top_logprobs]] == expected.indices.tolist()[
            : given.top_logprobs
        ]
        assert [p for _, p in tops] == pytest.approx(expected.values.tolist(), abs=1e-5)


# biases and penalties


def adjusted(**settings: Any) -> torch.Tensor:
    """Logits of tokens 0 to 3: 0 is in the prompt, 1 twice in the output, 3 ends a response."""
    logits = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    return adjust_logits(logits, [SamplingParams(1, **settings)], [(np.array([0], np.int32), [1, 1])], [3])[0]


def test_a_bias_is_added() -> None:
    assert adjusted(logit_bias=((1, 5.0), (2, -100.0))).tolist() == [1, 3, -97, 4]


def test_a_repetition_penalty_makes_tokens_of_prompt_and_output_less_likely() -> None:
    assert adjusted(repetition_penalty=2.0).tolist() == [0.5, -4, 3, 4]


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    assert adjusted(presence_penalty=0.5, frequency_penalty=1.0).tolist() == [1, -4.5, 3, 4]


def test_the_end_is_impossible_before_min_tokens() -> None:
    assert adjusted(min_tokens=3).tolist() == [1, -2, 3, -torch.inf]
    assert adjusted(min_tokens=2).tolist() == [1, -2, 3, 4]


def test_adjusting_leaves_the_given_logits_and_other_rows_as_they_are() -> None:
    logits = logits_of(2)
    before = logits.clone()
    params = [SamplingParams(1, presence_penalty=1.0), SamplingParams(1)]
    after = adjust_logits(logits, params, [([], [1]), ([], [1])], [3])
    assert torch.equal(logits, before)
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])
