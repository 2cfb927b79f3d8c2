"""Estimators and losses that raylight drives in its own way, compared with verl's own functions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from process_groups import only_rank
from test_advantages import batch_of, estimate_rows, policy_settings, rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylight.errors import ConfigError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import shard_batch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner import verl_api
from raylight.learner.losses.advantages import KlController, add_advantages
from raylight.learner.losses.policy_loss import actor_config
from raylight.quickstart import STARTER_MODEL

WEIGHTS = {"right": 1.0, "short": 0.5, "polite": -0.25}
quarters = st.integers(-8, 8)


def verls_gdpo(
    parts: list[tuple[float, ...]], weights: list[float], mask: torch.Tensor, groups: list[str], by_std: bool
) -> torch.Tensor:
    """Advantages by verl's own estimator of GDPO."""
    names = [f"reward_{number}" for number in range(len(weights))]
    config = verl_api.AlgoConfig(
        norm_adv_by_std_in_grpo=by_std, gdpo_reward_keys=names, gdpo_reward_weights=weights
    )
    columns = np.array(parts, dtype=np.float32).T
    advantages, _ = verl_api.ADV_ESTIMATOR_REGISTRY["gdpo"](
        token_level_rewards=torch.zeros_like(mask),
        response_mask=mask,
        index=np.array(groups, dtype=object),
        norm_adv_by_std_in_grpo=by_std,
        config=config,
        non_tensor_batch=dict(zip(names, columns, strict=True)),
        batch={"prompts": torch.zeros(len(mask), 0), "attention_mask": mask.long()},
    )
    return advantages


@given(
    st.lists(st.tuples(st.integers(1, 4), st.tuples(quarters, quarters, quarters)), min_size=4, max_size=8),
    st.booleans(),
)
def test_gdpo_is_verls(rollouts, by_std):
    lengths = [length for length, _ in rollouts]
    # verl computes in float32, in which the deviation of nearly equal rewards would be a rounding error
    parts = [tuple(number / 4 for number in numbers) for _, numbers in rollouts]
    groups = ["a", "a", *("b" for _ in rollouts[2:])]
    batch = batch_of([[[n]] for n in lengths], [0.0] * len(parts), groups, parts=parts)
    config = PolicySettings(adv_estimator="gdpo", reward_weights=WEIGHTS, norm_adv_by_std=by_std)
    result = estimate_rows(batch, rows_of(batch), config)
    expected = verls_gdpo(parts, list(WEIGHTS.values()), result.sequences.mask, groups, by_std)
    torch.testing.assert_close(result.advantages, expected, rtol=1e-4, atol=1e-4)


def test_gdpo_differs_for_equal_sums_and_not_for_equal_rewards():
    def advantages(parts):
        batch = batch_of([[[2]]] * 4, [0.0] * 4, ["a"] * 4, parts=parts)
        config = PolicySettings(adv_estimator="gdpo", reward_weights={"right": 1.0, "short": 1.0})
        return estimate_rows(batch, rows_of(batch), config).advantages[:, 0].tolist()

    # both sums are 1, but a right answer is rarer than a short one
    found = advantages([(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)])
    assert found == [pytest.approx(0, abs=1e-6)] * 4  # two mirrored rewards of one deviation cancel out
    found = advantages([(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 0.0)])
    assert found[0] > found[1] == found[2] > found[3]
    assert advantages([(0.7, 0.1)] * 4) == [pytest.approx(0, abs=1e-6)] * 4


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("weighted", [False, True])
def test_token_baselines_are_verls(name, weighted):
    generator = torch.Generator().manual_seed(1)
    lengths, groups = [[3], [1, 2], [4], [2], [2], [1]], ["a", "a", "a", "b", "b", "c"]
    batch = batch_of([[[n] for n in rows] for rows in lengths], [1.0, 0.0, 0.5, 0.0, 2.0, 1.0], groups)
    config = policy_settings(name, **({"rollout_is": "token"} if weighted else {}))
    rows, fields = rows_of(batch), ("old_logprobs", "sum_pi_squared", "weights")[: 3 if weighted else 2]
    for row in rows:
        row.old_logprobs = -2 * torch.rand(len(row.response), generator=generator)
        row.sum_pi_squared = 0.2 + 0.6 * torch.rand(len(row.response), generator=generator)
        row.weights = 0.5 + torch.rand(len(row.response), generator=generator)
    result = estimate_with(fields, batch, rows, config)
    matrices = {field: matrix_of(field, rows, len(lengths)) for field in fields}
    expected, returns = verl_api.ADV_ESTIMATOR_REGISTRY[name](
        token_level_rewards=result.sequences.rewards(),
        response_mask=result.sequences.mask,
        index=np.array(groups, dtype=object),
        old_log_probs=matrices["old_logprobs"],
        sum_pi_squared=matrices["sum_pi_squared"],
        rollout_is_weights=matrices.get("weights"),
    )
    torch.testing.assert_close(result.advantages, expected.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.returns, returns.float(), rtol=0, atol=1e-6)
    assert len({round(float(value), 5) for value in result.advantages[0]}) > 1  # a baseline for each token


