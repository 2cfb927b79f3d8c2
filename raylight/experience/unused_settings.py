"""Which settings an estimator or a loss reads, so that one which would change nothing can be told. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raylight.experience.settings import PolicySettings

DUAL_CLIPPED = ("vanilla", "dppo_kl", "dppo_tv")
CLIPPED = (*DUAL_CLIPPED, "gspo", "cispo", "geo_mean", "clip_cov")

READ_BY_ESTIMATORS = {
    "gamma": ("gae", "reinforce_plus_plus"),
    "lam": ("gae",),
    "norm_adv_by_std": ("grpo", "grpo_vectorized", "grpo_passk"),
}
READ_BY_LOSSES = {
    "clip_ratio_low": CLIPPED,
    "clip_ratio_high": CLIPPED,
    "clip_ratio_c": DUAL_CLIPPED,
    "clip_cov_ratio": ("clip_cov",),
    "clip_cov_lb": ("clip_cov",),
    "clip_cov_ub": ("clip_cov",),
    "kl_cov_ratio": ("kl_cov",),
    "ppo_kl_coef": ("kl_cov",),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
}
"""Settings -> those of verl's functions that read them; a user's function may read any."""
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
    for chosen, own, table in (
        ("adv_estimator", settings.own_estimator, READ_BY_ESTIMATORS),
        ("loss_mode", settings.own_loss, READ_BY_LOSSES),
    ):
        name = getattr(settings, chosen)
        if own is None:
            found += [
                f"{key} (read with {chosen} {', '.join(readers)}; it is {name})"
                for key, readers in table.items()
                if key in given and name not in readers
            ]
    found += [
        f"{key} (read with {other})"
        for key, other in READ_WITH.items()
        if key in given and not getattr(settings, other)
    ]
    if "loss_scale_factor" in given and settings.loss_agg_mode != SCALED:
        found.append(f"loss_scale_factor (read with loss_agg_mode {SCALED}; it is {settings.loss_agg_mode})")
    return found
