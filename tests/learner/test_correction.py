"""Rollout correction and mismatch metrics against reference values, on one and two ranks."""

import math
from dataclasses import replace

import correction_ranks
import numpy as np
import pytest
import torch
from correction_ranks import APART, CASES, MASKS, make_rows, measured, run_case
from rank_processes import run_ranks
from ranks import make_batch, plain_logprobs
from transformers import AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.errors import MismatchError
from raylight.experience.settings.correction_settings import (
    REJECTION_CRITERIA,
    CorrectionSettings,
    default_limit,
)
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL

RATIOS = [
    math.exp(a)
    for apart, mask in zip(APART, MASKS, strict=True)
    for a, kept in zip(apart, mask, strict=True)
    if kept
]


pytestmark = pytest.mark.usefixtures("one_rank")


def corrected(name):
    rows = make_rows()
    return rows, run_case(rows, CASES[name])


def weights_of(rows):
    return [row.weights.tolist() for row in rows]


def close(rows):
    return [pytest.approx(row, rel=1e-5) for row in rows]


def test_token_weights_are_truncated_ratios():
    rows, metrics = corrected("token")
    expected = [
        [min(math.exp(a), 1.3) * kept for a, kept in zip(apart, mask, strict=True)]
        for apart, mask in zip(APART, MASKS, strict=True)
    ]
    assert weights_of(rows) == close(expected)
    assert rows[0].weights[2] == 0  # an observation
    assert not any(row.weights.requires_grad for row in rows)
    assert [row.mask.tolist() for row in rows] == MASKS
    cut = [min(r, 1.3) for r in RATIOS]
    mean = sum(cut) / len(cut)
    assert metrics == pytest.approx(
        {
            "mismatch/weight_mean": mean,
            "mismatch/weight_min": math.exp(-1.5),
            "mismatch/weight_max": 1.3,
            "mismatch/weight_std": (sum(c * c for c in cut) / len(cut) - mean**2) ** 0.5,
            "mismatch/weight_ess": sum(cut) ** 2 / (len(cut) * sum(c * c for c in cut)),
            "mismatch/truncated": 5 / 11,
        },
        rel=1e-4,
    )


def test_row_weights_are_products_of_ratios():
    rows, metrics = corrected("sequence")
    assert weights_of(rows) == close(
        [[2, 2, 0], [0.75] * 2, [1.1 / 1.2 * 1.5] * 4, [math.exp(-1.5)], [2.0] * 2]
    )
    assert metrics["mismatch/truncated"] == pytest.approx(
        4 / 11
    )  # the first row's product is the threshold itself


def test_icepop_zeroes_weights_outside_its_bounds():
    rows, metrics = corrected("icepop")
    assert weights_of(rows) == close([[1, 2, 0], [0, 0], [1.1, 1 / 1.2, 1, 1.5], [0], [0, 0]])
    assert metrics["mismatch/truncated"] == pytest.approx(5 / 11)
    assert metrics["mismatch/weight_min"] == 0


def test_normalized_weights_have_mean_one():
    rows, metrics = corrected("normalised")
    flat = torch.cat([row.weights[row.mask == 1] for row in rows])
    assert float(flat.mean()) == pytest.approx(1, abs=1e-5)
    assert float(flat[0]) == pytest.approx(1 / metrics["mismatch/weight_mean"], rel=1e-5)
    rows, _ = corrected("normalised rows")
    assert sum(float(row.weights[0]) for row in rows) / len(rows) == pytest.approx(1, abs=1e-5)


def test_a_geometric_criterion_rejects_rows_and_keeps_observations_masked():
    rows, metrics = corrected("geometric")
    means = [
        2**0.5,
        0.75**0.5,
        (1.1 / 1.2 * 1.5) ** 0.25,
        math.exp(-1.5),
        math.exp(2),
    ]  # of learner to engine
    kept = [0.7 <= 1 / mean <= 1.2 for mean in means]
    assert kept == [True, True, True, False, False]
    assert [row.mask.tolist() for row in rows] == [MASKS[0], MASKS[1], MASKS[2], [0], [0, 0]]
    assert all(row.weights is None for row in rows)
    assert metrics == pytest.approx({"mismatch/rejected_tokens": 3 / 11, "mismatch/rejected_rows": 2 / 5})


