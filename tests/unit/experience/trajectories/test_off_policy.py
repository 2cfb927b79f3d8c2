"""Calls that were not sampled from the policy's own distribution: the rule, and both treatments."""

import dataclasses
from typing import Any

import pytest
from unit_helpers import make_finished, make_generation, make_key

from raylight.errors import OffPolicySamplingError
from raylight.experience.batches.batch import BatchRules, build_batch
from raylight.experience.trajectories.off_policy import off_policy_parameters
from raylight.trainer.loops.batch_metrics import describe
from raylight.types import FinishedRollout


@pytest.mark.parametrize(
    ("sampling", "changed"),
    [
        ({}, []),
        ({"temperature": 0.3, "max_tokens": 8, "seed": 1, "stop": ["x"], "ignore_eos": True}, []),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, []),  # as vLLM records it
        ({"top_k": -1, "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0}, []),
        ({"top_p": None, "logit_bias": None}, []),
        ({"constrained": True, "min_tokens": 4, "bad_words": ["x"]}, []),
        ({"logit_bias": [[5, -100.0], [6, 100.0], [7, 0.0]]}, []),
        ({"top_p": 0.999}, ["top_p"]),
        ({"constrained": True, "top_p": 0.8}, ["top_p"]),
        ({"top_k": 50}, ["top_k"]),
        ({"min_p": 0.01}, ["min_p"]),
        ({"presence_penalty": 0.5, "frequency_penalty": -0.1}, ["presence_penalty", "frequency_penalty"]),
        ({"repetition_penalty": 1.05}, ["repetition_penalty"]),
        ({"logit_bias": {"5": -100, "6": 2.5}}, ["logit_bias"]),
        ({"logit_bias": [[5, -1.0]]}, ["logit_bias"]),
        ({"temperature": 0.0}, ["temperature"]),
        ({"temperature": 1e-6}, ["temperature"]),
    ],
)
def test_the_rule_reads_what_was_recorded(sampling: dict[str, Any], changed: list[str]) -> None:
    assert list(off_policy_parameters(sampling)) == changed


def rollout(reward: float, *calls: dict[str, Any], agent: str | None = None) -> FinishedRollout:
    """A conversation with one call for each sampling."""
    item = make_finished(reward, calls=0)
    generations, tokens = [], [1, 2]
    for number, sampling in enumerate(calls):
        key = dataclasses.replace(make_key(item.rollout.rollout_id), call_id=f"call-{number}")
        call = make_generation(tokens, [7, 8], key=key, start=float(number))
        generations.append(dataclasses.replace(call, sampling=sampling, agent=agent))
        tokens = [*tokens, 7, 8, 5]
    return dataclasses.replace(item, generations=generations)


PLAIN, CUT = {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}


def test_an_error_names_agent_model_and_parameter() -> None:
    finished = [rollout(1.0, PLAIN), rollout(0.0, PLAIN, CUT, agent="solver")]
    with pytest.raises(OffPolicySamplingError) as error:
        build_batch(finished, BatchRules())
    text = str(error.value)
    assert "agent 'solver' sampled from model 'policy' with top_p=0.8" in text
    assert f"call call-1 of rollout {finished[1].rollout.rollout_id}" in text
    for remedy in ("Remove top_p", "override_sampling=True", 'off_policy_sampling="mask"'):
        assert remedy in text
    with pytest.raises(OffPolicySamplingError, match="and sample at a temperature above 0"):
        build_batch([rollout(1.0, {"temperature": 0.0})], BatchRules())


def test_calls_that_are_not_trained_may_sample_as_they_like() -> None:
    finished = [rollout(1.0, PLAIN), rollout(0.0, PLAIN)]
    unscored = dataclasses.replace(rollout(0.0, CUT), reward=None)
    aborted = rollout(0.0, PLAIN, CUT)
    calls = [*aborted.generations[:1], dataclasses.replace(aborted.generations[1], finish_reason="aborted")]
    others = [unscored, dataclasses.replace(aborted, generations=calls)]
    assert build_batch([*finished, *others], BatchRules())[1].off_policy_calls == 0
    named = [rollout(1.0, PLAIN, agent="solver"), rollout(1.0, CUT, agent="judge")]
    assert build_batch(named, BatchRules(trained_agents="solver"))[1].other_agents == 1


def test_masked_calls_are_context_without_loss() -> None:
    finished = [rollout(1.0, PLAIN, CUT, PLAIN), rollout(0.0, CUT)]
    batch, report = build_batch(finished, BatchRules(off_policy_sampling="mask"))
    (row,) = batch.rows
    assert row.token_ids.tolist() == [1, 2, 7, 8, 5, 7, 8, 5, 7, 8]
    assert row.mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert row.weight_versions.tolist() == [-1, -1, 0, 0, -1, -1, -1, -1, 0, 0]
    assert not row.logprobs[5:7].any()
    assert (batch.rewards, batch.owners) == ([1.0, 0.0], [0])  # the masked rollout counts in its group
    metrics = describe(finished, report, 1.0)
    assert metrics["off_policy/calls"] == 2
    assert metrics["off_policy/tokens"] == 4
    assert metrics["off_policy/fraction"] == 0.5
    assert metrics["constrained/forced_tokens"] == 0
    assert report.off_policy == "an agent sampled from model 'policy' with top_p=0.8"


def test_a_batch_of_masked_calls_has_no_signal() -> None:
    batch, report = build_batch(
        [rollout(1.0, CUT), rollout(0.0, CUT)], BatchRules(off_policy_sampling="mask")
    )
    assert (batch.rows, report.has_signal, report.off_policy_calls) == ([], False, 2)


def test_the_most_frequent_parameters_of_masked_calls_are_reported() -> None:
    rules = BatchRules(off_policy_sampling="mask")
    assert build_batch([rollout(1.0, PLAIN), rollout(0.0, PLAIN)], rules)[1].off_policy is None
    content = build_batch([rollout(1.0, PLAIN), rollout(0.0, CUT)], rules)[1]
    assert content.off_policy.startswith("an agent sampled from model 'policy' with top_p=0.8")


def test_seeds_that_a_group_shares_are_counted() -> None:
    seeded = [rollout(1.0, PLAIN | {"seed": seed}) for seed in (1, 1, 2)] + [rollout(0.0, PLAIN)]
    _, counts = build_batch(seeded, BatchRules())
    assert counts.repeated_seeds == 2
    assert describe(seeded, counts, 1.0)["off_policy/repeated_seeds"] == 2
    other = dataclasses.replace(seeded[1], rollout=seeded[1].rollout.model_copy(update={"group_id": "other"}))
    assert build_batch([seeded[0], other], BatchRules())[1].repeated_seeds == 0
