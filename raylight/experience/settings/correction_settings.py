"""Settings of rollout correction, and the parser of their thresholds, in verl's notation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from raylight._utils.bounds import MAX_FACTOR, MAX_SAMPLES
from raylight.base_config import Config

TAIL = 0.999
"""Quantile of the differences of log-probs that has a limit, as the mean has. The maximum has none: among
millions of tokens in half precision, one is always far off."""
TAIL_FACTOR = 10.0
"""Factor by which the quantile TAIL may exceed the limit of the mean."""
EXACT_LIMIT, HALF_LIMIT, ROUTED_LIMIT = 1e-3, 0.3, 2.0
"""Default limits of the mean: both compute in float32; one in half precision, where dense models differ by
0.03 to 0.06 on average; the same with a mixture of experts, whose router may choose other experts (0.2 to
1.4)."""
REJECTION_CRITERIA = frozenset(
    {f"{level}_k{n}" for level in ("token", "seq_sum", "seq_mean") for n in (1, 2, 3)}
    | {"seq_max_k2", "seq_max_k3"}
)
"""Valid names in `rollout_rs`: a KL estimate of a token, or its sum, mean or maximum over a row.

Of the ratios of engine to learner probability, token_k1 bounds each, seq_sum_k1 their product over a row, and
seq_mean_k1 their geometric mean.
"""


class CorrectionSettings(Config):
    """Correction of the mismatch between the policy that sampled and the policy that is trained.

    See https://richardli.xyz/rl-collapse and verl's rollout correction.
    """

    max_staleness: int = Field(default=0, ge=0, le=MAX_SAMPLES)
    """Number of updates by which the weights that sampled a token may be older than those that it updates. 0:
    rollouts and updates take turns. Above 0 they overlap."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Policy whose ratio the loss clips, with `max_staleness`. recompute: the learner's before the update, at
    the cost of one more forward pass. loglinear: an interpolation of the log-probs of the engine and of the
    training pass, by the age of the token (AReaL's `prox_logp_method`)."""
    rollout_is: Literal["auto", "token", "sequence"] | None = "auto"
    """Importance weights: the ratio of learner to engine probability of each token, or of the whole row; None
    for no weights. "auto" means "token" with `max_staleness`, unless `bypass_mode` is set, and otherwise no
    weights."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates the weights (TIS); "lower_upper", as in "0.5_5.0", sets weights outside to zero
    (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch, so that only their relative sizes count."""
    rollout_rs: str | None = None
    """Reject tokens or rows whose ratio is too far from 1: `token_k1`, `seq_mean_k1` (geometric),
    `seq_max_k2`, ..., or several, separated by commas."""
    rollout_rs_threshold: float | str | None = None
    """Bounds of the criteria in `rollout_rs`, one for all or one for each, separated by commas. For k1
    criteria: bounds of the ratio of engine to learner probability, "lower_upper" or one number x for "1/x_x".
    For k2 and k3: the largest KL estimate."""
    bypass_mode: bool = False
    """Use the engine's log-probs as the old policy's instead of recomputing them (two policies instead of
    three). `rollout_rs` still needs the learner's."""
    warn_logprob_mismatch: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Mean difference of engine and learner log-probs, for tokens of the current version, above which the run
    warns; 0 chooses a third of `max_logprob_mismatch`."""
    max_logprob_mismatch: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Largest allowed mean difference; the 99.9 % quantile may be ten times as large. 0 chooses 1e-3 if both
    compute in float32, otherwise 0.3, and 2 for mixtures of experts. A run with `rollout_is`, `rollout_rs` or
    `bypass_mode`, which handle the difference, only warns; `rollout_is="auto"` does not count."""

    @property
    def importance_level(self) -> Literal["token", "sequence"] | None:
        """Level of the importance weights, with "auto" resolved; None for no weights."""
        if self.rollout_is != "auto":
            return self.rollout_is
        return "token" if self.max_staleness and not self.bypass_mode else None

    @property
    def correction_enabled(self) -> bool:
        """True if the correction changes the update. The mismatch is measured in any case."""
        return self.importance_level is not None or self.rollout_rs is not None

    @property
    def warning_threshold(self) -> float:
        """Mean difference of log-probs above which the run warns."""
        return self.warn_logprob_mismatch or self.max_logprob_mismatch / 3

    @property
    def tolerates_mismatch(self) -> bool:
        """True if the user chose a correction of the difference of engine and learner.

        The weights of "auto" are for old tokens. Tokens of the current weights show whether the engine has
        these weights.
        """
        chosen = self.rollout_is not in ("auto", None) or self.rollout_rs is not None
        return chosen or self.bypass_mode

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        parse_weight_bounds(self.rollout_is_threshold)
        changed = self.rollout_is_threshold != 2.0 or self.rollout_is_batch_normalize
        if self.importance_level is None and changed:
            raise ValueError(
                "rollout_is_threshold and rollout_is_batch_normalize have no effect without rollout_is; "
                "set rollout_is, or leave them at their defaults"
            )
        if (self.rollout_rs is None) != (self.rollout_rs_threshold is None):
            raise ValueError("rollout_rs and rollout_rs_threshold need each other; set both or neither")
        if self.rollout_rs is not None and self.rollout_rs_threshold is not None:
            _check_rejection(self.rollout_rs, self.rollout_rs_threshold)
        if 0 < self.max_logprob_mismatch < self.warn_logprob_mismatch:
            raise ValueError(
                "warn_logprob_mismatch is above max_logprob_mismatch, at which the run already fails; "
                "lower it"
            )
        return self


def default_limit(exact: bool, routed: bool) -> float:
    """Return the default of `max_logprob_mismatch`.

    Args:
        exact: True if engine and learner compute in float32.
        routed: True for a mixture of experts.
    """
    if exact:
        return EXACT_LIMIT
    return ROUTED_LIMIT if routed else HALF_LIMIT


def describe_excess(mean: float, tail: float, limit: float) -> str | None:
    """Return a phrase if differences of log-probs exceed their limits or are NaN, else None.

    Args:
        mean: mean absolute difference.
        tail: its quantile TAIL.
        limit: limit of the mean.
    """
    if mean <= limit and tail <= TAIL_FACTOR * limit:
        return None
    return (
        f"differ by {mean:.2g} on average (allowed: {limit:g}) and by {tail:.2g} at the 99.9 % quantile "
        f"(allowed: {TAIL_FACTOR * limit:g})"
    )


def parse_weight_bounds(threshold: float | str) -> tuple[float | None, float]:
    """Parse `rollout_is_threshold` to the lower and upper bound of importance weights.

    An upper bound alone truncates weights; with two bounds, weights outside are set to zero.

    Raises:
        ValueError: the threshold is neither a positive number nor "lower_upper".
    """
    lower, upper = _parse_bounds(threshold, "rollout_is_threshold")
    if not (upper > 0 and (lower is None or 0 < lower <= upper)):
        raise ValueError(
            f"rollout_is_threshold {threshold!r}: needs 0 < upper, or 0 < lower <= upper as 'lower_upper'"
        )
    return lower, upper


def _check_rejection(names: str, thresholds: float | str) -> None:
    """Raise ValueError unless the criteria in `rollout_rs` exist and the thresholds fit them."""
    criteria = [name.strip() for name in names.split(",")]
    if unknown := sorted(set(criteria) - REJECTION_CRITERIA):
        raise ValueError(
            f"rollout_rs: unknown {', '.join(map(repr, unknown))}; choose from "
            f"{', '.join(sorted(REJECTION_CRITERIA))}"
        )
    if len(set(criteria)) < len(criteria):
        raise ValueError(f"rollout_rs {names!r} contains a name twice; name each criterion once")
    bounds = [part.strip() for part in str(thresholds).split(",")]
    if len(bounds) not in (1, len(criteria)):
        raise ValueError(
            f"rollout_rs_threshold {thresholds!r} has {len(bounds)} thresholds; give one threshold for all, "
            f"or {len(criteria)} separated by commas"
        )
    for criterion, bound in zip(
        criteria, bounds * len(criteria) if len(bounds) == 1 else bounds, strict=True
    ):
        _check_criterion(criterion, bound)


def _check_criterion(criterion: str, threshold: str) -> None:
    lower, upper = _parse_bounds(threshold, "rollout_rs_threshold")
    if not criterion.endswith("k1"):
        if lower is not None or not upper > 0:
            raise ValueError(
                f"rollout_rs_threshold {threshold!r}: {criterion} is a distance and needs one number above 0"
            )
    elif lower is None and not upper >= 1:
        raise ValueError(
            f"rollout_rs_threshold {threshold!r}: {criterion} bounds a ratio between 1/x and x, so x must "
            "be at least 1"
        )
    elif lower is not None and not 0 < lower <= upper:
        raise ValueError(
            f"rollout_rs_threshold {threshold!r}: {criterion} needs 0 < lower <= upper as 'lower_upper'"
        )


def _parse_bounds(text: float | str, setting: str) -> tuple[float | None, float]:
    lower, separator, upper = str(text).strip().rpartition("_")
    try:
        bounds = (float(lower) if separator else None), float(upper)
    except ValueError:
        raise ValueError(f"{setting} {text!r} is neither a number nor two numbers as in '0.5_2.0'") from None
    if not all(abs(bound) <= MAX_FACTOR for bound in bounds if bound is not None):  # true for NaN too
        raise ValueError(f"{setting} {text!r}: each number must be at most {MAX_FACTOR:g}")
    return bounds
