"""Common prefixes are computed once, and sampled from as if each sequence had been computed."""

import asyncio
import random
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config
from transformers_helpers import MakeEngine, generate_all, logprobs_of

from raylight.engines.capture_context import Sample
from raylight.engines.transformers.adapters import LoadedAdapter
from raylight.engines.transformers.decoder import Decoder
from raylight.engines.transformers.prefixes import PrefixCache
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.sequence import Sequence
from raylight.types import IntArray


def ids_of(*tokens: int) -> IntArray:
    return np.asarray(tokens, np.int32)


def keep(cache: PrefixCache, *tokens: int, adapter: LoadedAdapter | None = None) -> None:
    cache.keep(adapter, ids_of(*tokens), [])


def known(cache: PrefixCache, *tokens: int, adapter: LoadedAdapter | None = None) -> int:
    return cache.find(adapter, ids_of(*tokens))[1]


def test_a_sequence_continues_from_the_longest_common_prefix() -> None:
    cache = PrefixCache(1000)
    keep(cache, *range(40))
    keep(cache, *range(20), *range(100, 140))
    assert known(cache, *range(40)) == 39  # its last token is computed, for the next one's logits
    assert known(cache, *range(40), 7, 8) == 40
    assert known(cache, *range(20), *range(100, 130), 1, 2) == 50
    assert known(cache, *range(18), 1, 2) == 18
    assert known(cache, 5, *range(40)) == 0


def test_a_prompt_shorter_than_a_block_is_found_as_a_whole() -> None:
    cache = PrefixCache(1000)
    keep(cache, 1, 2, 3)
    assert known(cache, 1, 2, 3) == 2
    assert known(cache, 1, 2, 4) == 0


def test_the_least_recently_used_tokens_make_room() -> None:
    cache = PrefixCache(100)
    for first in (0, 1, 2):
        keep(cache, first, *range(39))
        known(cache, 0, *range(39))
    assert [known(cache, first, *range(39)) > 0 for first in (0, 1, 2)] == [True, False, True]


def test_a_continued_prefix_is_replaced() -> None:
    cache = PrefixCache(100)
    for length in (20, 40, 60, 80):
        keep(cache, *range(length))
    keep(cache, *range(200, 220))
    assert known(cache, *range(90)) == 80
    assert known(cache, *range(200, 221)) == 20


def test_a_prefix_belongs_to_the_version_of_an_adapter() -> None:
    cache, old, new = PrefixCache(100), LoadedAdapter("a", 1, "k1"), LoadedAdapter("a", 2, "k2")
    keep(cache, *range(20), adapter=old)
    assert known(cache, *range(21), adapter=old) == 20
    assert known(cache, *range(21), adapter=new) == known(cache, *range(21)) == 0


def test_nothing_is_found_after_a_change_of_weights() -> None:
    cache = PrefixCache(100)
    keep(cache, *range(20))
    cache.clear()
    assert known(cache, *range(21)) == 0


