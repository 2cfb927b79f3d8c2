"""Rows of calls: generations survive encoding."""

from typing import Any

import numpy as np
import pytest
from unit_helpers import make_generation, make_key

from raylight.store.call_rows import generation_bytes, generations_from_rows
from raylight.types import Generation


def decoded(call: Generation, data: bytes) -> Generation:
    key = call.key
    (found,) = generations_from_rows([(key.call_id, key.rollout_id, key.attempt_id, None, 0, data)]).values()
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"policy_logprobs": [-7.25, -0.5], "allowed": [1, 150_000]},
        {"versions": [3, 3]},
        {"versions": [3, 4], "temperature": 0.25},
        {"logprobs": [np.float32(-0.1).item(), -1e-30]},
    ],
)
def test_generations_survive_encoding(fields: dict[str, Any]) -> None:
    call = make_generation([1, 2], [3, 2**31 - 1], key=make_key(), **fields)
    assert decoded(call, generation_bytes(call)) == call


def test_a_generation_without_tokens() -> None:
    call = make_generation([], [], key=make_key())
    assert decoded(call, generation_bytes(call)) == call


def test_one_weight_version_is_stored_once() -> None:
    same, mixed = (
        len(generation_bytes(make_generation([], [1] * 1_000, versions=versions)))
        for versions in ([7] * 1_000, [7] * 999 + [8])
    )
    assert mixed - same > 7_900
