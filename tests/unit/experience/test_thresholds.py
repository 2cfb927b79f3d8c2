"""What rollout correction may be told, checked where a run is planned; and what a person is told of a mismatch."""

import pytest

from raylight.errors import ConfigError
from raylight.experience.settings import CorrectionSettings, PolicySettings
from raylight.experience.thresholds import weight_bounds
from raylight.trainer.report import Report


@pytest.mark.parametrize(
    ("threshold", "bounds"),
    [(2.0, (None, 2.0)), ("3", (None, 3.0)), ("0.5_5.0", (0.5, 5.0)), (" 0.5_0.5 ", (0.5, 0.5))],
)
def test_the_bounds_of_weights(threshold, bounds):
    assert weight_bounds(threshold) == bounds


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
def test_what_fits(settings):
    known = CorrectionSettings(**settings)
    assert known.corrects == ("rollout_is" in settings or "rollout_rs" in settings)
    assert PolicySettings(**settings).needs_old_logprobs == known.corrects


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is_threshold": 3.0}, "do nothing without rollout_is"),
        ({"rollout_is_batch_normalize": True}, "do nothing without rollout_is"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, "0 < upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "0 < lower <= upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "neither a number nor two"),
        ({"rollout_rs": "seq_mean_k1"}, "need each other"),
        ({"rollout_rs_threshold": 2.0}, "need each other"),
        (
            {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0},
            "does not know 'seq_max_k1'; it knows seq_max_k2",
        ),
        ({"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": 2.0}, "twice"),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0,3.0"},
            "one threshold for all, or 1 by comma",
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "token_k2 is a distance"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "x is at least 1"),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "2_1"}, "0 < lower <= upper"),
        ({"max_logprob_mismatch": 0.1, "warn_logprob_mismatch": 0.2}, "is an error already"),
    ],
)
def test_what_does_not_fit(settings, message):
    with pytest.raises(ConfigError, match=message):
        CorrectionSettings(**settings)


def test_bypass_mode_takes_no_correction():
    for settings in ({"rollout_is": "token"}, {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}):
        with pytest.raises(ConfigError, match="bypass_mode"):
            PolicySettings(bypass_mode=True, **settings)


def test_a_warning_is_given_from_a_tenth_of_what_is_allowed():
    assert CorrectionSettings(max_logprob_mismatch=0.5).warns_from == pytest.approx(0.05)
    assert CorrectionSettings(max_logprob_mismatch=0.5, warn_logprob_mismatch=0.2).warns_from == 0.2


def test_a_mismatch_is_told_once(tmp_path):
    notes = []

    class Display:
        def note(self, text):
            notes.append(text)

    report = Report(tmp_path / "run", Display(), {})
    quiet, loud = ({"mismatch/warned": warned, "mismatch/logprob_abs_max": 0.25} for warned in (0.0, 1.0))
    report.mismatch({})
    report.mismatch(quiet)
    assert notes == []
    report.mismatch(loud)
    report.mismatch(loud)
    assert len(notes) == 1
    assert "differ by up to 0.25" in notes[0]
