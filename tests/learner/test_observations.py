"""Cross-entropy of observed tokens (`observation_coef`): loss, gradient and ranks against plain torch."""

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from transformers import AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.experience.batches.batch import TrainBatch, build_batch
from raylight.experience.batches.shards import shard_batch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL
from raylight.types import Trajectory

PARTS = [("prompt", 5), ("sampled", 2), ("observed", 3), ("sampled", 1), ("observed", 2), ("sampled", 3)]
"""Parts of a row with their tokens; the n-th row has n more tokens in its first observation."""
REWARDS = [1.0, 0.0, 0.25, 1.0]
COEF, TEMPERATURE = 0.3, 0.7

pytestmark = pytest.mark.usefixtures("one_rank")


def make_rows(masks_first: bool = False) -> list[Trajectory]:
    """Rows of three responses. `masks_first` masks the first response, as if it were stale."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(len(REWARDS)):
        lengths = [(kind, n + number * (place == 2)) for place, (kind, n) in enumerate(PARTS)]
        kinds = [kind for kind, n in lengths for _ in range(n)]
        mask = [int(kind == "sampled") for kind in kinds]
        ids = torch.randint(0, 250, (len(kinds),), generator=generator).tolist()
        observed = [int(kind == "observed") for kind in kinds]
        if masks_first:
            mask[5:7] = [0, 0]
        versions = [one - 1 for one in mask]
        rows.append(
            Trajectory(
                str(number), ids, mask, [-5.0 * m for m in mask], versions, TEMPERATURE, observed=observed
            )
        )
    return rows


def plain_step(coef: float, masks_first: bool = False) -> tuple[float, float, torch.nn.Module]:
    """Reference: the cross-entropy, the norm of the gradient, and the model with it, by plain torch."""
    model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    objective, entropy, sampled, observed = 0.0, 0.0, 0, 0
    for row, advantage in zip(make_rows(masks_first), advantages, strict=True):
        ids = torch.tensor(row.token_ids[None], dtype=torch.long)
        logits, targets = model(ids).logits[0, :-1], ids[0, 1:, None]
        mask, seen = (torch.tensor(one[1:] == 1) for one in (row.mask, row.observed))
        policy = (logits / TEMPERATURE).log_softmax(-1).gather(-1, targets)[:, 0]
        language = logits.log_softmax(-1).gather(-1, targets)[:, 0]
        objective = objective + advantage * policy[mask].sum()
        entropy = entropy - language[seen].sum()
        sampled, observed = sampled + int(mask.sum()), observed + int(seen.sum())
    (coef * entropy / observed - objective / sampled).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return float(entropy / observed), float(norm), model


def update(
    rank: int, ranks: int, learner: dict, settings: dict, masks_first: bool = False
) -> dict[str, float]:
    """Update once with the rows; return the metrics."""
    from raylight.learner.updates.policy import Policy

    known = PolicySettings(lr=1e-3, grad_clip=1e9, max_logprob_mismatch=100.0, **settings)
    policy = Policy(STARTER_MODEL, LearnerConfig(n=ranks, **learner), known, total_steps=2)
    metrics = policy.update(TrainBatch(REWARDS, ["g"] * 4, make_rows(masks_first), list(range(4))))
    logprobs = {f"row {row.index}": row.logprobs.tolist() for row in policy.row_records}
    return metrics | {"logprobs": logprobs}


@pytest.mark.parametrize(
    ("ranks", "learner", "settings"),
    [
        (1, {"max_tokens_per_micro_batch": 1024}, {}),
        (1, {"max_tokens_per_micro_batch": 40, "packed": False}, {"loss_mode": "gspo"}),
        (2, {"max_tokens_per_micro_batch": 40}, {}),
    ],
)
def test_the_loss_of_observations_equals_plain_torch(ranks, learner, settings) -> None:
    given = learner, settings | {"observation_coef": COEF}
    found = update(0, 1, *given) if ranks == 1 else run_ranks(update, ranks, *given)[0]
    cross_entropy, norm, _ = plain_step(COEF)
    assert found["learner/observation_loss"] == pytest.approx(cross_entropy, rel=1e-5)
    if not settings:  # the loss of a row is not the mean over its tokens
        assert found["learner/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_observations_before_the_first_trained_response_are_learned() -> None:
    learner, settings = {"max_tokens_per_micro_batch": 40}, {"observation_coef": COEF}
    found = update(0, 1, learner, settings, True)
    cross_entropy, norm, _ = plain_step(COEF, masks_first=True)
    assert found["learner/observation_loss"] == pytest.approx(cross_entropy, rel=1e-5)
    assert found["learner/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_without_a_weight_nothing_changes() -> None:
    learner = {"max_tokens_per_micro_batch": 1024}
    found = update(0, 1, learner, {})
    weighted = update(0, 1, learner, {"observation_coef": COEF})
    assert "learner/observation_loss" not in found
    assert found["learner/grad_norm"] == pytest.approx(plain_step(0.0)[1], rel=1e-5)
    same = ("learner/pg_loss", "learner/entropy", "learner/logprob_diff_mean", "logprobs")
    assert {name: found[name] for name in same if name in found} == {
        name: weighted[name] for name in same if name in weighted
    }


def test_rows_of_conversations_know_their_observations() -> None:
    from unit_helpers import make_finished, make_generation, make_key

    item = make_finished(1.0, rollout_id="r")
    calls = [
        make_generation([1, 2], [3, 4], key=make_key("r")),
        make_generation(
            [1, 2, 3, 4, 7, 8], [5], key=make_key("r"), start=1.0, allowed=[1], policy_logprobs=[0.0]
        ),
        make_generation([9], [3], key=make_key("r"), start=2.0),
    ]
    from dataclasses import replace

    from raylight.experience.batches.batch import BatchRules

    batch, _ = build_batch([replace(item, generations=calls)], BatchRules(row_limit=6, long_rows="truncate"))
    # forced tokens are not observations, nor is the first prompt of a row
    assert [row.observed.tolist() for row in batch.rows] == [[0, 0, 0, 0, 1, 1], [0, 0]]
    assert [row.mask.tolist() for row in batch.rows] == [[0, 0, 1, 1, 0, 0], [0, 1]]


def test_a_teachers_scores_stay_with_their_tokens() -> None:
    rows = make_rows(masks_first=True)
    teacher = [np.arange(row.prompt_length, len(row.token_ids), dtype=np.float32) for row in rows]
    batch = TrainBatch(REWARDS, ["g"] * 4, rows, list(range(4)), teacher_logprobs=teacher)
    (shard,) = shard_batch(batch, PolicySettings(observation_coef=COEF), 1)
    assert shard.rows.prompt_lengths == [7] * 4
    scores = np.split(shard.rows.teacher_logprobs, np.cumsum(shard.rows.response_lengths)[:-1])
    for number, found in enumerate(scores):
        assert found.tolist() == [0.0] * (3 + number) + teacher[number].tolist()
