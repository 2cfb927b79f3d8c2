"""Policy loss of a micro-batch: verl's or the user's, with entropy bonus and KL penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import SCALED_AGGREGATION, PolicySettings
from raylight.experience.settings.registry import select_arguments
from raylight.learner import verl_api as verl
from raylight.learner.losses.correction import bounded_weights
from raylight.learner.losses.metrics import mean_over_tokens
from raylight.learner.model.verl_engines import optimizer_config
from raylight.learner.tokens.micro_batch import MicroBatch
from raylight.learner.tokens.rows import TrainRow


class PolicyLoss:
    """Loss function that the engine calls with each micro-batch.

    Without log-probs of the old policy, this pass's replace them, which is exact for a single
    optimizer step per batch. A proximal policy that is interpolated replaces the old one too, and gives the
    importance weights.

    With an aggregation by mean over rows, verl would add the loss, entropy and KL once per row of a rollout.
    This class weights them by the row's fraction of its rollout's tokens, so that a rollout counts once.

    Constructing it is a collective.

    Args:
        rows: this rank's rows of the mini-batch, in the order of the engine's input.
        stores_logprobs: store this pass's log-probs in the rows, as the learner's before the update.
    """

    def __init__(self, settings: PolicySettings, rows: list[TrainRow], stores_logprobs: bool = False) -> None:
        if settings.loss_agg_mode == SCALED_AGGREGATION and settings.loss_scale_factor is None:
            # verl would divide by the width of each micro-batch
            settings = settings.model_copy(update={"loss_scale_factor": longest_response(rows)})
        self._settings, self._config = settings, actor_config(settings)
        self._averages_rows = settings.loss_agg_mode == "seq-mean-token-mean"
        # verl averages the loss of SAPO over rows, whatever the aggregation is
        self._weighs_rows = self._averages_rows or settings.loss.name == "sapo"
        if settings.user_loss is not None:
            verl.register_policy_loss(settings.loss.name)(wrap_token_loss(settings.user_loss))
        self._stores_logprobs = stores_logprobs

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, verl.Metric]]:
        settings, computed = self._settings, outputs["log_probs"]
        # a loss may read tokens that it masks afterwards
        logprobs = computed.where(batch.mask, 0.0) if settings.observation_coef else computed
        if self._stores_logprobs:
            for row, values in zip(batch.rows, logprobs.detach().float().cpu(), strict=True):
                row.learner_logprobs = values[: len(row.response)]
        if settings.proximal == "loglinear":
            old, weights = self._interpolate_proximal(logprobs, batch)
        else:
            old, weights = batch.matrix("old_logprobs"), batch.matrix("weights")
        advantages = batch.matrix("advantages")
        if settings.loss.name == "geo_mean":
            # it divides by the rows of the micro-batch, all other losses by the rollouts of all ranks
            scale = len(batch.rows) * batch.dp_size / batch.rollouts
            advantages = advantages * rollout_fractions(batch) * scale
        elif self._weighs_rows:
            fractions = rollout_fractions(batch)
            weights = fractions if weights is None else weights * fractions
        self._config.global_batch_info.update(
            dp_size=batch.dp_size,
            batch_num_tokens=batch.tokens,
            global_batch_size=batch.rollouts,
            loss_scale_factor=settings.loss_scale_factor,
        )
        loss, found = verl.get_policy_loss_fn(settings.loss.name)(
            old_log_prob=logprobs.detach() if old is None else old,
            log_prob=logprobs,
            advantages=advantages,
            response_mask=batch.mask,
            loss_agg_mode=settings.loss_agg_mode,
            config=self._config,
            rollout_is_weights=weights,
        )
        metrics = {name: mean_over_tokens(value, batch) for name, value in found.items()}
        metrics["actor/pg_loss"] = verl.Metric("sum", loss)
        if "entropy" in outputs:
            loss = loss - settings.entropy_coef * self._aggregate(outputs["entropy"], batch)
            metrics["actor/entropy_loss"] = mean_over_tokens(outputs["entropy"], batch)
        if "divergence" in outputs:
            loss = loss + self._aggregate(outputs["divergence"], batch)
            metrics["divergence"] = mean_over_tokens(outputs["divergence"], batch)
        if settings.kl_coef > 0:
            own: Any = logprobs
            penalty = verl.kl_penalty(own, batch.matrix("ref_logprobs"), settings.kl_type)
            loss = loss + settings.kl_coef * self._aggregate(penalty, batch)
            metrics["kl_loss"] = mean_over_tokens(penalty, batch)
        if settings.observation_coef:
            observed = -computed.where(batch.observed, 0.0).sum()
            cross_entropy = observed * (batch.dp_size / max(batch.observations or 0, 1))
            loss = loss + settings.observation_coef * cross_entropy
            metrics["observation_loss"] = verl.Metric("sum", cross_entropy)
        return loss, metrics

    def _interpolate_proximal(
        self, logprobs: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return proximal log-probs and the weights that correct the engine's (rows, longest response)."""
        engine = batch.matrix("engine_logprobs")
        log_ratio = batch.matrix("proximal_fractions") * (logprobs.detach() - engine)
        return engine + log_ratio, bounded_weights(log_ratio, batch.mask, self._settings)

    def _aggregate(self, values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return a micro-batch's part of the mean of a value per token, as the settings define the mean."""
        if self._averages_rows:
            return mean_over_rollouts(values, batch)
        return verl.agg_loss(
            loss_mat=values,
            loss_mask=batch.mask,
            loss_agg_mode=self._settings.loss_agg_mode,
            **self._config.global_batch_info,
        )


def longest_response(rows: list[TrainRow]) -> int:
    """Return the tokens of the longest response of all ranks. A collective."""
    longest = torch.tensor([max((len(row.response) for row in rows), default=1)])
    torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)
    return int(longest)


