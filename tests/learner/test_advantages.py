"""Advantages of rollouts: reference values, and independence of the number of rows per rollout."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raylight.errors import ConfigError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import shard_batch
from raylight.experience.settings.advantages import ADVANTAGES
from raylight.experience.settings.losses import LOSSES
from raylight.experience.settings.policy_settings import CriticSettings, PolicySettings
from raylight.experience.settings.registry import advantage_estimator
from raylight.experience.trajectories.reward_rules import TurnReward
from raylight.experience.trajectories.turns import CreditedTurn
from raylight.learner.losses.advantages import (
    Estimate,
    KlController,
    RolloutSequences,
    compare_spans,
    estimate,
    estimate_opd,
)
from raylight.learner.tokens.rows import TrainRow, build_rows
from raylight.types import Trajectory

LENGTHS = [3, 1, 4, 2]
REWARDS = [1.0, 0.0, 0.5, 2.0]
GROUPS = ["a", "a", "b", "b"]


def trajectory(responses: list[int]) -> Trajectory:
    """A prompt of two tokens, then responses of these lengths, separated by observations of one token."""
    mask = [0, 0] + [m for i, n in enumerate(responses) for m in [0] * (i > 0) + [1] * n]
    return Trajectory("r", list(range(len(mask))), mask, [-0.5 * m for m in mask], [m - 1 for m in mask])


def batch_of(rollouts: list[list[list[int]]], rewards=None, groups=None, **more) -> TrainBatch:
    """A batch from the response lengths of each row of each rollout."""
    rows = [trajectory(row) for rollout in rollouts for row in rollout]
    owners = [owner for owner, rollout in enumerate(rollouts) for _ in rollout]
    return TrainBatch(
        rewards or REWARDS[: len(rollouts)], groups or GROUPS[: len(rollouts)], rows, owners, **more
    )


def test_a_span_of_a_teacher_with_other_tokens_has_one_log_ratio():
    """Written out by hand: spans of two tokens, one, and one that is not judged."""
    own = torch.tensor([[-1.0, -2.0, -0.5, -3.0, 0.0]])
    teacher = torch.tensor([[torch.nan, -1.5, -1.0, torch.inf, torch.nan]])
    found = compare_spans(teacher, own)
    assert found["teacher_log_ratios"].tolist() == [[0.0, 1.5, -0.5, 0.0, 0.0]]
    for gamma, expected in ((0.0, [1.5, 1.5, -0.5, 0.0]), (1.0, [1.0, 1.0, -0.5, 0.0])):
        advantages = estimate_opd(
            torch.zeros(1, 5), torch.ones(1, 5), np.array(["g"]), True, gamma, reward_coef=0.0, **found
        )
        assert advantages[0, :4].tolist() == pytest.approx(expected)
    same = compare_spans(own - 1, own)
    assert same["teacher_log_ratios"].tolist() == [[-1.0] * 5]
    assert same["span_ends"].all()


def policy_settings(adv_estimator: str, **given) -> PolicySettings:
    critic = CriticSettings() if adv_estimator == "gae" else None
    if adv_estimator == "gdpo":
        given["reward_weights"] = {"right": 1.0, "short": 0.5}
        given.pop("kl_reward_coef", None)  # it reads no rewards of tokens
    if adv_estimator == "opd":
        given["reward_coef"] = 0.5
    return PolicySettings(adv_estimator=adv_estimator, critic=critic, **given)


def rows_of(batch: TrainBatch) -> list[TrainRow]:
    (shard,) = shard_batch(batch, PolicySettings(), 1)
    return list(build_rows(shard.rows, batch.owners).values())


def estimate_rows(
    batch: TrainBatch, rows: list[TrainRow], config: PolicySettings, kl: KlController | None = None
) -> Estimate:
    """Estimate from the fields of the rows, and assign the result to them."""
    (shard,) = shard_batch(batch, config, 1)
    sequences = RolloutSequences(shard.outline)
    fields = ("old_logprobs", "ref_logprobs", "values", "sum_pi_squared", "teacher_log_ratios")
    matrices = {
        name: sequences.matrix({row.index: getattr(row, name)[row.mask == 1].numpy() for row in rows})
        for name in fields
        if getattr(rows[0], name, None) is not None
    }
    result = estimate(shard.outline, sequences, matrices, config, kl or KlController(config))
    result.assign(rows)
    return result


def advantages_of(batch: TrainBatch, name: str, fields=None, **given) -> list[list[float]]:
    """Return the advantages of each rollout's sampled tokens.

    Args:
        fields: further fields of the rows: a list of values per rollout, one per sampled token.
    """
    config = policy_settings(name, **given)
    rows = rows_of(batch)
    for field, by_rollout in (fields or {}).items():
        rest = [list(values) for values in by_rollout]
        for row in rows:
            values = torch.full(
                (len(row.response),), 9.0
            )  # the value of observations, which must not be read
            count = int(row.mask.sum())
            values[row.mask == 1] = torch.tensor(rest[row.rollout][:count])
            rest[row.rollout] = rest[row.rollout][count:]
            setattr(row, field, values)
    estimate_rows(batch, rows, config)
    advantages = [[] for _ in batch.rewards]
    for row in rows:
        assert row.advantages[row.mask == 0].abs().sum() == 0
        advantages[row.rollout] += row.advantages[row.mask == 1].tolist()
    return advantages


def plain(lengths=LENGTHS, **more) -> TrainBatch:
    return batch_of([[[n]] for n in lengths], **more)


def per_token(values: list[float]) -> list[list[float]]:
    return [[pytest.approx(value, abs=1e-5)] * n for value, n in zip(values, LENGTHS, strict=True)]


def whitened(values: list[float]) -> list[float]:
    """Whiten values of rollouts over all their tokens."""
    tokens = np.repeat(values, LENGTHS)
    return [(value - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) for value in values]


def test_the_registry_has_verls_names():
    from raylight.learner import verl_api

    def verl_names(registered: dict) -> set[str]:  # other tests may have added theirs
        return {name for name, function in registered.items() if function.__module__.startswith("verl.")}

    assert {*ADVANTAGES.names} - {"gigpo", "opd"} == verl_names(verl_api.ADV_ESTIMATOR_REGISTRY)
    assert {*LOSSES.names, *LOSSES.unsupported} == verl_names(verl_api.POLICY_LOSS_REGISTRY)


STD = 0.5**0.5  # of 0 and 1, with Bessel's correction


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.5 / STD, -0.5 / STD, -0.75 / (1.5 * STD), 0.75 / (1.5 * STD)]),
        ("grpo_vectorized", [0.5 / STD, -0.5 / STD, -0.75 / (1.5 * STD), 0.75 / (1.5 * STD)]),
        ("rloo", [1.0, -1.0, -1.5, 1.5]),
        ("rloo_vectorized", [1.0, -1.0, -1.5, 1.5]),
        ("opo", [1 - 0.75, -0.75, 0.5 - 1.0, 2 - 1.0]),
        ("gpg", [4 / 3 * 0.5, -4 / 3 * 0.5, -4 / 3 * 0.75, 4 / 3 * 0.75]),
        ("grpo_passk", [1 / STD, 0.0, 0.0, 1.5 / (1.5 * STD)]),
        ("reinforce_plus_plus", whitened(REWARDS)),
        ("reinforce_plus_plus_baseline", whitened([0.5, -0.5, -0.75, 0.75])),
    ],
)
def test_estimators_match_their_papers(name, expected):
    assert advantages_of(plain(), name) == per_token(expected)


def test_grpo_without_standard_deviation_is_dr_grpo():
    assert advantages_of(plain(), "grpo", norm_adv_by_std=False) == per_token([0.5, -0.5, -0.75, 0.75])


# without estimators that whiten over the batch, where an advantage of 0 may differ from the mean
@pytest.mark.parametrize(
    "name", ["gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "rloo", "rloo_vectorized"]
)
@pytest.mark.parametrize("reward", [0.1, 0.7, 100.1, -12345.6])
def test_equal_rewards_give_no_advantage_from_rounding(name, reward):
    for size in (3, 5, 6, 7):
        rewards, groups = [reward] * size + [0.0, 1.0], ["a"] * size + ["b", "b"]
        told = advantages_of(plain([2] * len(rewards), rewards=rewards, groups=groups), name)
        assert told[:size] == [[pytest.approx(0, abs=1e-5)] * 2] * size
        assert told[-1][0] >= 0.5


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_single_token_has_the_whitened_advantage_zero(name):
    fields = {"values": [[0.25]]} if name == "gae" else None
    assert advantages_of(plain([1], rewards=[3.0], groups=["a"]), name, fields) == [[0.0]]
    if name == "gae":
        batch, config = plain([1], rewards=[3.0], groups=["a"]), policy_settings(name)
        rows = rows_of(batch)
        rows[0].values = torch.tensor([0.25])
        estimate_rows(batch, rows, config)
        assert rows[0].returns.tolist() == [3.0]


def test_the_reward_of_a_turn_of_forced_tokens_is_on_the_last_choice_before_it():
    """The rows are a prompt, a choice (token 2), forced tokens, and a choice (token 5)."""
    row = Trajectory("r", list(range(6)), [0, 0, 1, 0, 0, 1], [0.0] * 6, [-1] * 6)
    forced_first = Trajectory("r", list(range(4)), [0, 0, 0, 1], [0.0] * 4, [-1] * 4)
    for rows, token, expected in (([row], 4, [1.0, 0.0]), ([forced_first, row], 2, [1.0, 0.0, 0.0])):
        batch = TrainBatch([0.0], ["a"], rows, [0] * len(rows), turn_rewards=[TurnReward(1.0, 0, 0, token)])
        (shard,) = shard_batch(batch, PolicySettings(), 1)
        assert RolloutSequences(shard.outline).rewards().tolist() == [expected]


def test_remax_subtracts_the_baselines():
    assert advantages_of(plain(baselines=[0.25, 0.25, 1.0, 1.0]), "remax") == per_token(
        [0.75, -0.25, -0.5, 1.0]
    )


def gae(rewards, values, gamma, lam):
    """Reference: the sum of discounted temporal differences."""
    after = [*values[1:], 0.0]
    errors = [r + gamma * v1 - v for r, v, v1 in zip(rewards, values, after, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))
    ]


def test_gae_skips_observations_and_is_whitened_over_the_batch():
    values = [[0.1, 0.2, 0.3], [0.4], [0.0, 0.5, 0.1, 0.2], [0.3, 0.6]]
    raw = [gae([0.0] * (n - 1) + [r], v, 0.9, 0.8) for n, r, v in zip(LENGTHS, REWARDS, values, strict=True)]
    tokens = np.concatenate(raw)
    expected = [
        [pytest.approx((a - tokens.mean()) / tokens.std(ddof=1), abs=1e-4) for a in one] for one in raw
    ]
    in_turns = batch_of([[[1, 2]], [[1]], [[2], [1, 1]], [[1], [1]]])
    for batch in (plain(), in_turns):
        assert advantages_of(batch, "gae", {"values": values}, gamma=0.9, lam=0.8) == expected


def test_turn_rewards_are_on_the_last_token_of_their_call():
    batch = batch_of([[[1, 2], [3]], [[1]]], [1.0, 0.0], ["a", "a"])
    batch.turn_rewards.extend(
        [TurnReward(0.5, 0, 0, 2), TurnReward(0.25, 0, 0, 5), TurnReward(2.0, 0, None, 7)]
    )
    assert batch.rows[0].mask.tolist() == [0, 0, 1, 0, 1, 1]
    config = PolicySettings(adv_estimator="reinforce_plus_plus", gamma=0.5)
    rows = rows_of(batch)
    estimate_rows(batch, rows, config)
    later = 3.0 * 0.5**3  # the final reward and that of a truncated call, on the last token
    assert rows[0].returns.tolist() == pytest.approx(
        [0.5 + 0.5 * (0.5 * 0.25) + later / 4, 0.0, 0.5 * 0.25 + later / 2 + 0.0, 0.25 + later], abs=1e-6
    )
    assert rows[1].returns.tolist() == pytest.approx([0.75, 1.5, 3.0])


def gigpo(rollouts, groups, gamma, turn_coef, rollout_coef, by_std):
    """Reference: GiGPO by loops. A rollout is a list of turns (state, reward); the result is one per turn."""

    def relative(values):
        values = np.array(values)
        if len(values) < 2:
            return values - values
        return (values - values.mean()) / (values.std(ddof=1) + 1e-6 if by_std else 1.0)

    totals = [sum(reward for _, reward in turns) for turns in rollouts]
    returns = {
        (i, t): sum(gamma ** (k - t) * turns[k][1] for k in range(t, len(turns)))
        for i, turns in enumerate(rollouts)
        for t in range(len(turns))
    }
    of_turns = {}
    for group in set(groups):
        members = [i for i, own in enumerate(groups) if own == group]
        of_rollouts = dict(zip(members, relative([totals[i] for i in members]), strict=True))
        for state in {state for i in members for state, _ in rollouts[i]}:
            places = [(i, t) for i in members for t, turn in enumerate(rollouts[i]) if turn[0] == state]
            for place, value in zip(places, relative([returns[place] for place in places]), strict=True):
                of_turns[place] = turn_coef * value + rollout_coef * of_rollouts[place[0]]
    return [[of_turns[i, t] for t in range(len(turns))] for i, turns in enumerate(rollouts)]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("coefs", [(1.0, 1.0), (0.3, 0.0), (2.0, 0.5)])
def test_gigpo_compares_turns_of_equal_states(by_std, coefs):
    """Each row has two turns, of 1 and 2 tokens in the first row and of 2 and 1 in the second."""
    generator = np.random.default_rng(0)
    groups = ["a", "a", "a", "b", "b"]
    rollouts = [
        [(f"s{generator.integers(3)}", float(reward)) for reward in generator.normal(size=4)] for _ in groups
    ]
    batch = batch_of(
        [[[1, 2], [2, 1]] for _ in groups], [sum(r for _, r in turns) for turns in rollouts], groups
    )
    ends = [(0, 2), (0, 5), (1, 3), (1, 5)]  # row of the rollout, index of the turn's last token
    batch.turns.extend(
        CreditedTurn(i, 2 * i + row, token, state, reward)
        for i, turns in enumerate(rollouts)
        for (row, token), (state, reward) in zip(ends, turns, strict=True)
    )
    turn_coef, rollout_coef = coefs
    config = PolicySettings(
        adv_estimator="gigpo",
        turn_gamma=0.9,
        turn_coef=turn_coef,
        rollout_coef=rollout_coef,
        norm_adv_by_std=by_std,
    )
    rows = rows_of(batch)
    estimate_rows(batch, rows, config)
    expected = gigpo(rollouts, groups, 0.9, turn_coef, rollout_coef, by_std)
    for i, of_turns in enumerate(expected):
        found = torch.cat([row.advantages[row.mask == 1] for row in rows if row.rollout == i]).tolist()
        tokens = [value for value, length in zip(of_turns, (1, 2, 2, 1), strict=True) for _ in range(length)]
        assert found == pytest.approx(tokens, abs=1e-5, rel=1e-5)


def test_gigpo_needs_the_turns_of_rollouts():
    with pytest.raises(ConfigError, match="was given rollouts without turns"):
        advantages_of(plain(), "gigpo")


def test_the_kl_penalty_is_subtracted_from_token_rewards():
    old, ref = [[-1.0, -2.0], [-0.5]], [[-1.5, -1.0], [-0.75]]
    batch = batch_of([[[1], [1]], [[1]]], [1.0, 0.0], ["a", "a"])
    found = advantages_of(batch, "rloo", {"old_logprobs": old, "ref_logprobs": ref}, kl_reward_coef=0.1)
    first, second = 1.0 - 0.1 * (0.5 - 1.0), 0.0 - 0.1 * 0.25
    assert found == [[pytest.approx(first - second)] * 2, [pytest.approx(second - first)]]


def test_the_kl_coefficient_adapts_to_its_target():
    config = PolicySettings(kl_reward_coef=0.1, kl_target=0.1, kl_horizon=100)
    controller = KlController(config)
    batch = plain(REWARDS and [1, 1, 1, 1])
    rows = rows_of(batch)
    for row in rows:
        row.old_logprobs, row.ref_logprobs = torch.tensor([-1.0]), torch.tensor([-2.0])
    metrics = estimate_rows(batch, rows, config, controller).metrics
    assert (metrics["learner/kl_in_reward"], metrics["learner/kl_reward_coef"]) == (1.0, 0.1)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    # rollouts without trained tokens have no KL
    masked = TrainBatch([*batch.rewards, 0.0, 0.0], [*batch.groups, "a", "b"], batch.rows, batch.owners)
    controller = KlController(config)
    assert estimate_rows(masked, rows, config, controller).metrics["learner/kl_in_reward"] == 1.0
    assert controller.coef == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    fixed = KlController(PolicySettings(kl_reward_coef=0.1))
    fixed.update(5.0, 4)
    assert fixed.coef == 0.1


responses = st.lists(st.integers(1, 3), min_size=1, max_size=4)


# gigpo reads turns, which have their own tests
@given(
    st.lists(responses, min_size=4, max_size=4),
    st.data(),
    st.sampled_from([name for name in ADVANTAGES.names if name != "gigpo"]),
)
def test_advantages_do_not_depend_on_the_rows_of_a_rollout(rollouts, data, name):
    numbers = st.floats(-1, 1, width=32)
    totals = [sum(turns) for turns in rollouts]
    fields = {
        field: [data.draw(st.lists(numbers, min_size=n, max_size=n)) for n in totals]
        for field in ("values", "old_logprobs", "ref_logprobs", "sum_pi_squared", "teacher_log_ratios")
    }
    more = {"baselines": [0.5, 0.25, 0.0, 1.0]} if name == "remax" else {}
    more |= {"parts": [(1.0, 0.0), (0.0, 0.5), (0.5, 1.0), (2.0, 0.0)]} if name == "gdpo" else {}
    one_row = batch_of([[turns] for turns in rollouts], **more)
    split = batch_of([[[n] for n in turns] for turns in rollouts], **more)
    options = {"gamma": 0.9, "lam": 0.8, "kl_reward_coef": 0.1}
    expected = advantages_of(one_row, name, fields, **options)
    for one, other in zip(advantages_of(split, name, fields, **options), expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_rollout_without_rows_counts_in_its_group():
    batch = plain([1, 1, 1])
    left = TrainBatch(batch.rewards, ["a", "a", "a"], batch.rows[:2], batch.owners[:2])
    assert advantages_of(left, "grpo", norm_adv_by_std=False) == [
        [pytest.approx(0.5)],
        [pytest.approx(-0.5)],
        [],
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("opo", 1 - 4 * 1.0 / 104),
        ("optimal_token_baseline", 0.5),  # the group's mean, as its weight is the other's
        ("tir_optimal_token_baseline", 0.5),
        ("rloo", 1.0),
        ("grpo", 0.5 / STD),
    ],
)
def test_the_reward_of_a_masked_rollout_counts_in_its_group(name, expected):
    """It is 0 for 100 tokens; the other rollout has the reward 1 for 4 tokens."""
    fields = {"old_logprobs": [[], [-1.0] * 4], "sum_pi_squared": [[], [0.3] * 4]}
    batch = batch_of([[], [[4]]], [0.0, 1.0], ["a", "a"], lengths=[100, 4])
    assert advantages_of(batch, name, fields) == [[], [pytest.approx(expected, abs=1e-5)] * 4]


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_masked_rollout_has_the_mean_weight_of_the_others_up_to_its_length(name):
    fields = {"old_logprobs": [[], [-1.0] * 4, [-2.0] * 2], "sum_pi_squared": [[], [0.3] * 4, [0.3] * 2]}
    left = batch_of([[[4]], [[2]]], [1.0, 0.5], ["a"] * 2)
    without = {name: values[1:] for name, values in fields.items()}
    verls = advantages_of(left, name, without)
    baseline = 1.0 - verls[0][0]
    assert verls == [pytest.approx([1 - baseline] * 2 + [1.0] * 2), pytest.approx([0.5 - baseline] * 2)]
    for length, reward in ((0, 9.0), (1, 0.0), (3, 0.25), (100, -2.0)):
        masked = batch_of([[], [[4]], [[2]]], [reward, 1.0, 0.5], ["a"] * 3, lengths=[length, 4, 2])
        baselines = [(2 * baseline + reward) / 3 if t < length else baseline for t in (0, 1)]
        baselines += [(1.0 + reward) / 2 if t < length else 0.0 for t in (2, 3)]
        expected = [[r - b for b in baselines[:n]] for r, n in ((1.0, 4), (0.5, 2))]
        assert advantages_of(masked, name, fields) == [
            [],
            *(pytest.approx(one, abs=1e-5) for one in expected),
        ]


@pytest.mark.parametrize(
    "options", [{"loss_agg_mode": "seq-mean-token-mean"}, {"loss_mode": "sapo"}, {"loss_mode": "geo_mean"}]
)
def test_advantages_are_the_rollouts_and_rows_know_their_length_if_the_loss_averages_rows(options):
    batch = batch_of([[[3], [1]], [[2]]], [1.0, 0.0], ["a", "a"])
    assert advantages_of(batch, "rloo", **options) == [
        pytest.approx([1.0] * 4),
        pytest.approx([-1.0] * 2),
    ]
    rows, config = rows_of(batch), policy_settings("rloo", **options)
    estimate_rows(batch, rows, config)
    assert [row.rollout_fraction for row in rows] == [0.75, 0.25, 1.0]


def test_a_users_estimator_receives_its_parameters():
    @advantage_estimator("own_halves")
    def halves(token_level_rewards, response_mask, gamma):
        return gamma * token_level_rewards.sum(-1, keepdim=True) * response_mask

    assert advantages_of(plain(), "own_halves", gamma=0.5) == per_token([0.5, 0.0, 0.25, 1.0])


def test_a_result_of_another_shape_raises():
    @advantage_estimator("own_wrong")
    def wrong(token_level_rewards):
        return token_level_rewards.sum(-1)

    with pytest.raises(ConfigError, match=r"own_wrong.*\(4,\).*\(4, 4\)"):
        advantages_of(plain(), "own_wrong")


def test_non_finite_advantages_raise():
    @advantage_estimator("own_by_deviation")
    def by_deviation(token_level_rewards, response_mask):
        scores = token_level_rewards.sum(-1, keepdim=True)
        return (scores - scores.mean()) / scores.std() * response_mask

    assert advantages_of(plain(), "own_by_deviation")
    with pytest.raises(
        ConfigError, match=r"own_by_deviation.*not finite for 10 of 10 sampled tokens.*deviation of 0"
    ):
        advantages_of(plain(rewards=[1.0] * 4), "own_by_deviation")
    with pytest.raises(ConfigError, match=r"'rloo'.*a reward is out of range"):
        advantages_of(plain(rewards=[1e300, 0.0, 0.0, 1.0]), "rloo")


def test_weights_multiply_the_advantages_of_their_rollouts() -> None:
    rollouts = [[[n]] for n in LENGTHS]
    plain = advantages_of(batch_of(rollouts), "grpo")
    weighted = advantages_of(batch_of(rollouts, weights=[1.0, 0.5, 2.0, 1.0]), "grpo")
    for factor, own, others in zip([1.0, 0.5, 2.0, 1.0], weighted, plain, strict=True):
        assert own == pytest.approx([factor * value for value in others])
