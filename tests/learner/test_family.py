"""Algorithms on verl's engine: gradients against references, and updates in the direction of the reward."""

from dataclasses import replace

import family_ranks
import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from ranks import gradients_of, make_batch, plain_logprobs, same
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from raylight import algorithms
from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.experience.settings.registry import advantage_estimator, policy_loss
from raylight.experience.trajectories.turns import CreditedTurn
from raylight.quickstart import STARTER_MODEL
from raylight.weights.source import gather

FAMILY = sorted(
    name
    for name in set(algorithms.__all__) - {"PolicyAlgorithm", "VERL", "algo"}
    if issubclass(getattr(algorithms, name), algorithms.PolicyAlgorithm)
)
COMPARABLE = {
    "learner/grad_norm",
    "learner/pg_loss",
    "learner/advantage_abs_mean",
    "learner/kl_in_reward",
    "learner/kl_reward_coef",
    "critic/vf_loss",
    "critic/grad_norm",
}
OPTIONS = {"lr": 1e-3, "max_logprob_mismatch": 5.0, "grad_clip": 1e6}


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(STARTER_MODEL)


@pytest.fixture(scope="module")
def exact(plain):
    with torch.no_grad():
        return [logprobs.tolist() for logprobs in plain_logprobs(plain)]


def settings_of(name: str, **more) -> PolicySettings:
    more |= {"reward_weights": {"right": 1.0}} if name == "GDPO" else {}
    more |= {"teacher": "a model that is right"} if name == "OPD" else {}
    algorithm = getattr(algorithms, name)(model="m", **OPTIONS | more)
    return PolicySettings(**{field: getattr(algorithm, field) for field in PolicySettings.model_fields})


def update(settings: PolicySettings, batch: TrainBatch, **learner):
    """One update; returns metrics, gradients by name and the policy."""
    from raylight.learner.updates.policy import Policy

    policy = Policy(STARTER_MODEL, LearnerConfig(**learner), settings, total_steps=4)
    gradients = gradients_of(policy.engine)
    return policy.update(batch), gradients, policy


def batch_of(exact, noise: float = 0.0) -> TrainBatch:
    """Eight rollouts in two groups, the first with two rows, and engine log-probs with noise up to
    `noise`."""
    generator = torch.Generator().manual_seed(0)
    shifted = [
        [x + noise * (2 * float(torch.rand((), generator=generator)) - 1) for x in row] for row in exact
    ]
    batch = make_batch(shifted)
    batch.owners[1] = 0
    owners = [0, 0, 1, 2, 3, 4, 5, 6]
    return TrainBatch([1.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.0], list("aaaabbb"), batch.rows, owners)


def reference(plain, batch: TrainBatch, advantages: list[float], term, divisor: float):
    """Loss and gradients of a sum of terms over tokens of all rows."""
    plain.zero_grad()
    total = 0.0
    for row, owner, now in zip(batch.rows, batch.owners, plain_logprobs(plain), strict=True):
        then = torch.tensor(row.logprobs[row.prompt_length :])
        total = total + term(now, then, torch.tensor(advantages[owner])).sum()
    loss = total / divisor
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None
    }


def check(found, expected):
    metrics, gradients, _ = found
    loss, wanted = expected
    assert metrics["learner/pg_loss"] == pytest.approx(loss, abs=1e-5)
    same(gradients, wanted)


def clipped(now, then, advantage):
    """PPO's objective with clip ratio 0.2 and dual clip 3."""
    ratio = (now - then).exp()
    lost = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return torch.minimum(lost, -3.0 * advantage) if advantage < 0 else lost


@pytest.mark.parametrize("micro_batch", [16384, 48])
def test_grpo_matches_its_paper(plain, exact, micro_batch):
    batch = batch_of(exact, noise=0.6)
    rewards = torch.tensor(batch.rewards)
    a, b = rewards[:4], rewards[4:]
    advantages = torch.cat([(a - a.mean()) / (a.std() + 1e-6), (b - b.mean()) / (b.std() + 1e-6)]).tolist()
    tokens = sum(row.trained_tokens for row in batch.rows)
    found = update(settings_of("GRPO", bypass_mode=True), batch, max_tokens_per_micro_batch=micro_batch)
    assert found[0]["learner/clip_fraction"] > 0.1
    check(found, reference(plain, batch, advantages, clipped, tokens))