def mean_over_rollouts(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return a micro-batch's part of the mean over rollouts of token means, scaled like verl's losses.

    Args:
        values: a matrix of the micro-batch, shape (rows, tokens).
    """
    weights = rollout_fractions(batch) / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return (values.where(batch.mask, 0.0) * weights).sum() * (batch.dp_size / batch.rollouts)


def rollout_fractions(batch: MicroBatch) -> torch.Tensor:
    """Return the fraction of its rollout's sampled tokens that each row has, shape (rows, 1)."""
    return torch.tensor([[row.rollout_fraction] for row in batch.rows], device=batch.device)


def wrap_token_loss(function: Callable[..., object]) -> Callable[..., tuple[torch.Tensor, dict[str, float]]]:
    """Wrap a user's function, which returns the loss of each token, as a policy loss with verl's signature.

    The returned function raises ConfigError if the result does not have the shape of the log-probs.
    """

    def loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str,
        config: verl.ActorConfig,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
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


def actor_config(settings: PolicySettings) -> verl.ActorConfig:
    """Convert the settings of the policy loss to verl's, with verl's defaults for other losses."""
    given = settings.loss.model_dump(exclude={"name"})
    of_loss = {name: value for name, value in given.items() if hasattr(verl.PolicyLossConfig, name)}
    own = {name: value for name, value in given.items() if name not in of_loss}
    if "clip_ratio_low" in own:
        own["clip_ratio"] = own["clip_ratio_low"]
    return verl.ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        **own,
        entropy_coeff=settings.entropy_coef,
        use_kl_loss=settings.kl_coef > 0,
        kl_loss_coef=settings.kl_coef,
        kl_loss_type=settings.kl_type,
        loss_agg_mode=settings.loss_agg_mode,
        loss_scale_factor=settings.loss_scale_factor,
        policy_loss=verl.PolicyLossConfig(loss_mode=settings.loss.name, **of_loss),
        optim=optimizer_config(settings, 1),
    )
