"""Arrays of generations and trajectories: dtypes, equality, copies, and the numbers that come back."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_generation

from raylight.types import Trajectory

float32 = st.floats(width=32, allow_nan=False)
tokens = st.integers(0, 2**31 - 1)


@given(st.lists(tokens), st.lists(st.tuples(tokens, float32, st.integers(-1, 2**62))))
def test_numbers_come_back_bit_by_bit(prompt: list[int], sampled: list[tuple[int, float, int]]) -> None:
    ids, logprobs, versions = ([entry[i] for entry in sampled] for i in range(3))
    call = make_generation(prompt, ids, logprobs=logprobs, versions=versions)
    assert (call.prompt_ids.tolist(), call.output_ids.tolist()) == (prompt, ids)
    assert (call.logprobs.tolist(), call.weight_versions.tolist()) == (logprobs, versions)
    assert call.token_ids.tolist() == prompt + ids
    for again in (pickle.loads(pickle.dumps(call)), copy.deepcopy(call), replace(call)):
        assert again == call
        assert again.token_ids.dtype == np.int32


def test_dtypes_are_fixed_and_arrays_are_read_only() -> None:
    call = make_generation([1, 2], [3], policy_logprobs=[-0.5], allowed=[2])
    row = Trajectory("r", [1, 2], [0, 1], [0.0, -1.0], [-1, 4])
    for item, name, dtype in (
        (call, "prompt_ids", np.int32),
        (call, "output_ids", np.int32),
        (call, "logprobs", np.float32),
        (call, "weight_versions", np.int64),
        (call, "policy_logprobs", np.float32),
        (call, "allowed", np.int32),
        (row, "token_ids", np.int32),
        (row, "mask", np.int8),
        (row, "logprobs", np.float32),
        (row, "weight_versions", np.int64),
    ):
        array = getattr(item, name)
        assert array.dtype == dtype, name
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_an_array_of_the_right_dtype_is_not_copied_and_stays_writable_for_its_owner() -> None:
    prompt = np.arange(5, dtype=np.int32)
    call = replace(make_generation([1], [2]), prompt_ids=prompt)
    assert np.shares_memory(call.prompt_ids, prompt)
    assert prompt.flags.writeable


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1]])
def test_a_token_id_that_does_not_fit_is_an_error(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        make_generation(ids, [1])


def test_equality_compares_every_array() -> None:
    call = make_generation([1, 2], [3])
    assert call == replace(call, logprobs=np.array([-1.0]))
    for change in ({"prompt_ids": [1, 3]}, {"logprobs": [-2.0]}, {"weight_versions": [1]}, {"model": "m"}):
        assert call != replace(call, **change)  # type: ignore[arg-type]
    row = Trajectory("r", [1, 2], [0, 1], [0.0, -1.0], [-1, 4])
    assert row == Trajectory("r", (1, 2), np.array([0, 1]), [0, -1], [-1, 4])  # type: ignore[arg-type]
    assert row != replace(row, mask=[0, 0])  # type: ignore[arg-type]
    assert row != call


def test_prompt_and_trained_tokens_of_a_trajectory() -> None:
    row = Trajectory("r", [1, 2, 3, 4], [0, 0, 1, 1], [0.0] * 4, [-1] * 4)
    assert (row.prompt_length, row.trained_tokens) == (2, 2)
    assert replace(row, mask=[0] * 4).prompt_length == 4  # type: ignore[arg-type]
