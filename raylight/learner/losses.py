"""Policy loss of a micro-batch: verl's or the user's, with entropy bonus and KL penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from raylight.errors import ConfigError
from raylight.experience.registry import select_arguments
from raylight.experience.settings import CriticSettings, PolicySettings
from raylight.experience.unused_settings import SCALED_AGGREGATION
from raylight.learner import verl_api as verl
from raylight.learner.correction import bounded_weights
from raylight.learner.engines import optimizer_config
from raylight.learner.response_logprobs import select_response_tokens
from raylight.learner.rows import TrainRow


class PolicyLoss:
    """Loss function that the engine calls with each micro-batch.

    Without log-probs of the old policy, those of this pass replace them, which is exact for a single
    optimizer step per batch. If the learner has not computed log-probs before, those of this pass are stored
    in the rows. A proximal policy that is interpolated replaces the old one too, and gives the importance
    weights.

    With an aggregation by mean over rows, verl would add entropy and KL once per row of a rollout. This class
    weights them by row length instead, so that a rollout counts once, as in the advantages.

    Constructing it is a collective.

    Args:
        rows: this rank's rows of the mini-batch, in the order of the engine's input.
    """

    def __init__(self, settings: PolicySettings, rows: list[TrainRow]) -> None:
        if settings.loss_agg_mode == SCALED_AGGREGATION and settings.loss_scale_factor is None:
            # verl would divide by the width of each micro-batch
            settings = settings.model_copy(update={"loss_scale_factor": longest_response(rows)})
        self._settings, self._config = settings, actor_config(settings)
        self._averages_rows = averages_rows(settings)
        self._averages_micro_batch = settings.loss_mode == "geo_mean"
        if settings.user_loss is not None:
            verl.register_policy_loss(settings.loss_mode)(wrap_token_loss(settings.user_loss))
        self._rows = rows
        self._stores_logprobs = not settings.needs_old_logprobs and any(
            row.learner_logprobs is None for row in rows
        )

    def __call__(
        self, model_output: dict[str, Any], data: Any, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch and verl's metrics."""
        if self._stores_logprobs:
            self._store_logprobs(model_output, data)
        if self._settings.proximal == "loglinear":
            self._interpolate_proximal(model_output, data)
        if self._averages_micro_batch:
            # geo_mean divides by the rows of the micro-batch, all other losses by the rollouts of all ranks
            data["advantages"] = data["advantages"] * (
                len(data["row"]) * data["dp_size"] / data["global_batch_size"]
            )
        if not self._averages_rows:
            return verl.ppo_loss(self._config, model_output, data, dp_group)
        without_entropy = {name: value for name, value in model_output.items() if name != "entropy"}
        loss, metrics = verl.ppo_loss(self._config, without_entropy, data, dp_group)
        return self._add_regularizers(loss, metrics, model_output, data), metrics

    def _store_logprobs(self, model_output: dict[str, Any], data: Any) -> None:
        """Store the log-probs of this pass in the rows, and use them as the old ones if there are none."""
        logprobs = select_response_tokens(model_output["log_probs"].detach(), data)
        offsets = data["responses"].offsets()
        lengths = offsets.diff().tolist()
        if "old_log_probs" not in data:
            data["old_log_probs"] = _nest_responses(logprobs, data)
        for index, row_logprobs in zip(
            data["row"].tolist(), logprobs.float().cpu().split(lengths), strict=True
        ):
            self._rows[index].learner_logprobs = row_logprobs

    def _interpolate_proximal(self, model_output: dict[str, Any], data: Any) -> None:
        """Set the log-probs of the proximal policy, and the weights that correct for the engine's."""
        logprobs = select_response_tokens(model_output["log_probs"].detach(), data)
        engine, fractions = data["rollout_log_probs"].values(), data["proximal_fractions"].values()
        log_ratio = fractions * (logprobs - engine)
        data["old_log_probs"] = _nest_responses(engine + log_ratio, data)
        lengths = data["responses"].offsets().diff().tolist()
        mask = pad_sequence(data["response_mask"].values().split(lengths), batch_first=True)
        weights = pad_sequence(log_ratio.split(lengths), batch_first=True)
        weights = bounded_weights(weights, mask, self._settings)
        flat = torch.cat([row[:length] for row, length in zip(weights, lengths, strict=True)])
        data["rollout_is_weights"] = _nest_responses(flat, data)

    def _add_regularizers(
        self, loss: torch.Tensor, metrics: dict[str, Any], model_output: dict[str, Any], data: Any
    ) -> torch.Tensor:
        """Add the entropy bonus and the KL penalty to the loss, and both to the metrics."""
        settings = self._settings
        if "entropy" in model_output:
            entropy = mean_over_rollouts(select_response_tokens(model_output["entropy"], data), data)
            loss = loss - settings.entropy_coef * entropy
            metrics["actor/entropy_loss"] = verl.Metric("sum", entropy)
        if settings.kl_coef > 0:
            logprobs: Any = select_response_tokens(model_output["log_probs"], data)
            kl = mean_over_rollouts(
                verl.kl_penalty(logprobs, data["ref_log_prob"].values(), settings.kl_type), data
            )
            loss = loss + settings.kl_coef * kl
            metrics["kl_loss"] = verl.Metric("sum", kl)
        return loss