def test_without_a_scale_factor_the_divisor_is_that_of_the_mini_batch(exact):
    """verl divides by the width of each micro-batch, so that the update would depend on their sizes."""
    batch = batch_of(exact)
    settings = settings_of("GRPO", loss_agg_mode="seq-mean-token-sum-norm")
    whole, split = (update(settings, batch, max_tokens_per_micro_batch=size) for size in (16384, 48))
    assert split[0]["learner/grad_norm"] == pytest.approx(whole[0]["learner/grad_norm"], rel=1e-4)
    longest = max(len(row.token_ids) - row.prompt_length for row in batch.rows)
    given = settings_of("GRPO", loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=longest)
    assert update(given, batch)[0]["learner/grad_norm"] == pytest.approx(
        whole[0]["learner/grad_norm"], rel=1e-5
    )


@pytest.mark.parametrize("micro_batch", [16384, 48])
def test_rloo_matches_its_paper(plain, exact, micro_batch):
    batch = batch_of(exact)
    advantages = []
    for i, (reward, group) in enumerate(zip(batch.rewards, batch.groups, strict=True)):
        others = [
            r
            for j, (r, g) in enumerate(zip(batch.rewards, batch.groups, strict=True))
            if g == group and j != i
        ]
        advantages.append(reward - sum(others) / len(others))
    found = update(settings_of("RLOO"), batch, max_tokens_per_micro_batch=micro_batch)
    # the ratio to the policy itself has the gradient of the log-prob
    check(
        found,
        reference(
            plain, batch, advantages, lambda now, _, a: -a * (now - now.detach()).exp(), len(batch.rewards)
        ),
    )