def test_accepted_tokens_of_several_criteria_are_weighted():
    rows, metrics = corrected("both")
    assert [row.mask.tolist() for row in rows] == [[1, 1, 0], [0, 0], [1, 1, 1, 1], [0], [0, 0]]
    assert rows[0].weights.tolist() == pytest.approx([1, 2, 0])
    assert metrics["mismatch/rejected_tokens"] == pytest.approx(5 / 11)


@pytest.mark.parametrize("threshold", [1.3, "0.2_5.0"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_equal_verls(level, threshold):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    torch.manual_seed(0)
    apart, mask = (
        torch.randn(len(APART), 4),
        torch.nn.utils.rnn.pad_sequence([torch.tensor(m) for m in MASKS], batch_first=True),
    )
    rows = make_rows()
    for row, values in zip(rows, apart, strict=True):
        row.old_logprobs = row.engine_logprobs + values[: len(row.response)]
    run_case(rows, {"rollout_is": level, "rollout_is_threshold": threshold})
    log_ratio = torch.nn.utils.rnn.pad_sequence(
        [row.old_logprobs - row.engine_logprobs for row in rows], batch_first=True
    )
    theirs, _ = compute_rollout_correction_weights(log_ratio, mask, level, threshold)
    assert weights_of(rows) == [row[:n].tolist() for row, n in zip(theirs, map(len, APART), strict=True)]


def test_rejecting_all_tokens_raises():
    for settings in (CASES["nothing"], {"rollout_is": "token", "rollout_is_threshold": "0.4_0.45"}):
        rows = make_rows()
        assert run_case(rows, settings) == "rollout correction leaves no token to train on"


def test_every_criterion_exists_in_verl():
    for name in sorted(REJECTION_CRITERIA):
        rows = make_rows()
        assert "mismatch/rejected_tokens" in run_case(
            rows, {"rollout_rs": name, "rollout_rs_threshold": 100.0}
        ), name


def test_mismatch_metrics():
    n = len(RATIOS)
    fresh = [abs(a) for row in range(3) for a, kept in zip(APART[row], MASKS[row], strict=True) if kept]
    k1 = -sum(math.log(r) for r in RATIOS) / n
    assert measured(make_rows()) == pytest.approx(
        {
            "mismatch/logprob_abs_max": math.log(4),
            "mismatch/logprob_abs_p999": math.log(4),
            "mismatch/logprob_abs_mean": sum(fresh) / len(fresh),
            "mismatch/kl": k1,
            "mismatch/kl_k3": sum(RATIOS) / n - 1 + k1,
            "mismatch/ess": sum(RATIOS) ** 2 / (n * sum(r * r for r in RATIOS)),
            "mismatch/stale_fraction": 3 / 11,
            "mismatch/stale_logprob_abs_mean": (1.5 + 2 + 2) / 3,
            "mismatch/stale_logprob_abs_p999": 2.0,
            "mismatch/stale_kl": (1.5 - 2 - 2) / 3,
            "mismatch/warned": 0.0,
        },
        rel=1e-5,
    )


def test_a_mismatch_warns_then_raises():
    from raylight.learner.losses.correction import measure

    def known(**settings):
        return measure(make_rows(), 3, CorrectionSettings(**settings))

    assert known(max_logprob_mismatch=20.0)["mismatch/warned"] == 0.0
    assert known(max_logprob_mismatch=20.0, warn_logprob_mismatch=0.4)["mismatch/warned"] == 1.0
    assert known(max_logprob_mismatch=1.0)["mismatch/logprob_abs_max"] > 1.0  # the mean is below
    with pytest.raises(MismatchError, match=r"differ by 0\.48 on average .* for weight version 3"):
        known(max_logprob_mismatch=0.3)
    handled: list[dict] = [CASES["token"], CASES["geometric"], {"bypass_mode": True}]
    for settings in handled:
        assert known(max_logprob_mismatch=0.3, **settings)["mismatch/warned"] == 1.0
    rows = make_rows()
    rows[4].old_logprobs[1] = math.nan  # of an older version, but still a fault
    for settings in ({}, {"bypass_mode": True}):
        with pytest.raises(MismatchError, match="NaN"):
            measure(rows, 3, CorrectionSettings(max_logprob_mismatch=20.0, **settings))


def test_a_batch_of_older_versions_is_measured():
    from raylight.learner.losses.correction import measure

    metrics = measure(make_rows(), 9, CorrectionSettings(max_logprob_mismatch=1e-3))
    assert metrics["mismatch/stale_fraction"] == 1.0
    assert metrics["mismatch/warned"] == 0.0
    assert "mismatch/logprob_abs_mean" not in metrics
    assert metrics["mismatch/stale_kl"] == metrics["mismatch/kl"]
    assert "mismatch/stale_kl" not in heavy_metrics()
    assert metrics["mismatch/kl"] == pytest.approx(-sum(map(math.log, RATIOS)) / len(RATIOS))


def heavy_tailed_rows(tokens=200_000, scale=0.03):
    """Rows whose differences have the mean of a dense model in bfloat16, and a few tokens far off."""
    row = make_rows()[0]
    differences = scale * torch.randn(tokens, generator=torch.Generator().manual_seed(0))
    differences[:20] = 4.0
    engine, ids = -torch.ones(tokens), torch.arange(tokens)
    mask, versions = torch.ones(tokens, dtype=torch.long), torch.full((tokens,), 3)
    long = replace(row, response=ids, mask=mask, engine_logprobs=engine, versions=versions)
    return [replace(long, old_logprobs=engine + differences)], differences.abs()


def heavy_metrics():
    from raylight.learner.losses.correction import measure

    return measure(heavy_tailed_rows()[0], 3, CorrectionSettings(max_logprob_mismatch=2.0))


def test_one_token_in_ten_thousand_ends_no_run_in_half_precision():
    from raylight.learner.losses.correction import measure

    rows, differences = heavy_tailed_rows()
    metrics = measure(rows, 3, CorrectionSettings(max_logprob_mismatch=default_limit(False, False)))
    assert metrics["mismatch/logprob_abs_max"] == 4.0
    assert metrics["mismatch/warned"] == 0.0
    expected = float(np.quantile(differences.numpy(), 0.999))
    assert expected <= metrics["mismatch/logprob_abs_p999"] <= 1.025 * expected
    with pytest.raises(MismatchError, match=r"at the 99\.9 % quantile \(allowed: 0\.5\)"):
        measure(heavy_tailed_rows(4000)[0], 3, CorrectionSettings(max_logprob_mismatch=0.05))
    with pytest.raises(MismatchError, match="on average"):
        measure(heavy_tailed_rows(scale=0.5)[0], 3, CorrectionSettings(max_logprob_mismatch=0.3))


@pytest.mark.slow
def test_two_ranks_equal_one():
    (one,), two = (run_ranks(correction_ranks.main, ranks) for ranks in (1, 2))
    for name in one:
        if name.endswith(("weights", "masks")):
            merged = two[0][name] | two[1][name]
            assert {row: pytest.approx(values) for row, values in one[name].items()} == merged, name
        else:
            assert two[0][name] == two[1][name], name
            assert two[0][name] == (
                one[name] if isinstance(one[name], str | bool) else pytest.approx(one[name])
            ), name
    assert not any(map(any, two[1]["one row masks"].values()))  # all rows of the second rank are rejected
    assert two[0]["one row left"]


def make_policy(**settings):
    from raylight.learner.updates.policy import Policy

    known = PolicySettings(**{"lr": 1e-3, "grad_clip": 1e6, "max_logprob_mismatch": 3.0, **settings})
    return Policy(STARTER_MODEL, LearnerConfig(), known, total_steps=4)


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(STARTER_MODEL)


SHIFT = [0.3 * (i % 4) - 0.5 for i in range(8)]
"""Log ratio of learner to engine for all tokens of each row."""


def shifted(plain):
    with torch.no_grad():
        found = [logprobs.tolist() for logprobs in plain_logprobs(plain)]
    return make_batch([[x - shift for x in row] for row, shift in zip(found, SHIFT, strict=True)])


def plain_norm(plain, batch, weights):
    """Reference gradient norm of the policy loss at the first step, with a weight per row; None rejects the
    row."""
    from test_policy import expected_advantages

    plain.zero_grad()
    terms = [
        -(p - p.detach()).exp() * a * w
        for p, a, w in zip(plain_logprobs(plain), expected_advantages(batch), weights, strict=True)
        if w is not None
    ]
    torch.cat(terms).mean().backward()
    return float(torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm())


def test_weights_and_masks_reach_the_gradient(plain):
    batch = shifted(plain)
    ratios = [math.exp(shift) for shift in SHIFT]
    cases = [
        ({}, [1.0] * 8),
        ({"rollout_is": "token", "rollout_is_threshold": 1.2}, [min(r, 1.2) for r in ratios]),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.7_1.2"},
            [r if 0.7 <= r <= 1.2 else 0.0 for r in ratios],
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.3"},
            [1.0 if 0.7 <= 1 / r <= 1.3 else None for r in ratios],
        ),
    ]
    norms = []
    for settings, weights in cases:
        norms.append(plain_norm(plain, batch, weights))
        metrics = make_policy(**settings).update(batch)
        assert metrics["learner/grad_norm"] == pytest.approx(norms[-1], rel=1e-4), settings
        assert metrics["mismatch/kl"] == pytest.approx(-_token_mean(batch, SHIFT), abs=1e-4)
    assert min(abs(a - b) for i, a in enumerate(norms) for b in norms[:i]) > 1e-3


def test_an_interpolated_proximal_policy_splits_the_ratio(plain):
    batch = shifted(plain)
    versions = [2, 3, 4, 5] * 2
    rows = [
        replace(row, weight_versions=np.where(row.mask, version, -1))
        for row, version in zip(batch.rows, versions, strict=True)
    ]
    wide = {"clip_ratio_low": 0.9, "clip_ratio_high": 2.0, "max_staleness": 3, "rollout_is_threshold": 1.1}
    policy = make_policy(**wide, proximal="loglinear")
    policy.version = 5
    metrics = policy.update(replace(batch, rows=rows))
    weights, products = [], []
    for shift, version in zip(SHIFT, versions, strict=True):
        fraction = (5 - version) / (6 - version)
        weights.append(min(math.exp(fraction * shift), 1.1))
        products.append(math.exp((1 - fraction) * shift) * weights[-1])
    assert metrics["learner/grad_norm"] == pytest.approx(plain_norm(plain, batch, products), rel=1e-4)
    sizes = [sum(row.mask) for row in batch.rows]
    mean = sum(n * w for n, w in zip(sizes, weights, strict=True)) / sum(sizes)
    assert metrics["mismatch/weight_mean"] == pytest.approx(mean, rel=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx(-_token_mean(batch, SHIFT), abs=1e-4)
    assert metrics["learner/ppo_kl"] == pytest.approx(
        -_token_mean(batch, [s / (6 - v) for s, v in zip(SHIFT, versions, strict=True)]), abs=1e-4
    )


def test_an_interpolated_policy_in_sequences_and_mini_batches(plain):
    batch = shifted(plain)
    settings = {"max_staleness": 3, "proximal": "loglinear", "rollout_is": "sequence", "mini_batches": 2}
    policy = make_policy(**settings, max_logprob_mismatch=10.0)
    policy.version = 2
    assert not policy.settings.needs_old_logprobs
    metrics = policy.update(batch)
    assert metrics["mismatch/weight_max"] <= 2.0
    assert math.isfinite(metrics["learner/pg_loss"])
    tokens = policy.update(batch)  # one version later
    assert tokens["mismatch/stale_fraction"] == 1.0


@pytest.mark.parametrize("learner", [{"max_tokens_per_micro_batch": 20}, {"packed": False}])
def test_an_interpolated_policy_does_not_depend_on_micro_batches(plain, learner):
    from raylight.learner.updates.policy import Policy

    batch = shifted(plain)
    settings = PolicySettings(lr=1e-3, grad_clip=1e6, max_staleness=3, proximal="loglinear", kl_coef=0.1)
    norms = []
    for config in (LearnerConfig(), LearnerConfig(**learner)):
        policy = Policy(STARTER_MODEL, config, settings, total_steps=4)
        policy.version = 3
        norms.append(policy.update(batch)["learner/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("case", ["dropout", "warm-up"])
def test_an_interpolated_policy_where_a_pass_comes_before(plain, case):
    """With dropout or during the critic's warm-up, the log-probs come from a separate pass."""
    from raylight.learner.updates.policy import Policy

    lora = {"rank": 4, "alpha": 8, "dropout": 0.5, "target_modules": ["q_proj"]}
    critic = {"adv_estimator": "gae", "critic": {"warmup_steps": 1, "lr": 1e-3}}
    learner, more = ({"lora": lora}, {}) if case == "dropout" else ({}, critic)
    settings = PolicySettings(max_staleness=3, proximal="loglinear", max_logprob_mismatch=3.0, **more)
    policy = Policy(STARTER_MODEL, LearnerConfig(**learner), settings, total_steps=4)
    policy.version = 3
    metrics = policy.update(shifted(plain))
    assert metrics["mismatch/stale_kl"] == pytest.approx(-_token_mean(shifted(plain), SHIFT), abs=1e-4)
    assert metrics["mismatch/weight_max"] == pytest.approx(math.exp(0.75 * max(SHIFT)), rel=1e-4)


def test_the_default_with_staleness_equals_token_weights(plain):
    batch = shifted(plain)
    norms = [
        make_policy(**settings, max_logprob_mismatch=10.0).update(batch)["learner/grad_norm"]
        for settings in ({"max_staleness": 2}, {"rollout_is": "token"})
    ]
    assert norms[0] == norms[1]


def _token_mean(batch, values):
    sizes = [sum(row.mask) for row in batch.rows]
    return sum(n * value for n, value in zip(sizes, values, strict=True)) / sum(sizes)


def test_a_rejected_mini_batch_takes_no_step(plain):
    batch = shifted(plain)
    odd = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_1.0"}
    kept = [shift >= 0 for shift in SHIFT]
    assert kept == [False, False, True, True] * 2
    for bypass_mode in (False, True):
        metrics = make_policy(mini_batches=4, bypass_mode=bypass_mode, **odd).update(
            batch
        )  # the first two of four hold rollouts 0, 4 and 1, 5
        assert metrics["mismatch/rejected_rows"] == 0.5
        assert metrics["learner/skipped_steps"] == 0
        assert math.isfinite(metrics["learner/pg_loss"])


def test_bypass_mode_uses_the_engines_logprobs_and_still_checks_them(plain):
    batch = shifted(plain)
    metrics = make_policy(bypass_mode=True).update(batch)
    assert metrics["mismatch/logprob_abs_max"] == pytest.approx(0.5, abs=1e-3)
    assert metrics["mismatch/kl"] == pytest.approx(-_token_mean(batch, SHIFT), abs=1e-3)
    assert metrics["learner/ppo_kl"] == pytest.approx(
        -_token_mean(batch, SHIFT), abs=1e-3
    )  # the ratio of the loss is to the engine
    assert make_policy(bypass_mode=True, max_logprob_mismatch=0.1).update(batch)["mismatch/warned"] == 1.0
    with pytest.raises(MismatchError, match=r"differ by 0\.\d+ on average"):
        make_policy(max_logprob_mismatch=0.1).update(batch)
    several = make_policy(bypass_mode=True, mini_batches=2, ppo_epochs=2, lr=1e-2).update(batch)
    assert several["mismatch/logprob_abs_max"] == pytest.approx(
        0.5, abs=1e-3
    )  # of what was seen before the first step
