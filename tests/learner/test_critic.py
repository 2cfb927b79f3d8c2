"""The critic on a real engine: it fits returns, and values are aligned with the context before each token."""

import pytest
import torch
from ranks import ANSWERS, PROMPTS, make_batch

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import CriticSettings, PolicySettings
from raylight.quickstart import STARTER_MODEL

pytestmark = pytest.mark.usefixtures("one_rank")


def make_critic(config=None, **settings):
    from raylight.learner.updates.critic import Critic

    torch.manual_seed(0)
    known = CriticSettings(**{"lr": 3e-3, "cliprange_value": 10.0, **settings})
    return Critic(STARTER_MODEL, LearnerConfig(**config or {}), known, total_steps=100)


def make_rows():
    from raylight.experience.batches.shards import shard_batch
    from raylight.learner.tokens.rows import build_rows

    batch = make_batch([[0.0] * len(answer) for answer in ANSWERS])
    (shard,) = shard_batch(batch, PolicySettings(), 1)
    return list(build_rows(shard.rows, batch.owners).values())


def make_minibatches(rows, parts=1):
    from raylight.learner.tokens.rows import Minibatch

    return [Minibatch(rows[part::parts], len(rows[part::parts])) for part in range(parts)]


def variance_explained(rows):
    from raylight.learner.losses.advantages import explained_variance

    return explained_variance(
        torch.cat([row.values[row.mask == 1] for row in rows]),
        torch.cat([row.returns[row.mask == 1] for row in rows]),
    )


def add_returns(rows):
    """Set returns to 1 after odd tokens, so that the value of another position cannot fit them."""
    for row in rows:
        before = torch.cat([row.prompt[-1:], row.response[:-1]])
        row.returns = (before % 2).float()


@pytest.mark.parametrize(
    ("config", "lr"),
    [
        pytest.param({}, 3e-3, marks=pytest.mark.slow("packed rows show it")),
        pytest.param(
            {"lora": {"rank": 8, "alpha": 16}}, 1e-2, marks=pytest.mark.slow("two ranks show its update")
        ),
        ({"packed": True}, 3e-3),
    ],
    ids=["full", "lora", "packed"],
)
def test_the_critic_fits_a_known_function(config, lr):
    critic, rows = make_critic(config, lr=lr), make_rows()
    add_returns(rows)
    seen, explained = [], []
    for _ in range(30):
        critic.add_values(rows)
        explained.append(variance_explained(rows))
        seen.append(critic.update(make_minibatches(rows)))
    assert explained[0] < 0.5
    assert explained[-1] > 0.9
    assert seen[-1]["critic/vf_loss"] < seen[0]["critic/vf_loss"] / 5
    assert all(
        name in seen[0]
        for name in ("critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/skipped_steps")
    )


def test_values_depend_on_the_context_before_each_token():
    critic, rows = make_critic(), make_rows()
    critic.add_values(rows)
    assert [len(row.values) for row in rows] == [len(answer) for answer in ANSWERS]
    changed = make_rows()
    changed[0].response = changed[0].response.clone()
    changed[0].response[1] += 1
    critic.add_values(changed)
    assert changed[0].values[:2] == pytest.approx(rows[0].values[:2], abs=1e-5)
    assert changed[0].values[2:] != pytest.approx(rows[0].values[2:], abs=1e-5)
    assert len(PROMPTS[0]) > 1


def test_loss_and_steps_follow_the_critics_settings():
    critic, rows = make_critic(mini_batches=2, ppo_epochs=3, cliprange_value=0.5), make_rows()
    add_returns(rows)
    critic.add_values(rows)
    expected = 0.5 * torch.cat([(row.values - row.returns) ** 2 for row in rows]).mean()
    critic.update(make_minibatches(rows, 2))
    steps = {int(state["step"]) for state in critic.engine.optimizer.state.values()}
    assert steps == {6}
    once = make_critic()
    once.add_values(rows)
    assert once.update(make_minibatches(rows))["critic/vf_loss"] == pytest.approx(float(expected), rel=1e-4)


AGGREGATIONS = [
    ("token-mean", lambda errors, rollouts: torch.cat(errors).mean()),
    ("seq-mean-token-mean", lambda errors, rollouts: sum(torch.cat(part).mean() for part in rollouts) / 7),
    (
        "seq-mean-token-sum-norm",
        lambda errors, rollouts: torch.cat(errors).sum() / 7 / max(len(row) for row in errors),
    ),
]


@pytest.mark.parametrize(("mode", "aggregate"), AGGREGATIONS, ids=[name for name, _ in AGGREGATIONS])
@pytest.mark.parametrize("budget", [18, 16384], ids=["tight", "one-pass"])
def test_a_rollout_counts_once_in_any_micro_batches(mode, aggregate, budget):
    from raylight.learner.tokens.rows import Minibatch

    critic = make_critic({"max_tokens_per_micro_batch": budget}, loss_agg_mode=mode)
    rows = make_rows()
    add_returns(rows)
    critic.add_values(rows)
    both = len(rows[0].response) + len(rows[3].response)  # these two rows are one rollout
    for row in (rows[0], rows[3]):
        row.rollout_fraction = len(row.response) / both
    errors = [0.5 * (row.values - row.returns) ** 2 for row in rows]
    rollouts = [[errors[0], errors[3]], *([error] for i, error in enumerate(errors) if i not in (0, 3))]
    found = critic.update([Minibatch(rows, 7)])
    assert found["critic/vf_loss"] == pytest.approx(float(aggregate(errors, rollouts)), rel=1e-4)


def test_with_lora_the_head_is_trained_in_full():
    critic = make_critic({"lora": {"rank": 4}})
    names = [name for name, param in critic.engine.module.named_parameters() if param.requires_grad]
    assert any(name.startswith("score.") for name in names)
    assert all("lora_" in name or name.startswith("score.") for name in names)