@pytest.fixture(scope="module")
def sliding_model(tmp_path_factory: pytest.TempPathFactory, tied_model: str) -> str:
    """Model whose layers attend by turns to all tokens and to the last eight."""
    path = tmp_path_factory.mktemp("sliding") / "model"
    shutil.copytree(tied_model, path)
    sizes = {"vocab_size": AutoConfig.from_pretrained(tied_model).vocab_size, "hidden_size": 32}
    sizes |= {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = Gemma2Config(**sizes, num_key_value_heads=2, sliding_window=8, max_position_embeddings=512)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def new_sequence(tokens: list[int]) -> Sequence:
    return Sequence(
        Sample(0, ids_of(*tokens), {}), SamplingParams(4), asyncio.new_event_loop(), asyncio.Event()
    )


@pytest.mark.parametrize("model", ["tied_model", "sliding_model"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow("another seed shows it"))])
@torch.inference_mode()
def test_logits_equal_those_of_a_fresh_prefill(
    request: pytest.FixtureRequest, model: str, dtype: torch.dtype, seed: int
) -> None:
    """Groups and conversations of random lengths, with removals and changes of weights in between."""
    path, draw = request.getfixturevalue(model), random.Random(seed)
    decoder, fresh = (Decoder(path, "float32", "cpu", 6, 200) for _ in range(2))
    for each in (decoder, fresh):
        each.module.to(dtype)
        each._cache = each._empty_cache()
    texts, computed = [[draw.randrange(50) for _ in range(draw.randint(1, 60))] for _ in range(3)], 0
    for _ in range(20):
        admitted = []
        for _ in range(draw.randint(1, 6 - len(decoder.active))) if len(decoder.active) < 6 else ():
            more = [draw.randrange(50) for _ in range(draw.choice((0, 0, 1, 20)))]
            text = draw.choice(texts)
            admitted.append(new_sequence(text[: draw.randint(1, len(text))] + more))
        if admitted:
            computed += sum(map(decoder.count_missing, admitted))
            expect_equal(decoder.prefill(admitted), fresh, admitted)
        for sequence in decoder.active:
            sequence.append(draw.randrange(50), 0.0, 0)
        expect_equal(decoder.decode(), fresh, decoder.active)
        for sequence in draw.sample(decoder.active, draw.randint(0, len(decoder.active))):
            if draw.random() < 0.7:
                texts.append([*sequence.ids.tolist()[:120]])
                decoder.retire(sequence)
            else:
                decoder.remove(sequence)
        if draw.random() < 0.1:
            for one, other in zip(decoder.module.parameters(), fresh.module.parameters(), strict=True):
                other.copy_(one.mul_(1.01))
            if in_flight := decoder.clear():
                expect_equal(decoder.prefill(in_flight), fresh, in_flight)
    assert computed > 0


def expect_equal(found: torch.Tensor, fresh: Decoder, sequences: list[Sequence]) -> None:
    """Compare logits with sequences that are computed one by one, without kept prefixes.

    In float64 they are equal; in float32 passes of other shapes round differently.
    """
    for logits, sequence in zip(found, sequences, strict=True):
        fresh.clear()
        (expected,) = fresh.prefill([new_sequence(sequence.ids.tolist())])
        difference, largest = (logits - expected).abs(), expected.abs().max()
        assert difference.mean() <= 1e-6 * largest
        assert difference.max() <= {torch.float32: 1e-5, torch.float64: 1e-12}[logits.dtype] * largest


async def test_each_call_of_a_conversation_computes_its_new_tokens_only(make_engine: MakeEngine) -> None:
    engine, tokens, missing = make_engine(), list(range(30)), list[int]()
    prefill = engine._decoder.prefill
    engine._decoder.prefill = lambda new: (  # type: ignore[method-assign]
        missing.extend(map(engine._decoder.count_missing, new)),
        prefill(new),
    )[1]
    for _ in range(5):
        (sample,) = await generate_all(engine, [(tokens, SamplingParams(6, ignore_eos=True))])
        tokens = [*tokens, *sample.output_ids, 3, 4, 5]
    assert missing == [30, 4, 4, 4, 4]  # the last sampled token has not been computed


async def test_seeded_samples_do_not_depend_on_kept_prefixes(make_engine: MakeEngine) -> None:
    requests = [(list(range(20 + i % 3)), SamplingParams(8, seed=i)) for i in range(9)]
    engine = make_engine()
    first, again = await generate_all(engine, requests), await generate_all(engine, requests)
    assert [sample.output_ids for sample in first] == [sample.output_ids for sample in again]


@pytest.mark.parametrize("slots", [40, 5], ids=["all at once", "more requests than slots"])
async def test_a_group_is_sampled_as_plain_transformers_computes(
    make_engine: MakeEngine, tied_model: str, slots: int
) -> None:
    engine = make_engine(slots=slots)
    plain: Any = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()
    compute, computed = engine._decoder._compute, list[int]()
    engine._decoder._compute = lambda new, first: (  # type: ignore[method-assign]
        computed.extend(map(engine._decoder.count_missing, new)),
        compute(new, first),
    )[1]
    prompts = [[7], [5, 6, 7, 8, 9, 10], list(range(40))]
    requests = [(prompt, SamplingParams(2 + i)) for i in range(6) for prompt in prompts]
    for (prompt, _), sample in zip(requests, await generate_all(engine, requests), strict=True):
        expected = logprobs_of(plain, prompt, sample.output_ids)
        assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    if slots == 40:
        assert sorted(computed, reverse=True)[:3] == [40, 6, 1]  # of the others at most the last token
