"""The adapter that is trained, inside the module that samples: one copy of the weights for both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from raylight.algorithms.minigrpo.loss import Loss, clipped_loss, group_advantages, token_logprobs
from raylight.algorithms.minigrpo.rows import MiniRow, Tokens, micro_batches, rows_of, to_tokens
from raylight.algorithms.minigrpo.settings import MiniSettings
from raylight.config import LoraConfig
from raylight.errors import ConfigError, DeviceMemoryError, MismatchError, NonFiniteGradientError
from raylight.experience.batch import TrainBatch
from raylight.files import atomic_files

MAX_BAD_STEPS = 3
"""Updates in a row whose gradient may be not finite."""


def add_adapter(module: Any, config: LoraConfig) -> Any:
    """Put a fresh LoRA adapter into a module, in place, and freeze the rest; returns peft's view of it.

    The adapter's weights are float32 whatever the module's dtype is, and as they begin they change nothing.

    Raises:
        ConfigError: the module has no such layers.
    """
    from peft import get_peft_model

    try:
        return get_peft_model(module, peft_config(config))
    except ValueError as error:
        raise ConfigError(f"the adapter does not fit the model: {error}") from None


def peft_config(config: LoraConfig) -> Any:
    """The adapter's settings as peft takes them."""
    from peft import LoraConfig as PeftConfig

    given: dict[str, Any] = {"lora_alpha": config.alpha, "exclude_modules": config.exclude_modules}
    return PeftConfig(
        r=config.rank,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
        **given,
    )


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def logprobs_of(module: Any, tokens: Tokens) -> torch.Tensor:
    """Log-probabilities of the trained tokens at the temperatures of their sampling, shape (tokens,)."""
    hidden = module.base_model(input_ids=tokens.ids, use_cache=False)[0].flatten(0, 1)
    return token_logprobs(
        module.get_output_embeddings(), hidden[tokens.places], tokens.targets, tokens.temperatures
    )


class Tuner:
    """Trains the adapter of a module that somebody else samples from. All its calls come from the thread that samples.

    Args:
        module: a causal language model; the adapter is put into it in place.
        max_mismatch: largest allowed difference of log-probabilities between sampling and training.
    """

    def __init__(self, module: Any, settings: MiniSettings, max_mismatch: float) -> None:
        self._module = module
        self._settings = settings
        self._max_mismatch = max_mismatch
        self.model = add_adapter(module, settings.lora)
        self._parameters = trainable(self.model)
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.lr, weight_decay=settings.weight_decay
        )
        if settings.gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        self._bad_steps = 0
        module.eval()

    def update(self, batch: TrainBatch, version: int) -> dict[str, float]:
        """Learn from a batch; returns metrics.

        Args:
            version: of the weights that sample now; tokens of it are compared with what training computes.

        Raises:
            MismatchError: training computes other log-probabilities than sampling did.
            NonFiniteGradientError: the gradient was not finite three times in a row; the weights are as they were.
            DeviceMemoryError: the device's memory does not suffice.
        """
        settings = self._settings
        rows = rows_of(batch, group_advantages(batch.rewards, batch.groups, settings.norm_adv_by_std))
        useful = [row for row in rows if row.advantage or settings.kl_coef]
        parts = list(micro_batches(useful, settings.row_budget))
        metrics = {
            "learner/rows": float(len(rows)),
            "learner/rows_without_advantage": float(sum(not row.advantage for row in rows)),
            "learner/micro_batches": float(len(parts)),
            "learner/lr": settings.lr,
        }
        trained = sum(row.trajectory.trained_tokens for row in rows)
        try:
            metrics |= self._compare(parts[0], version)
            for _ in range(settings.passes):
                metrics |= self._step(parts, trained)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the update of {len(rows)} rows ran out of memory ({error}); lower max_tokens_per_micro_batch and max_model_len, "
                "lower max_concurrent (the key-value cache), or set gradient_checkpointing=True"
            ) from None
        finally:
            self._optimizer.zero_grad(set_to_none=True)
            self._module.eval()
        return metrics

    def _step(self, parts: Sequence[Sequence[MiniRow]], trained: int) -> dict[str, float]:
        """One optimizer step over the whole batch."""
        losses = [self._backward(part, trained) for part in parts]
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.grad_clip))
        finite = norm == norm and norm not in (float("inf"), float("-inf"))
        self._bad_steps = 0 if finite else self._bad_steps + 1
        if finite:
            self._optimizer.step()
        elif self._bad_steps >= MAX_BAD_STEPS:
            raise NonFiniteGradientError(
                f"the gradient was not finite {self._bad_steps} times in a row; lower lr, or compute in fp32 (dtype='fp32')"
            )
        self._optimizer.zero_grad(set_to_none=True)
        metrics = {
            "learner/loss": sum(float(loss.value) for loss in losses),
            "learner/grad_norm": norm,
            "learner/skipped_steps": float(not finite),
            "learner/clip_frac": sum(loss.clipped for loss in losses) / trained,
        }
        if self._settings.kl_coef:
            metrics["learner/kl"] = sum(loss.kl for loss in losses) / trained
        return metrics

    def _backward(self, part: Sequence[MiniRow], trained: int) -> Loss:
        """Add the gradient of one micro-batch."""
        settings = self._settings
        tokens = to_tokens(part, self._device)
        ref = self.reference(tokens) if settings.kl_coef else None
        self._module.train()
        logprobs = logprobs_of(self._module, tokens)
        old = tokens.sampled if settings.passes > 1 else logprobs.detach()
        loss = clipped_loss(
            logprobs,
            old,
            tokens.advantages,
            ref,
            clip=(settings.clip_ratio_low, settings.clip_ratio_high),
            kl_coef=settings.kl_coef,
            tokens=trained,
        )
        loss.value.backward()
        self._module.eval()
        return Loss(loss.value.detach(), loss.clipped, loss.kl)

    @torch.no_grad()
    def reference(self, tokens: Tokens) -> torch.Tensor:
        """Log-probabilities by the model without its adapter."""
        with self.model.disable_adapter():
            return logprobs_of(self._module, tokens)

    @torch.no_grad()
    def _compare(self, part: Sequence[MiniRow], version: int) -> dict[str, float]:
        """How far what was sampled with the current weights is from what training computes, without dropout, on one micro-batch."""
        tokens = to_tokens(part, self._device)
        current = tokens.versions == version
        away = (logprobs_of(self._module, tokens) - tokens.sampled).abs()[current]
        if not len(away):
            return {}
        largest = float(away.max())
        if not largest <= self._max_mismatch:
            raise MismatchError(
                f"log-probabilities of sampled tokens differ by up to {largest:.3g} from those that training computes (allowed: "
                f"{self._max_mismatch:g}): agents must sample without top_p, top_k or penalties; in half precision raise "
                "max_logprob_mismatch or set dtype='fp32'"
            )
        return {"mismatch/logprob_abs_mean": float(away.mean()), "mismatch/logprob_abs_max": largest}

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
