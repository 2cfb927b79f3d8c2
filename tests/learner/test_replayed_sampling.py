"""Calls with truncation and penalties: the learner's log-probs equal those that the engine sampled with."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from ranks import PROMPTS
from unit_helpers import make_finished

from raylight.config import LearnerConfig
from raylight.engines.capture_context import CURRENT, AttemptScope, CaptureContext
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams
from raylight.errors import MismatchError, OffPolicySamplingError
from raylight.experience.batches.batch import BatchRules, build_batch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL
from raylight.serving.capture.captured_request import _generation
from raylight.types import CallKey, FinishedRollout, Generation, TokenSets

SAMPLINGS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5, "temperature": 1.3},
    "min_p": {"min_p": 0.05},
    "all of them": {"top_p": 0.95, "top_k": 20, "min_p": 0.01, "temperature": 0.7},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "penalties and top_p": {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "top_p": 0.9},
    "a minimum length": {"min_tokens": 6, "top_p": 0.9},
    "a ban": {"logit_bias": ((22, -100.0),), "top_k": 8},
    "a choice of two tokens": {"logit_bias": ((22, 100.0), (23, 100.0)), "top_k": 8},
}


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine(STARTER_MODEL, "policy", dtype="float32", slots=8, max_model_len=256, seed=1)
    yield engine
    engine.close()


async def call(
    engine: TransformersEngine, prompt: list[int], params: SamplingParams, trains: bool
) -> Generation:
    """Sample a response as a captured call of a rollout."""
    scope = AttemptScope("ro-1", "at-1", trains=trains)
    context = CaptureContext(scope, "chat", {}, 0.0, [])
    CURRENT.set(context)
    sample = await engine.generate(prompt, params)
    return _generation(context, CallKey("ro-1", "at-1", f"call-{len(prompt)}"), sample, "policy", 1.0, True)


async def roll_out(
    engine: TransformersEngine, number: int, trains: bool = True, **params: Any
) -> FinishedRollout:
    """A conversation of two calls. Every second time, the first call truncates nothing."""
    heat = params.get("temperature", 1.0)
    first = SamplingParams(8, temperature=heat) if number % 2 else SamplingParams(8, **params)
    calls = [await call(engine, PROMPTS[number], first, trains)]
    prompt = [*calls[0].token_ids.tolist(), 198, 20, 198]
    calls.append(await call(engine, prompt, SamplingParams(8, **params), trains))
    item = make_finished(float(number % 3 == 0), calls=0, group="group")
    return dataclasses.replace(item, generations=calls)


def roll_out_all(engine: TransformersEngine, **params: Any) -> list[FinishedRollout]:
    async def every() -> list[FinishedRollout]:
        return await asyncio.gather(*(roll_out(engine, number, **params) for number in range(8)))

    return asyncio.run(every())


def make_policy(**settings: Any) -> Any:
    from raylight.learner.updates.policy import Policy

    known = PolicySettings(**{"lr": 1e-3, "max_logprob_mismatch": 1e-3, **settings})
    return Policy(STARTER_MODEL, LearnerConfig(max_tokens_per_micro_batch=64), known, total_steps=4)


@pytest.fixture(scope="module")
def still() -> Any:
    """Policy whose updates are too small to change its weights."""
    return make_policy(kl_coef=0.1, lr=1e-12)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_learners_logprobs_equal_those_sampled_with(
    engine: TransformersEngine, still: Any, sampling: dict[str, Any]
) -> None:
    finished = roll_out_all(engine, **sampling)
    batch, report = build_batch(finished, BatchRules())
    assert report.off_policy_calls == 0
    assert report.tokens.replayed == sum(
        len(call.output_ids) for item in finished for call in item.generations if call.is_replayed
    )
    assert all(row.trained_tokens for row in batch.rows)
    still.version = 0  # that of the engine
    metrics = still.update(batch)
    assert metrics["mismatch/logprob_abs_mean"] < 1e-5
    assert metrics["mismatch/logprob_abs_max"] < 5e-5  # low temperatures scale the rounding of logits
    assert metrics["learner/kl"] == pytest.approx(0, abs=1e-7)  # the reference model replays it too


def test_without_the_replay_the_same_tokens_are_a_mismatch(engine: TransformersEngine) -> None:
    batch, _ = build_batch(roll_out_all(engine, top_p=0.8, temperature=1.3), BatchRules())
    bare = [dataclasses.replace(row, candidates=TokenSets()) for row in batch.rows]
    with pytest.raises(MismatchError):
        make_policy().update(dataclasses.replace(batch, rows=bare))
    bare = [dataclasses.replace(row, penalised=()) for row in batch.rows]
    assert make_policy().update(dataclasses.replace(batch, rows=bare))["mismatch/logprob_abs_max"] < 5e-5


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"trains": False, "top_p": 0.8}, r"top_p=0\.8"),  # of a rollout that is not trained
        ({"top_p": 0.8, "temperature": 0.0}, r"top_p=0\.8, temperature=0\.0"),
        ({"logit_bias": ((22, -1.0),), "top_p": 0.8}, r"top_p=0\.8, logit_bias"),
        ({"logit_bias": ((22, -100.0),), "repetition_penalty": 1.2}, r"repetition_penalty=1\.2"),
    ],
)
def test_what_cannot_be_replayed_is_an_error(
    engine: TransformersEngine, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(OffPolicySamplingError, match=named):
        build_batch(roll_out_all(engine, **changed), BatchRules())


def test_a_teacher_scores_no_replayed_tokens(engine: TransformersEngine) -> None:
    finished = roll_out_all(engine, top_p=0.8)
    with pytest.raises(OffPolicySamplingError, match="the learner cannot replay it"):
        build_batch(finished, BatchRules(replays_sampling=False))


def test_a_row_that_is_cut_keeps_the_candidates_of_its_tokens(engine: TransformersEngine) -> None:
    finished = roll_out_all(engine, top_p=0.8, repetition_penalty=1.2)
    limit = max(len(item.generations[-1].token_ids) for item in finished) - 2
    batch, report = build_batch(finished, BatchRules(row_limit=limit, long_rows="truncate"))
    assert report.rows_truncated
    assert make_policy().update(batch)["mismatch/logprob_abs_max"] < 5e-5
