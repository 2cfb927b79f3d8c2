"""Validation of the correction settings when a run is planned, and the warning about a mismatch."""

import math

import pytest

from raylight.errors import ConfigError
from raylight.experience.settings.correction_settings import (
    CorrectionSettings,
    default_limit,
    describe_excess,
    parse_weight_bounds,
)
from raylight.experience.settings.policy_settings import PolicySettings


@pytest.mark.parametrize(
    ("threshold", "bounds"),
    [(2.0, (None, 2.0)), ("3", (None, 3.0)), ("0.5_5.0", (0.5, 5.0)), (" 0.5_0.5 ", (0.5, 0.5))],
)
def test_weight_bounds_are_parsed(threshold, bounds):
    assert parse_weight_bounds(threshold) == bounds


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_is": "token"},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.01},
        {"rollout_rs": "token_k1, seq_max_k2", "rollout_rs_threshold": "0.5_2,0.1"},
        {"rollout_rs": "seq_sum_k3,seq_max_k3", "rollout_rs_threshold": "0.1"},
        {"warn_logprob_mismatch": 0.1},
    ],
)
def test_valid_settings(settings):
    correction = CorrectionSettings(**settings)
    assert correction.correction_enabled == ("rollout_is" in settings or "rollout_rs" in settings)
    assert PolicySettings(**settings).needs_old_logprobs == correction.correction_enabled


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is_threshold": 3.0}, "have no effect without rollout_is"),
        ({"rollout_is_batch_normalize": True}, "have no effect without rollout_is"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, "0 < upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "0 < lower <= upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "neither a number nor two"),
        ({"rollout_rs": "seq_mean_k1"}, "need each other"),
        ({"rollout_rs_threshold": 2.0}, "need each other"),
        (
            {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0},
            "unknown 'seq_max_k1'; choose from seq_max_k2",
        ),
        ({"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": 2.0}, "twice"),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0,3.0"},
            "has 2 thresholds; give one threshold for all, or 1 separated by commas",
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "token_k2 is a distance"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "x must be at least 1"),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "2_1"}, "0 < lower <= upper"),
        ({"max_logprob_mismatch": 0.1, "warn_logprob_mismatch": 0.2}, "at which the run already fails"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        CorrectionSettings(**settings)


def test_bypass_mode_excludes_weights_and_needs_a_pass_before_the_update_to_reject():
    with pytest.raises(ConfigError, match="rollout_is cannot be combined with bypass_mode"):
        PolicySettings(bypass_mode=True, rollout_is="token")
    assert not PolicySettings(bypass_mode=True).needs_old_logprobs
    rejecting = PolicySettings(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    assert rejecting.needs_old_logprobs
    assert rejecting.importance_level is None


def test_the_mean_and_a_high_quantile_are_limited_and_the_maximum_is_not():
    assert describe_excess(1e-3, 1e-2, 1e-3) is None
    assert "by 0.0011 on average (allowed: 0.001)" in describe_excess(1.1e-3, 1e-2, 1e-3)
    assert "by 0.011 at the 99.9 % quantile (allowed: 0.01)" in describe_excess(1e-4, 1.1e-2, 1e-3)
    assert describe_excess(math.nan, 0.0, 1.0)
    # published figures: dense models in bfloat16, and mixtures of experts
    assert describe_excess(0.06, 0.9, default_limit(exact=False, routed=False)) is None
    assert describe_excess(1.4, 9.0, default_limit(exact=False, routed=True)) is None


def test_the_default_warning_threshold_is_a_third_of_the_limit():
    assert CorrectionSettings(max_logprob_mismatch=0.3).warning_threshold == pytest.approx(0.1)
    assert CorrectionSettings(max_logprob_mismatch=0.5, warn_logprob_mismatch=0.2).warning_threshold == 0.2
