"""The loss of the policy: verl's, by the names of the settings."""

from __future__ import annotations

from typing import Any

import torch

from raylight.learner import verl_api as verl
from raylight.learner.engines import optimizer_config
from raylight.learner.rows import Row
from raylight.learner.settings import PolicySettings


class PolicyLoss:
    """Called by the engine with each micro-batch.

    Rows without log-probs of the old policy are given those of this very pass, which is right where a batch is passed once.

    Args:
        rows: that the engine is given, in their order.
    """

    def __init__(self, settings: PolicySettings, rows: list[Row]) -> None:
        self._config = actor_config(settings)
        self._rows = rows

    def __call__(self, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        if "old_log_probs" not in data:
            found = verl.response_from_nested(model_output["log_probs"].detach(), data["response_mask"])
            data["old_log_probs"] = found
            for place, logprobs in zip(data["row"].tolist(), found.unbind(), strict=True):
                self._rows[place].old_logprobs = logprobs.float().cpu()
        return verl.ppo_loss(self._config, model_output, data, dp_group)


def actor_config(settings: PolicySettings) -> Any:
    """verl's words for the settings of the loss."""
    return verl.ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False,
        clip_ratio=settings.clip_ratio_low, clip_ratio_low=settings.clip_ratio_low, clip_ratio_high=settings.clip_ratio_high,
        clip_ratio_c=settings.clip_ratio_c, tau_pos=settings.tau_pos, tau_neg=settings.tau_neg,
        entropy_coeff=settings.entropy_coef, use_kl_loss=settings.kl_coef > 0, kl_loss_coef=settings.kl_coef,
        kl_loss_type=settings.kl_type, loss_agg_mode=settings.loss_agg_mode, loss_scale_factor=settings.loss_scale_factor,
        policy_loss=verl.PolicyLossConfig(
            loss_mode=settings.loss_mode, clip_cov_ratio=settings.clip_cov_ratio, clip_cov_lb=settings.clip_cov_lb,
            clip_cov_ub=settings.clip_cov_ub, kl_cov_ratio=settings.kl_cov_ratio, ppo_kl_coef=settings.ppo_kl_coef,
        ),
        optim=optimizer_config(settings, 1),
    )  # fmt: skip
