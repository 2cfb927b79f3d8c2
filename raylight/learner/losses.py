"""The loss of the policy: verl's or the user's, by the names of the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raylight.errors import ConfigError
from raylight.experience.registry import select_arguments
from raylight.experience.settings import PolicySettings
from raylight.learner import verl_api as verl
from raylight.learner.engines import optimizer_config
from raylight.learner.response_logprobs import select_response_tokens
from raylight.learner.rows import TrainRow


class PolicyLoss:
    """Called by the engine with each micro-batch.

    Without log-probs of the old policy those of this very pass take their place, which is right where a batch is passed once; where
    nothing was computed before, the rows are told what it computed.

    Where the mean is select_arguments of rows, verl would add entropy and divergence once for each row of a rollout. Here a row counts as much
    as it is long, so that a rollout counts once, as it does in the advantages.

    Args:
        rows: that the engine is given, in their order.
    """

    def __init__(self, settings: PolicySettings, rows: list[TrainRow]) -> None:
        self._settings, self._config = settings, actor_config(settings)
        self._means_rows = means_rows(settings)
        self._means_micro_batches = settings.loss_mode == "geo_mean"
        if settings.user_loss is not None:
            verl.register_policy_loss(settings.loss_mode)(wrap_token_loss(settings.user_loss))
        self._rows = rows
        self._shows = not settings.needs_old_logprobs and any(row.seen_logprobs is None for row in rows)

    def __call__(
        self, model_output: dict[str, Any], data: Any, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if self._shows:
            found, lengths = (
                select_response_tokens(model_output["log_probs"].detach(), data),
                data["responses"].offsets().diff().tolist(),
            )
            if "old_log_probs" not in data:
                data["old_log_probs"] = torch.nested.nested_tensor_from_jagged(
                    found, data["responses"].offsets(), min_seqlen=min(lengths), max_seqlen=max(lengths)
                )
            for place, logprobs in zip(data["row"].tolist(), found.float().cpu().split(lengths), strict=True):
                self._rows[place].seen_logprobs = logprobs
        if (
            self._means_micro_batches
        ):  # it divides by rows of the micro-batch, where all others divide by rollouts of all ranks
            data["advantages"] = data["advantages"] * (
                len(data["row"]) * data["dp_size"] / data["global_batch_size"]
            )
        if not self._means_rows:
            return verl.ppo_loss(self._config, model_output, data, dp_group)
        loss, metrics = verl.ppo_loss(
            self._config,
            {name: value for name, value in model_output.items() if name != "entropy"},
            data,
            dp_group,
        )
        return self._regularised(loss, metrics, model_output, data), metrics

    def _regularised(
        self, loss: torch.Tensor, metrics: dict[str, Any], model_output: dict[str, Any], data: Any
    ) -> torch.Tensor:
        """The loss with entropy and divergence, of which the metrics tell."""
        settings = self._settings
        if "entropy" in model_output:
            entropy = mean_of_rollouts(select_response_tokens(model_output["entropy"], data), data)
            loss = loss - settings.entropy_coef * entropy
            metrics["actor/entropy_loss"] = verl.Metric("sum", entropy)
        if settings.kl_coef > 0:
            logprobs: Any = select_response_tokens(model_output["log_probs"], data)
            divergence = mean_of_rollouts(
                verl.kl_penalty(logprobs, data["ref_log_prob"].values(), settings.kl_type), data
            )
            loss = loss + settings.kl_coef * divergence
            metrics["kl_loss"] = verl.Metric("sum", divergence)
        return loss


def mean_of_rollouts(values: torch.Tensor, data: Any) -> torch.Tensor:
    """What a micro-batch adds to the mean over rollouts of their tokens' means, scaled as verl's losses are.

    Args:
        values: one for each token of the responses, one row after the other.
    """
    mask, counts = data["response_mask"].values(), data["responses"].offsets().diff()
    kept = torch.stack([row.sum() for row in mask.split(counts.tolist())])
    weights = (data["share"] / kept.clamp(min=1)).repeat_interleave(counts)
    return (values.where(mask == 1, 0.0) * weights).sum() * (data["dp_size"] / data["global_batch_size"])


def wrap_token_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A policy loss as verl calls it, from a user's function that gives the loss of each token.

    Raises:
        ConfigError: it returned something that is not of the log-probs' shape.
    """

    def loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        given = {
            "old_log_prob": old_log_prob,
            "log_prob": log_prob,
            "advantages": advantages,
            "response_mask": response_mask,
            "config": config,
        }
        losses = function(**select_arguments(function, given))
        if not isinstance(losses, torch.Tensor) or losses.shape != log_prob.shape:
            raise ConfigError(
                f"policy loss {config.policy_loss.loss_mode!r} returned {getattr(losses, 'shape', losses)!r:.80}; it must return "
                f"the loss of each token, in the shape of log_prob, {tuple(log_prob.shape)}"
            )
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        total = verl.agg_loss(
            loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        moved = ((old_log_prob - log_prob) * response_mask).sum() / response_mask.sum().clamp(min=1)
        return total, {"actor/ppo_kl": moved.detach().item()}

    return loss


def means_rows(settings: PolicySettings) -> bool:
    """Whether the loss is a mean of rows; then entropy and divergence are ours to add."""
    return settings.loss_agg_mode == "seq-mean-token-mean"


def actor_config(settings: PolicySettings) -> Any:
    """verl's words for the settings of the loss."""
    return verl.ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        clip_ratio=settings.clip_ratio_low,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        clip_ratio_c=settings.clip_ratio_c,
        tau_pos=settings.tau_pos,
        tau_neg=settings.tau_neg,
        entropy_coeff=settings.entropy_coef,
        use_kl_loss=settings.kl_coef > 0 and not means_rows(settings),
        kl_loss_coef=settings.kl_coef,
        kl_loss_type=settings.kl_type,
        loss_agg_mode=settings.loss_agg_mode,
        loss_scale_factor=settings.loss_scale_factor,
        policy_loss=verl.PolicyLossConfig(
            loss_mode=settings.loss_mode,
            clip_cov_ratio=settings.clip_cov_ratio,
            clip_cov_lb=settings.clip_cov_lb,
            clip_cov_ub=settings.clip_cov_ub,
            kl_cov_ratio=settings.kl_cov_ratio,
            ppo_kl_coef=settings.ppo_kl_coef,
        ),
        optim=optimizer_config(settings, 1),
    )
