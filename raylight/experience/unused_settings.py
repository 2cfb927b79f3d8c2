"""Detection of settings without effect: the chosen estimator, loss or penalty does not read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylight.experience.registry import ESTIMATORS, LOSSES

if TYPE_CHECKING:
    from raylight.experience.settings import PolicySettings

PREREQUISITES = {
    "kl_type": "kl_coef",
    "kl_reward_type": "kl_reward_coef",
    "kl_horizon": "kl_target",
    "proximal": "max_staleness",
    "stale": "max_staleness",
}
"""Setting -> another setting without which it is not read."""
SCALED_AGGREGATION = "seq-mean-token-sum-norm"


def unused_settings(settings: PolicySettings) -> list[str]:
    """Return changed settings that are not read, each with the choice that would read it."""
    changed = {
        name
        for name, field in type(settings).model_fields.items()
        if getattr(settings, name) != field.default
    }
    unused = []
    if settings.user_estimator is None:
        reads = {name: traits.reads for name, traits in ESTIMATORS.items()}
        unused += _unread_by_choice(changed, "adv_estimator", settings.adv_estimator, reads)
    if settings.user_loss is None:
        unused += _unread_by_choice(changed, "loss_mode", settings.loss_mode, LOSSES)
    unused += [
        f"{name} (read with {prerequisite})"
        for name, prerequisite in PREREQUISITES.items()
        if name in changed and not getattr(settings, prerequisite)
    ]
    if "loss_scale_factor" in changed and settings.loss_agg_mode != SCALED_AGGREGATION:
        unused.append(
            f"loss_scale_factor (read with loss_agg_mode {SCALED_AGGREGATION}; it is "
            f"{settings.loss_agg_mode})"
        )
    return unused


def _unread_by_choice(
    changed: set[str], choice: str, chosen: str, reads: dict[str, tuple[str, ...]]
) -> list[str]:
    """Return the changed settings that other functions read and the chosen one does not.

    Args:
        choice: setting that selects the function.
        reads: function -> settings that it reads.
    """
    readers: dict[str, list[str]] = {}
    for function, settings in reads.items():
        for setting in settings:
            readers.setdefault(setting, []).append(function)
    return [
        f"{setting} (read with {choice} {', '.join(functions)}; it is {chosen})"
        for setting, functions in readers.items()
        if setting in changed and chosen not in functions
    ]
