"""Thresholds of rollout correction as verl writes them. No torch: settings are checked where a run is planned."""

from __future__ import annotations

REJECTIONS = frozenset(
    {f"{level}_k{n}" for level in ("token", "seq_sum", "seq_mean") for n in (1, 2, 3)}
    | {"seq_max_k2", "seq_max_k3"}
)
"""What `rollout_rs` may name: a divergence of a token, or the sum, mean or maximum of those of a row. Of the
ratios of engine to learner probability, token_k1 bounds each, seq_sum_k1 their product over a row, and seq_mean_k1 their geometric
mean."""


def weight_bounds(threshold: float | str) -> tuple[float | None, float]:
    """The lower and the upper bound of importance weights: those above an upper bound alone are truncated to it, those outside of
    two are zeroed.

    Raises:
        ValueError: it is neither a positive number nor "lower_upper".
    """
    lower, upper = _pair(threshold, "rollout_is_threshold")
    if not (upper > 0 and (lower is None or 0 < lower <= upper)):
        raise ValueError(
            f"rollout_is_threshold {threshold!r}: needs 0 < upper, or 0 < lower <= upper as 'lower_upper'"
        )
    return lower, upper


def check_rejection(names: str, thresholds: float | str) -> None:
    """Raise ValueError unless the thresholds fit what `rollout_rs` names."""
    options = [name.strip() for name in names.split(",")]
    if unknown := sorted(set(options) - REJECTIONS):
        raise ValueError(
            f"rollout_rs does not know {', '.join(map(repr, unknown))}; it knows {', '.join(sorted(REJECTIONS))}"
        )
    if len(set(options)) < len(options):
        raise ValueError(f"rollout_rs {names!r} names something twice")
    given = [part.strip() for part in str(thresholds).split(",")]
    if len(given) not in (1, len(options)):
        raise ValueError(
            f"rollout_rs_threshold needs one threshold for all, or {len(options)} by comma; it is {thresholds!r}"
        )
    for option, threshold in zip(options, given * len(options) if len(given) == 1 else given, strict=True):
        _check_one(option, threshold)


def _check_one(option: str, threshold: str) -> None:
    lower, upper = _pair(threshold, "rollout_rs_threshold")
    if not option.endswith("k1"):
        if lower is not None or not upper > 0:
            raise ValueError(
                f"rollout_rs_threshold {threshold!r}: {option} is a distance, bounded by one number above 0"
            )
    elif lower is None and not upper >= 1:
        raise ValueError(
            f"rollout_rs_threshold {threshold!r}: {option} bounds a ratio between 1/x and x, so x is at least 1"
        )
    elif lower is not None and not 0 < lower <= upper:
        raise ValueError(
            f"rollout_rs_threshold {threshold!r}: {option} needs 0 < lower <= upper as 'lower_upper'"
        )


def _pair(text: float | str, name: str) -> tuple[float | None, float]:
    lower, separator, upper = str(text).strip().rpartition("_")
    try:
        return (float(lower) if separator else None), float(upper)
    except ValueError:
        raise ValueError(f"{name} {text!r} is neither a number nor two as in '0.5_2.0'") from None
