"""Equal prompts are computed once, and sampled from as if each had been computed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers_helpers import MakeEngine, generate_all, logprobs_of

from raylight.engines.capture_context import Sample
from raylight.engines.transformers.adapters import LoadedAdapter
from raylight.engines.transformers.prompt_rows import PromptRows
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.sequence import Sequence


def sequence(*prompt: int, output: tuple[int, ...] = (), adapter: LoadedAdapter | None = None) -> Sequence:
    sample = Sample(0, np.asarray(prompt, np.int32), {})
    sample.output_ids.extend(output)
    return Sequence(sample, SamplingParams(4), asyncio.new_event_loop(), asyncio.Event(), adapter=adapter)


def divide(rows: PromptRows, *sequences: Sequence) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """Admit sequences; returns the indices of those computed, kept and copied."""
    admission = rows.admit(list(sequences))
    return admission.computed, admission.kept, admission.copied


def test_an_equal_prompt_is_copied_within_a_call_and_in_later_ones() -> None:
    rows = PromptRows(10, 2)
    computed, kept, copied = divide(rows, sequence(1, 2), sequence(1, 3), sequence(1, 2))
    assert (computed, kept, copied) == ([0, 1], {0: 11, 1: 10}, {2: 11})
    assert divide(rows, sequence(1, 3)) == ([], {}, {0: 10})


def test_the_least_recently_used_prompt_is_replaced() -> None:
    rows = PromptRows(10, 2)
    divide(rows, sequence(1), sequence(2))
    divide(rows, sequence(1))
    assert divide(rows, sequence(3)) == ([0], {0: 10}, {})
    assert divide(rows, sequence(1), sequence(2)) == ([1], {1: 10}, {0: 11})


def test_the_prompts_of_one_call_never_replace_one_another() -> None:
    rows = PromptRows(10, 1)
    assert divide(rows, sequence(1), sequence(2), sequence(1)) == ([0, 1], {0: 10}, {2: 10})
    assert divide(rows, sequence(1), sequence(2)) == ([1], {}, {0: 10})


def test_a_prompt_belongs_to_the_version_of_an_adapter() -> None:
    rows, old, new = PromptRows(10, 4), LoadedAdapter("a", 1, "k1"), LoadedAdapter("a", 2, "k2")
    divide(rows, sequence(1, adapter=old))
    computed, _, copied = divide(rows, sequence(1, adapter=new), sequence(1), sequence(1, adapter=old))
    assert (computed, list(copied)) == ([0, 1], [2])


def test_a_sequence_that_continues_is_computed() -> None:
    rows = PromptRows(10, 4)
    assert divide(rows, sequence(1, output=(5,)), sequence(1)) == ([0, 1], {1: 13}, {})
    assert divide(rows, sequence(1, output=(5,))) == ([0], {}, {})


def test_nothing_is_copied_after_a_change_of_weights() -> None:
    rows = PromptRows(10, 4)
    divide(rows, sequence(1))
    rows.clear()
    assert divide(rows, sequence(1))[0] == [0]


@pytest.mark.parametrize("slots", [40, 5], ids=["all at once", "more requests than slots"])
async def test_a_group_is_sampled_as_plain_transformers_computes(
    make_engine: MakeEngine, tied_model: str, slots: int
) -> None:
    engine = make_engine(slots=slots)
    plain: Any = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()
    compute, computed = engine._decoder._compute, list[Sequence]()
    engine._decoder._compute = lambda new, first: (computed.extend(new), compute(new, first))[1]  # type: ignore[method-assign, func-returns-value]
    prompts = [[7], [5, 6, 7, 8, 9, 10], list(range(40))]
    requests = [(prompt, SamplingParams(2 + i)) for i in range(6) for prompt in prompts]
    for (prompt, _), sample in zip(requests, await generate_all(engine, requests), strict=True):
        expected = logprobs_of(plain, prompt, sample.output_ids)
        assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    if slots == 40:
        assert len(computed) == len(prompts)
