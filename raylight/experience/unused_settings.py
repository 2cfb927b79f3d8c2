"""Detection of settings without effect, because another setting that reads them is off."""

from __future__ import annotations

from raylight.experience.settings import SCALED_AGGREGATION, PolicySettings

PREREQUISITES = {
    "kl_type": "kl_coef",
    "kl_reward_type": "kl_reward_coef",
    "kl_horizon": "kl_target",
    "proximal": "max_staleness",
    "stale": "max_staleness",
}
"""Setting -> another setting without which it is not read."""


def unused_settings(settings: PolicySettings) -> list[str]:
    """Return changed settings that are not read, each with the choice that would read it."""
    changed = {
        name
        for name, field in type(settings).model_fields.items()
        if getattr(settings, name) != field.default
    }
    unused = [
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
