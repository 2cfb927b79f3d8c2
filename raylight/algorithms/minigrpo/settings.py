"""Settings of MiniGRPO that both of its backends read, and those of the backend "trl"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from raylight.base_config import Config
from raylight.bounds import MAX_COUNT, MAX_FACTOR, MAX_SAMPLES, MAX_TASKS, Seed
from raylight.config import LoraConfig

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Names of the linear layers of a block in Llama, Qwen, Mistral and similar models."""


class AdapterSettings(Config):
    """Settings of an adapter that one process samples from and trains."""

    lora: LoraConfig = Field(
        default_factory=lambda: LoraConfig(rank=8, alpha=16, dropout=0.05, target_modules=PROJECTIONS)
    )
    """Adapter. Its weights and their optimizer state are float32 for any `dtype`."""
    lr: float = Field(default=1e-4, gt=0, le=MAX_FACTOR)
    """Learning rate of AdamW; an adapter needs 10 to 100 times the rate for the full model."""
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    tasks_per_step: int = Field(default=4, ge=1, le=MAX_TASKS)
    max_model_len: int = Field(default=1024, ge=8, le=MAX_COUNT)
    """Limit of tokens of prompt plus response, and of a trained row."""
    max_new_tokens: int = Field(default=256, ge=1, le=MAX_COUNT)
    """Limit of tokens of a response; a request can only lower it."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=8, le=MAX_COUNT)
    """Limit of tokens, padding included, of one forward and backward pass; None: `max_model_len`."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the frozen model and of computation; auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """Torch device; auto: cuda if there is a GPU, else cpu."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of storing them."""
    seed: Seed | None = None
    """Seed of the task order, the adapter's initial weights and sampling; None: the Trainer's."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_new_tokens >= self.max_model_len:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} leaves no tokens for a prompt in "
                f"max_model_len={self.max_model_len}; lower it"
            )
        if self.row_budget < self.max_model_len:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.row_budget} is less than the longest row, "
                f"max_model_len={self.max_model_len}; raise it"
            )
        return self

    @property
    def row_budget(self) -> int:
        """Limit of tokens, padding included, of one forward and backward pass."""
        return self.max_tokens_per_micro_batch or self.max_model_len


class TrlSettings(AdapterSettings):
    """Settings that `MiniGRPO(backend="trl")` accepts."""

    model: str
    """Folder of a Hugging Face model, or its name in the local cache."""
    prompt_of: Callable[[Any], Any] = Field(exclude=True)
    """Function from a task to its prompt, a text or a list of chat messages."""
    reward_of: Callable[[Any, str], float] = Field(exclude=True)
    """Function from a task and the model's response to the reward."""
    grad_clip: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)
    """Rollouts per task and step; they form a group."""
    n_epochs: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Passes over the training tasks; ignored if `n_steps` is set."""
    n_steps: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    ppo_epochs: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Optimizer steps per batch, each over the full batch."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=MAX_FACTOR)
    clip_ratio_high: float = Field(default=0.2, ge=0, le=MAX_FACTOR)
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation; False is Dr.GRPO,
    https://arxiv.org/abs/2503.20783."""
    kl_coef: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight of the KL divergence from the model without its adapter."""
    val_every: int = Field(default=10, ge=0, le=MAX_COUNT)
    """Steps between validations; 0: only after the last step."""
    val_before_train: bool = True
    val_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Rollouts per validation task."""
    save_every: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps between saved adapters (`checkpoint/step-N`); 0: only the last one (`checkpoint`)."""

    def steps(self, n_train: int) -> int:
        """Return the number of steps for `n_train` training tasks."""
        if self.n_steps is not None:
            return self.n_steps
        return -(-n_train * self.n_epochs // self.tasks_per_step)


def rename_passes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `ppo_epochs` in place of `passes`.

    Raises:
        ValueError: both are given.
    """
    passes = values.get("passes")
    if type(passes) is not int or not 1 <= passes <= MAX_SAMPLES:  # it stays, and its own bounds reject it
        return dict(values)
    if "ppo_epochs" in values:
        raise ValueError("passes is another name of ppo_epochs; give one of them")
    return {"ppo_epochs" if name == "passes" else name: value for name, value in values.items()}