@pytest.mark.parametrize("micro_batch", [16384, 48])
def test_ppo_matches_its_papers(plain, exact, micro_batch):
    from raylight.learner.updates.policy import Policy

    batch, gamma, lam = batch_of(exact, noise=0.6), 0.9, 0.8
    critic = {"lr": 1e-3, "cliprange_value": 10.0, "grad_clip": 1e6}
    settings = settings_of("PPO", bypass_mode=True, gamma=gamma, lam=lam, critic=critic)
    policy = Policy(
        STARTER_MODEL, LearnerConfig(max_tokens_per_micro_batch=micro_batch), settings, total_steps=4
    )
    valuer = AutoModelForTokenClassification.from_pretrained(STARTER_MODEL, num_labels=1)
    valuer.load_state_dict(
        {name: gather(weight) for name, weight in policy.critic.engine.module.state_dict().items()}
    )
    valued = [  # values of the context before each sampled token
        valuer(torch.tensor(row.token_ids[None])).logits[0, row.prompt_length - 1 : -1, 0]
        for row in batch.rows
    ]
    pg, vf = gradients_of(policy.engine), gradients_of(policy.critic.engine)
    metrics = policy.update(batch)

    advantages, returns = {}, {}
    for rollout, reward in enumerate(batch.rewards):  # the tokens of all its rows, one after the other
        rows = [i for i, owner in enumerate(batch.owners) if owner == rollout]
        values = torch.cat([valued[i].detach() for i in rows]).tolist()
        rewards = [0.0] * (len(values) - 1) + [reward]
        errors = [
            r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=True)
        ]
        told = [
            sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors)))
            for t in range(len(errors))
        ]
        lengths = [len(valued[i]) for i in rows]
        for i, a, v in zip(
            rows, torch.tensor(told).split(lengths), torch.tensor(values).split(lengths), strict=True
        ):
            advantages[i], returns[i] = a, a + v
    everything = torch.cat(list(advantages.values()))
    plain.zero_grad()
    lost, missed = [], []
    for i, (row, now) in enumerate(zip(batch.rows, plain_logprobs(plain), strict=True)):
        whitened = (advantages[i] - everything.mean()) / everything.std()
        lost += [
            clipped(*token)
            for token in zip(now, torch.tensor(row.logprobs[row.prompt_length :]), whitened, strict=True)
        ]
        missed.append((valued[i] - returns[i]).square() / 2)
    losses = torch.stack(lost).mean(), torch.cat(missed).mean()
    for loss in losses:
        loss.backward()
    assert metrics["learner/clip_fraction"] > 0.1
    assert [metrics["learner/pg_loss"], metrics["critic/vf_loss"]] == pytest.approx(
        [float(loss) for loss in losses], abs=1e-5
    )
    for found, model in ((pg, plain), (vf, valuer)):
        same(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("name", ["GMPO", "GSPO", "SAPO", "DrGRPO"])
def test_losses_of_whole_rows_do_not_depend_on_micro_batches(exact, name):
    batch, settings = batch_of(exact, noise=0.05), settings_of(name, bypass_mode=True)
    (once, whole, _), (split, parts, _) = (
        update(settings, batch),
        update(settings, batch, max_tokens_per_micro_batch=48),
    )
    assert split["learner/pg_loss"] == pytest.approx(once["learner/pg_loss"], abs=1e-5)
    assert split["learner/grad_norm"] == pytest.approx(once["learner/grad_norm"], rel=1e-4)
    assert all(torch.allclose(whole[key], parts[key], atol=1e-5) for key in whole)


@pytest.mark.parametrize("name", FAMILY)
def test_every_algorithm_moves_the_policy_towards_rewarded_answers(exact, name):
    batch = make_batch(exact)  # answers that begin with token 20 are rewarded
    if name == "ReMax":
        batch = replace(batch, baselines=[0.5] * 8)
    if name == "GiGPO":
        ends = [(row, len(trajectory.token_ids) - 1) for row, trajectory in enumerate(batch.rows)]
        rewards = zip(ends, batch.owners, batch.rewards, strict=True)
        turns = [CreditedTurn(owner, row, end, "start", reward) for (row, end), owner, reward in rewards]
        batch = replace(batch, turns=turns)
    if name == "GDPO":
        batch = replace(batch, parts=[(reward,) for reward in batch.rewards])
    if name == "OPD":
        surer = [2 * reward - 1 for reward in batch.rewards]
        scores = [np.asarray(row, np.float32) + more for row, more in zip(exact, surer, strict=True)]
        batch = replace(batch, teacher_logprobs=scores)
    metrics, _, policy = update(settings_of(name), batch)
    assert metrics["learner/grad_norm"] > 0
    moved = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    moved.load_state_dict({key: torch.from_numpy(array) for key, array in policy.export().items()})
    with torch.no_grad():
        gains = [float(now[0]) - then[0] for now, then in zip(plain_logprobs(moved), exact, strict=True)]
    good = [gain for gain, reward in zip(gains, batch.rewards, strict=True) if reward]
    bad = [gain for gain, reward in zip(gains, batch.rewards, strict=True) if not reward]
    assert sum(good) / len(good) > sum(bad) / len(bad) + 1e-3


def test_a_users_estimator_and_loss_replace_verls(exact):
    @advantage_estimator("own_centred")
    def centred(token_level_rewards, response_mask, index):
        rewards = token_level_rewards.sum(-1)
        means = torch.stack([rewards[torch.tensor(index == group)].mean() for group in index])
        return (rewards - means)[:, None] * response_mask

    @policy_loss("own_reinforce")
    def reinforce(log_prob, advantages):
        return -advantages * log_prob

    batch, common = batch_of(exact), {**OPTIONS, "loss_agg_mode": "seq-mean-token-mean"}
    own = PolicySettings(adv_estimator="own_centred", loss_mode="own_reinforce", **common)
    _, found, _ = update(own, batch, max_tokens_per_micro_batch=48)
    _, expected, _ = update(PolicySettings(norm_adv_by_std=False, **common), batch)
    assert all(torch.allclose(found[key], expected[key], atol=1e-6) for key in expected)


def test_a_users_loss_of_another_shape_raises(exact):
    @policy_loss("own_mean")
    def mean(log_prob):
        return log_prob.mean()

    with pytest.raises(ConfigError, match=r"own_mean.*loss of each token"):
        update(PolicySettings(loss_mode="own_mean", **OPTIONS), batch_of(exact))


@pytest.mark.slow
def test_two_ranks_take_the_same_steps_as_one():
    one, two = (run_ranks(family_ranks.main, ranks)[0] for ranks in (1, 2))
    for name, updates in one.items():
        for alone, together in zip(updates, two[name], strict=True):
            told = [key for key in alone if key in COMPARABLE]
            assert len(told) >= 3
            assert [together[key] for key in told] == pytest.approx(
                [alone[key] for key in told], rel=2e-3, abs=1e-4
            ), name
    assert abs(one["PPO"][1]["learner/kl_in_reward"]) > 1e-4
    assert one["PPO"][1]["learner/kl_reward_coef"] < 0.1  # the KL is far below its target
