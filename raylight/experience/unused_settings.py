"""Which settings an estimator or a loss reads, so that one which would change nothing can be told. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylight.experience.registry import ESTIMATORS, LOSSES

if TYPE_CHECKING:
    from raylight.experience.settings import PolicySettings

READ_WITH = {"kl_type": "kl_coef", "kl_reward_type": "kl_reward_coef", "kl_horizon": "kl_target"}
"""Settings -> another that must be set for them to be read."""
SCALED = "seq-mean-token-sum-norm"


def unread(settings: PolicySettings) -> list[str]:
    """Settings that are not those of the class and that nothing reads, each with what would."""
    given = {
        name
        for name, field in type(settings).model_fields.items()
        if getattr(settings, name) != field.default
    }
    found = []
    if settings.own_estimator is None:
        reads = {name: traits.reads for name, traits in ESTIMATORS.items()}
        found += _unread_by(given, "adv_estimator", settings.adv_estimator, reads)
    if settings.own_loss is None:
        found += _unread_by(given, "loss_mode", settings.loss_mode, LOSSES)
    found += [
        f"{key} (read with {other})"
        for key, other in READ_WITH.items()
        if key in given and not getattr(settings, other)
    ]
    if "loss_scale_factor" in given and settings.loss_agg_mode != SCALED:
        found.append(f"loss_scale_factor (read with loss_agg_mode {SCALED}; it is {settings.loss_agg_mode})")
    return found


def _unread_by(given: set[str], choice: str, chosen: str, reads: dict[str, tuple[str, ...]]) -> list[str]:
    """Settings in `given` that other functions read and the chosen one does not.

    Args:
        choice: setting that selects the function.
        reads: function -> settings that it reads.
    """
    readers: dict[str, list[str]] = {}
    for name, settings in reads.items():
        for setting in settings:
            readers.setdefault(setting, []).append(name)
    return [
        f"{setting} (read with {choice} {', '.join(names)}; it is {chosen})"
        for setting, names in readers.items()
        if setting in given and chosen not in names
    ]