def estimate_with(fields, batch: TrainBatch, rows, config):
    from raylight.experience.batches.shards import shard_batch
    from raylight.learner.losses.advantages import KlController, RolloutSequences, estimate

    (shard,) = shard_batch(batch, config, 1)
    sequences = RolloutSequences(shard.outline)
    matrices = {
        name: sequences.matrix({row.index: getattr(row, name)[row.mask == 1].numpy() for row in rows})
        for name in fields
    }
    return estimate(shard.outline, sequences, matrices, config, KlController(config))


def matrix_of(field: str, rows, rollouts: int) -> torch.Tensor:
    """The sampled tokens' values of each rollout, built without raylight's sequences."""
    joined = [
        torch.cat([getattr(row, field)[row.mask == 1] for row in rows if row.rollout == rollout])
        for rollout in range(rollouts)
    ]
    return torch.nn.utils.rnn.pad_sequence(joined, batch_first=True).double()


def loss_of(name: str, config, old: torch.Tensor, now: torch.Tensor, advantages: torch.Tensor, **more):
    """A loss of verl, and its gradient by the log-probs."""
    leaf = now.clone().requires_grad_()
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=now.numel(), global_batch_size=len(now), loss_scale_factor=None
    )
    loss, _ = verl_api.POLICY_LOSS_REGISTRY[name](
        old_log_prob=old,
        log_prob=leaf,
        advantages=advantages,
        response_mask=torch.ones_like(now),
        loss_agg_mode="token-mean",
        config=config,
        **more,
    )
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def random_tokens() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(3, 5, generator=generator)
    return (
        old,
        old + torch.randn(3, 5, generator=generator),
        torch.randn(3, 1, generator=generator).expand(3, 5),
    )


def test_dro_is_its_formula():
    old, now, advantages = random_tokens()
    config = actor_config(PolicySettings(loss_mode="dro", dro_beta=0.3))
    loss, gradient = loss_of("dro", config, old, now, advantages)
    leaf = now.clone().requires_grad_()
    expected = -(leaf * advantages - 0.15 * (leaf - old).square()).mean()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0])


@pytest.mark.parametrize("threshold", [2.0, 1.25])
def test_bypass_mode_is_a_setting(threshold):
    """verl's loss `bypass_mode` is CISPO, or PPO's, with the engine's log-probs as the old ones."""
    old, now, advantages = random_tokens()

    def verls(loss_type):
        config = actor_config(PolicySettings())
        correction = config.policy_loss.rollout_correction
        for name, value in {
            "loss_type": loss_type,
            "rollout_is": "token",
            "rollout_is_threshold": threshold,
            "rollout_rs": None,
        }.items():
            object.__setattr__(correction, name, value)
        return loss_of("bypass_mode", config, old, now, advantages)

    own = PolicySettings(
        loss_mode="cispo", bypass_mode=True, clip_ratio_low=10.0, clip_ratio_high=threshold - 1
    )
    for found, expected in (
        (loss_of("cispo", actor_config(own), old, now, advantages), verls("reinforce")),
        (
            loss_of("vanilla", actor_config(PolicySettings(bypass_mode=True)), old, now, advantages),
            verls("ppo_clip"),
        ),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


LENGTHS = [3, 5, 1, 4]
MASK = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).float()


