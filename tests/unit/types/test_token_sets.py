"""Token sets: their codes, joins, ranges and selections, and their bytes in a store."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from unit_helpers import make_generation, make_key

from raylight.store.call_rows import generation_bytes, generations_from_rows
from raylight.types import TokenSets
from raylight.types.token_sets import BITS


def masks(seed: int, positions: int, vocabulary: int) -> NDArray[np.bool_]:
    """Masks that exclude nothing, much or little."""
    generator = np.random.default_rng(seed)
    found = generator.random((positions, vocabulary)) < generator.choice([0.02, 0.5, 1.0], (positions, 1))
    found[:, 0] = True
    return found


def decoded(sets: TokenSets, vocabulary: int) -> NDArray[np.bool_]:
    """Reference: the mask of each set, one by one."""
    rows, start = [], 0
    for size in sets.sizes.tolist():
        part, start = sets.values[start : start + size].tolist(), start + size
        if part[:1] == [BITS]:
            part = [32 * w + i for w, word in enumerate(part[1:]) for i in range(32) if word >> i & 1]
        row = np.full(vocabulary, not size)
        row[part] = True
        rows.append(row)
    return np.array(rows).reshape(-1, vocabulary)


@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from([1, 31, 32, 70, 500]), st.data())
def test_masks_return_from_every_part(
    seed: int, positions: int, vocabulary: int, data: st.DataObject
) -> None:
    mask = masks(seed, positions, vocabulary)
    sets = TokenSets.from_mask(mask)
    assert np.array_equal(decoded(sets, vocabulary), mask)
    cut = data.draw(st.integers(0, positions))
    assert TokenSets.join([sets[:cut], sets[cut:]]) == sets
    assert TokenSets.join(sets.split([cut, positions - cut])) == sets
    chosen = np.random.default_rng(seed).random(positions) < 0.5
    assert np.array_equal(decoded(sets.select(chosen), vocabulary), mask[chosen])


def test_a_set_takes_no_more_than_a_bit_for_each_token() -> None:
    sets = TokenSets.from_mask(masks(0, 200, 1000))
    assert sets.sizes.max() <= 1 + -(-1000 // 32)
    assert not TokenSets.from_mask(np.ones((2, 5), np.bool_)).values.size


def test_sizes_and_values_must_fit() -> None:
    with pytest.raises(ValueError, match="token sets of 3 values must have as many, not 2"):
        TokenSets(np.array([1, 2]), np.array([4, 5]))


@pytest.mark.parametrize("restricted", [True, False])
def test_a_store_returns_the_candidates_of_a_call(restricted: bool) -> None:
    call = make_generation([1, 2], [7, 8, 9], key=make_key("ro-1"))
    candidates = TokenSets.from_mask(masks(3, 3, 300)) if restricted else TokenSets.unrestricted(3)
    for kept in (dataclasses.replace(call, candidates=candidates), call):
        row = (kept.key.call_id, kept.key.rollout_id, kept.key.attempt_id, None, 0, generation_bytes(kept))
        (found,) = generations_from_rows([row]).values()
        assert found.candidates == kept.candidates
        assert found.is_replayed == (kept is not call)