def _nest_responses(flat: torch.Tensor, data: Any) -> torch.Tensor:
    """Return a value per response token, row after row, as a nested tensor of shape (rows, tokens)."""
    offsets = data["responses"].offsets()
    lengths = offsets.diff().tolist()
    return torch.nested.nested_tensor_from_jagged(
        flat, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def longest_response(rows: list[TrainRow]) -> int:
    """Return the tokens of the longest response of all ranks. A collective."""
    longest = torch.tensor([max((len(row.response) for row in rows), default=1)])
    torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)
    return int(longest)


def mean_over_rollouts(values: torch.Tensor, data: Any) -> torch.Tensor:
    """Return a micro-batch's part of the mean over rollouts of token means, scaled like verl's losses.

    Args:
        values: one entry per response token, one row after the other.
    """
    mask, lengths = data["response_mask"].values(), data["responses"].offsets().diff()
    sampled = torch.stack([row.sum() for row in mask.split(lengths.tolist())])
    weights = (data["rollout_fraction"] / sampled.clamp(min=1)).repeat_interleave(lengths)
    return (values.where(mask == 1, 0.0) * weights).sum() * (data["dp_size"] / data["global_batch_size"])


def wrap_token_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a user's function, which returns the loss of each token, as a policy loss with verl's signature.

    The returned function raises ConfigError if the result does not have the shape of the log-probs.
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
        arguments = {
            "old_log_prob": old_log_prob,
            "log_prob": log_prob,
            "advantages": advantages,
            "response_mask": response_mask,
            "config": config,
        }
        losses = function(**select_arguments(function, arguments))
        if not isinstance(losses, torch.Tensor) or losses.shape != log_prob.shape:
            raise ConfigError(
                f"policy loss {config.policy_loss.loss_mode!r} returned "
                f"{getattr(losses, 'shape', losses)!r:.80}; return the loss of each token, in the shape of "
                f"log_prob, {tuple(log_prob.shape)}"
            )
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        total = verl.agg_loss(
            loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        kl = ((old_log_prob - log_prob) * response_mask).sum() / response_mask.sum().clamp(min=1)
        return total, {"actor/ppo_kl": kl.detach().item()}

    return loss


def averages_rows(settings: PolicySettings | CriticSettings) -> bool:
    """True if the loss is a mean of row means, which weights rows by their part of the rollout."""
    return settings.loss_agg_mode == "seq-mean-token-mean"


def actor_config(settings: PolicySettings) -> Any:
    """Convert the settings of the policy loss to verl's."""
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
        use_kl_loss=settings.kl_coef > 0 and not averages_rows(settings),
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