def teacher_tokens() -> dict[str, torch.Tensor]:
    """Log-probs of the policy and of a teacher, one of them beyond the bound."""
    generator = torch.Generator().manual_seed(2)
    own, teacher = -4 * torch.rand(2, 4, 5, generator=generator)
    teacher[1, 2] = -40.0
    return {"engine_logprobs": own, "teacher_logprobs": teacher}


def distilled(options: PolicySettings, **fields: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the advantages that a rank sets for four rollouts of one row each, and its metrics.

    Args:
        fields: matrices of the rows' fields.
    """
    batch = batch_of([[[n]] for n in LENGTHS], [1.0, 0.0, 0.0, 2.0], ["a", "a", "b", "b"])
    rows = rows_of(batch)
    for row in rows:
        for name, matrix in fields.items():
            setattr(row, name, matrix[row.index, : len(row.response)].clone())
    (shard,) = shard_batch(batch, options, 1)
    metrics = add_advantages(shard.outline, rows, options, KlController(options))
    return torch.nn.utils.rnn.pad_sequence([row.advantages for row in rows], batch_first=True), metrics


@only_rank()
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_distillation_is_its_formula(gamma, reward_coef):
    fields = teacher_tokens()
    options = PolicySettings(adv_estimator="opd", gamma=gamma, reward_coef=reward_coef)
    found, metrics = distilled(options, **fields)
    ratios = ((fields["teacher_logprobs"] - fields["engine_logprobs"]).clamp(-10, 10) * MASK).double()
    expected = torch.zeros_like(ratios)
    for token in range(5):
        for later in range(token, 5):
            expected[:, token] += gamma ** (later - token) * ratios[:, later]
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64).view(2, 2)
    of_group = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    expected = (expected + reward_coef * of_group.view(4, 1)) * MASK
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-6)
    divergence = ((fields["engine_logprobs"] - fields["teacher_logprobs"]) * MASK).sum() / MASK.sum()
    assert metrics["learner/teacher_kl"] == pytest.approx(float(divergence), abs=1e-6)


@only_rank()
def test_log_probs_before_the_update_win_over_the_engines():
    fields = teacher_tokens()
    fields["old_logprobs"] = fields["engine_logprobs"] - 0.25
    found, _ = distilled(PolicySettings(adv_estimator="opd", gamma=0.0), **fields)
    expected = (fields["teacher_logprobs"] - fields["old_logprobs"]).clamp(-10, 10) * MASK
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@only_rank()
def test_the_gradient_of_self_distillation_is_that_of_the_reverse_kl():
    """The model is its own teacher, which reads the sums in its prompts; written out by hand."""
    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
    answers = torch.randint(15, 25, (4, 5), generator=torch.Generator().manual_seed(3))

    def logprobs_after(*messages: dict[str, str]) -> torch.Tensor:
        """Log-probs of all answers after a prompt, each of five tokens."""
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        prompt = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
        ids = torch.cat([prompt.expand(4, -1), answers], 1)
        logprobs = model(ids).logits[:, :-1].log_softmax(-1)
        return logprobs.gather(-1, ids[:, 1:, None])[:, len(prompt) - 1 :, 0]

    question, answer = {"role": "user", "content": "23+34="}, {"role": "system", "content": "It is 57."}
    own, parameter = logprobs_after(question), model.model.norm.weight
    with torch.no_grad():
        teacher = logprobs_after(answer, question)
    options = PolicySettings(adv_estimator="opd", gamma=0.0)
    advantages, metrics = distilled(options, engine_logprobs=own.detach(), teacher_logprobs=teacher)
    config = actor_config(options)
    numbers = {"dp_size": 1, "batch_num_tokens": sum(LENGTHS), "global_batch_size": 4}
    config.global_batch_info.update(numbers, loss_scale_factor=None)
    loss, _ = verl_api.POLICY_LOSS_REGISTRY["vanilla"](
        old_log_prob=own.detach(),
        log_prob=own,
        advantages=advantages,
        response_mask=MASK,
        loss_agg_mode="token-mean",
        config=config,
    )
    (found,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    divergence = (own.detach() - teacher).clamp(-10, 10)
    by_hand = (divergence * own * MASK).sum() / MASK.sum()
    (expected,) = torch.autograd.grad(by_hand, parameter)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert metrics["learner/teacher_kl"] == pytest.approx(
        float((divergence * MASK).sum() / MASK.sum()), abs=1e-5
    )
    assert expected.abs().max() > 1e-3


def test_rows_without_a_teachers_log_probs_are_an_error():
    with pytest.raises(ConfigError, match=r"opd.* without log-probs of a teacher"):
        distilled(PolicySettings(adv_estimator="opd"))


@only_rank()
def test_the_loss_of_distillation_is_verls():
    """verl's k1 loss as a policy gradient: the same loss, and the same gradient by the log-probs."""
    from tensordict import TensorDict
    from verl.trainer.distillation.losses import distillation_loss
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    fields, options = teacher_tokens(), PolicySettings(adv_estimator="opd", gamma=0.0)
    own = fields["engine_logprobs"]
    numbers = {"dp_size": 1, "batch_num_tokens": sum(LENGTHS), "global_batch_size": 4}
    leaf, config = own.clone().requires_grad_(), actor_config(options)
    config.global_batch_info.update(numbers, loss_scale_factor=None)
    loss, _ = verl_api.POLICY_LOSS_REGISTRY["vanilla"](
        old_log_prob=own,
        log_prob=leaf,
        advantages=distilled(options, **fields)[0],
        response_mask=MASK,
        loss_agg_mode="token-mean",
        config=config,
    )
    found = loss.detach(), torch.autograd.grad(loss, leaf)[0]

    def packed(matrix: torch.Tensor) -> torch.Tensor:
        """Join rows of one prompt token each; a log-prob is in the place of the token before."""
        return torch.cat(
            [torch.cat([row[:n], torch.zeros(1)]) for row, n in zip(matrix, LENGTHS, strict=True)]
        )

    leaf = own.clone().requires_grad_()
    tensors = {
        "prompts": torch.ones(4, 1, dtype=torch.long),
        "responses": torch.ones(4, 5, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(4, 1), MASK], 1).long(),
        "response_mask": MASK,
        "old_log_probs": own,
    }
    data = TensorDict(tensors, batch_size=4)
    batch = {name: data[name] for name in tensors} | numbers
    batch["teacher_logprobs"] = packed(fields["teacher_logprobs"])[:, None]  # without a row for each rollout
    loss_config = DistillationLossConfig(loss_mode="k1", loss_max_clamp=10.0)
    loss, _ = distillation_loss(
        actor_config(options),
        DistillationConfig(distillation_loss=loss_config),
        {"log_probs": packed(leaf)},
        batch,
    )
    expected = loss.detach(), torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_penalty_k3_is_at_most_10_and_has_no_gradient_beyond():
    """It reaches 10 where the reference's probability is 13.6 times the policy's."""
    ratios = torch.tensor([1e-3, 0.5, 1.0, 2.0, 13.5, 13.7, 1e4], dtype=torch.float64)
    own = torch.zeros_like(ratios, requires_grad=True)
    penalty = verl_api.kl_penalty(own, ratios.log(), "k3")
    exact = ratios - ratios.log() - 1
    torch.testing.assert_close(penalty, exact.clamp(max=10.0))
    penalty.sum().backward()
    torch.testing.assert_close(own.grad, torch.where(exact <= 10, 1 - ratios, 0.0))
