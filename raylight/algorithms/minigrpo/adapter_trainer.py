"""Training of an adapter inside the module that samples, so that both share one copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raylight.algorithms.minigrpo.loss import LossTerms, clipped_loss, group_advantages
from raylight.algorithms.minigrpo.rows import (
    AdvantageRow,
    TokenBatch,
    advantage_rows,
    split_micro_batches,
    to_token_batch,
)
from raylight.algorithms.minigrpo.settings import MiniGRPOSettings
from raylight.config import LoraConfig
from raylight.errors import ConfigError, DeviceMemoryError, MismatchError, NonFiniteGradientError
from raylight.experience.batch import TrainBatch
from raylight.experience.correction_settings import TAIL, describe_excess
from raylight.files import atomic_files
from raylight.learner.adapter import peft_config
from raylight.learner.token_logprobs import token_logprobs

CHUNK = 128
"""Tokens whose logits are in memory at a time."""
MAX_SKIPPED_STEPS = 3
"""Optimizer steps in a row with a non-finite gradient after which training fails."""


def add_adapter(module: Any, config: LoraConfig) -> Any:
    """Add a new LoRA adapter to a module in place, freeze the other weights, and return the peft model.

    The adapter's weights are float32 for any data type of the module, and initially leave its output
    unchanged.

    Raises:
        ConfigError: the module lacks the target layers.
    """
    from peft import get_peft_model

    try:
        return get_peft_model(module, peft_config(config, "CAUSAL_LM", module))
    except ValueError as error:
        raise ConfigError(f"the adapter does not fit the model: {error}") from None


def trainable_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def trained_logprobs(module: Any, tokens: TokenBatch) -> torch.Tensor:
    """Return log-probs of the trained tokens at their sampling temperatures, shape (trained tokens,)."""
    hidden = module.base_model(input_ids=tokens.ids, use_cache=False)[0].flatten(0, 1)
    head = module.get_output_embeddings()
    logprobs, _ = token_logprobs(
        head,
        head.parameters(),
        hidden[tokens.positions],
        tokens.targets,
        tokens.temperatures,
        chunk=CHUNK,
    )
    return logprobs


class AdapterTrainer:
    """Trainer of an adapter in the module that an engine samples from.

    Only the engine's thread may call it.

    Args:
        module: causal language model, to which the adapter is added in place.
        max_mismatch: largest allowed mean difference of log-probs between sampling and training.
    """

    def __init__(self, module: Any, settings: MiniGRPOSettings, max_mismatch: float) -> None:
        self._module = module
        self._settings = settings
        self._max_mismatch = max_mismatch
        self.model = add_adapter(module, settings.lora)
        self._parameters = trainable_parameters(self.model)
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.lr, weight_decay=settings.weight_decay
        )
        if settings.gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        self._skipped_steps = 0
        module.eval()

    def update(self, batch: TrainBatch, version: int) -> dict[str, float]:
        """Update the adapter on a batch and return metrics.

        Args:
            version: current version of the weights; log-probs of its tokens are compared with those of
                training.

        Raises:
            MismatchError: the log-probs of sampling and training differ too much.
            NonFiniteGradientError: the gradient was not finite in three steps in a row; these steps changed
                no weights.
            DeviceMemoryError: the device ran out of memory.
        """
        settings = self._settings
        rows = advantage_rows(batch, group_advantages(batch.rewards, batch.groups, settings.norm_adv_by_std))
        trained_rows = [row for row in rows if row.advantage or settings.kl_coef]
        parts = list(split_micro_batches(trained_rows, settings.row_budget))
        metrics = {
            "learner/rows": float(len(rows)),
            "learner/rows_without_advantage": float(sum(not row.advantage for row in rows)),
            "learner/micro_batches": float(len(parts)),
            "learner/lr": settings.lr,
        }
        n_tokens = sum(row.trajectory.trained_tokens for row in rows)
        try:
            metrics |= self._check_mismatch(parts[0], version)
            for _ in range(settings.passes):
                metrics |= self._step(parts, n_tokens)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the update of {len(rows)} rows ran out of memory ({error}); lower "
                "max_tokens_per_micro_batch, max_model_len or max_concurrent (the key-value cache), or set "
                "gradient_checkpointing=True"
            ) from None
        finally:
            self._optimizer.zero_grad(set_to_none=True)
            self._module.eval()
        return metrics

    def _step(self, parts: Sequence[Sequence[AdvantageRow]], n_tokens: int) -> dict[str, float]:
        """Take one optimizer step over the full batch."""
        losses = [self._backward(part, n_tokens) for part in parts]
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.grad_clip))
        finite = norm == norm and norm not in (float("inf"), float("-inf"))
        self._skipped_steps = 0 if finite else self._skipped_steps + 1
        if finite:
            self._optimizer.step()
        elif self._skipped_steps >= MAX_SKIPPED_STEPS:
            raise NonFiniteGradientError(
                f"the gradient was not finite in {self._skipped_steps} steps in a row; lower lr, or set "
                f"dtype='fp32'"
            )
        self._optimizer.zero_grad(set_to_none=True)
        metrics = {
            "learner/loss": sum(float(loss.value) for loss in losses),
            "learner/grad_norm": norm,
            "learner/skipped_steps": float(not finite),
            "learner/clip_frac": sum(loss.clipped for loss in losses) / n_tokens,
        }
        if self._settings.kl_coef:
            metrics["learner/kl"] = sum(loss.kl for loss in losses) / n_tokens
        return metrics

    def _backward(self, part: Sequence[AdvantageRow], n_tokens: int) -> LossTerms:
        """Accumulate the gradient of one micro-batch."""
        settings = self._settings
        tokens = to_token_batch(part, self._device)
        ref = self.reference(tokens) if settings.kl_coef else None
        self._module.train()
        logprobs = trained_logprobs(self._module, tokens)
        old = tokens.sampled_logprobs if settings.passes > 1 else logprobs.detach()
        loss = clipped_loss(
            logprobs,
            old,
            tokens.advantages,
            ref,
            clip=(settings.clip_ratio_low, settings.clip_ratio_high),
            kl_coef=settings.kl_coef,
            tokens=n_tokens,
        )
        loss.value.backward()
        self._module.eval()
        return LossTerms(loss.value.detach(), loss.clipped, loss.kl)

    @torch.no_grad()
    def reference(self, tokens: TokenBatch) -> torch.Tensor:
        """Return the trained tokens' log-probs under the model without its adapter."""
        with self.model.disable_adapter():
            return trained_logprobs(self._module, tokens)

    @torch.no_grad()
    def _check_mismatch(self, part: Sequence[AdvantageRow], version: int) -> dict[str, float]:
        """Compare log-probs of sampling and training on one micro-batch, without dropout, and return metrics.

        Only tokens of the current weights are compared.
        """
        tokens = to_token_batch(part, self._device)
        current = tokens.versions == version
        difference = (trained_logprobs(self._module, tokens) - tokens.sampled_logprobs).abs()[current]
        if not len(difference):
            return {}
        mean, largest = float(difference.mean()), float(difference.max())
        tail = float(np.quantile(difference.float().cpu().numpy(), TAIL))
        if excess := describe_excess(mean, tail, self._max_mismatch):
            raise MismatchError(
                f"log-probs of sampling and training {excess}; in half precision, raise "
                "max_logprob_mismatch or set dtype='fp32'"
            )
        return {
            "mismatch/logprob_abs_mean": mean,
            "mismatch/logprob_abs_p999": tail,
            "mismatch/logprob_abs_max": largest,
        }

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def save(self, folder: Path) -> None:
        """Write the adapter in peft's format."""
        save_adapter(self.model, folder)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of a model in peft's format, each file atomically."""
    with atomic_files(folder) as partial:
        model.save_pretrained(partial)
