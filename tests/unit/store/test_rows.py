"""Rows of the journal: records survive encoding, and older encodings are readable."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from unit_helpers import make_generation, make_key

from raylight.store.rows import generation_bytes, generation_from_row
from raylight.types import Generation


def decoded(data: bytes, call: Generation) -> Generation:
    return generation_from_row(call.key.call_id, call.key.rollout_id, call.key.attempt_id, data)


def test_generations_survive_encoding() -> None:
    for constraint in ({}, {"policy_logprobs": [-7.25, -0.5], "allowed": [1, 150_000]}):
        call = make_generation([1, 2], [3, 4], key=make_key(), logprobs=[-0.1, -0.5], **constraint)
        assert decoded(generation_bytes(call), call) == call


@pytest.mark.parametrize("entries", [10, 11], ids=["0.2.0", "with history"])
def test_older_journals_are_read_as_unconstrained(entries: int) -> None:
    call = make_generation([1, 2], [3, 4], policy_logprobs=[-7.25, -0.5], allowed=[1, 2])
    older = pickle.dumps(pickle.loads(generation_bytes(call))[:entries])
    assert decoded(older, call) == replace(call, policy_logprobs=[], allowed=[])
