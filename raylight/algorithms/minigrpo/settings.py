"""Settings of MiniGRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from raylight.base_config import Config
from raylight.bounds import MAX_CONCURRENT, MAX_COUNT, MAX_FACTOR, MAX_SAMPLES, MAX_TASKS, Seed
from raylight.config import LoraConfig
from raylight.experience.off_policy import OffPolicySampling
from raylight.traces.rewards import MAX_REWARD
from raylight.types import RolloutConfig

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Names of the linear layers of a block in Llama, Qwen, Mistral and similar models."""


class MiniGRPOSettings(Config):
    """Settings that `MiniGRPO` accepts."""

    model: str
    """Folder of a Hugging Face model, or its name in the local cache."""
    backend: Literal["raylight", "trl"] = "raylight"
    """raylight: agents run unchanged in runners, and raylight samples and updates. trl: TRL's GRPOTrainer
    samples and updates; `prompt_of` and `reward_of` replace the agent, and prompts have a single turn."""
    prompt_of: Callable[[Any], Any] | None = Field(default=None, exclude=True)
    """Function from a task to its prompt, a text or a list of chat messages; required by backend "trl"."""
    reward_of: Callable[[Any, str], float] | None = Field(default=None, exclude=True)
    """Function from a task and the model's response to the reward; required by backend "trl"."""
    lora: LoraConfig = Field(
        default_factory=lambda: LoraConfig(rank=8, alpha=16, dropout=0.05, target_modules=PROJECTIONS)
    )
    """Adapter. Its weights and their optimizer state are float32 for any `dtype`."""
    lr: float = Field(default=1e-4, gt=0, le=MAX_FACTOR)
    """Learning rate of AdamW; an adapter needs 10 to 100 times the rate for the full model."""
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    grad_clip: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)
    """Rollouts per task and step; they form a group."""
    tasks_per_step: int = Field(default=4, ge=1, le=MAX_TASKS)
    n_epochs: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Passes over the training tasks; ignored if `n_steps` is set."""
    n_steps: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    passes: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Optimizer steps per batch, each over the full batch. With 1, the ratio of PPO's objective is 1 and
    nothing is clipped; with more, the ratio is to the log-probs of sampling."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=MAX_FACTOR)
    clip_ratio_high: float = Field(default=0.2, ge=0, le=MAX_FACTOR)
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation; False is Dr.GRPO,
    https://arxiv.org/abs/2503.20783."""
    kl_coef: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight of the KL divergence (k3) from the model without its adapter; 0: no KL penalty."""
    max_model_len: int = Field(default=1024, ge=8, le=MAX_COUNT)
    """Limit of tokens of prompt plus response, and of a trained row."""
    max_new_tokens: int = Field(default=256, ge=1, le=MAX_COUNT)
    """Limit of tokens of a response; a request can only lower it."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=8, le=MAX_COUNT)
    """Limit of tokens, padding included, of one forward and backward pass; None: `max_model_len`."""
    max_concurrent: int = Field(default=16, ge=1, le=MAX_CONCURRENT)
    """Sequences sampled concurrently; each has its part of the key-value cache."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Data type of the frozen model and of computation; auto: bf16 on a GPU, fp32 on a CPU."""
    device: str = "auto"
    """Torch device; auto: cuda if there is a GPU, else cpu."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of storing them."""
    memory_limit_gb: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Limit of the run's estimated peak memory in 10^9 bytes; None: the free memory of the device."""
    max_logprob_mismatch: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Largest allowed mean difference of log-probs between sampling and training; the 99.9 % quantile may be
    ten times as large. 0: 1e-3 in fp32, 0.3 in bf16."""
    val_every: int = Field(default=10, ge=0, le=MAX_COUNT)
    """Steps between validations; 0: only after the last step."""
    val_before_train: bool = True
    val_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Rollouts per validation task."""
    off_policy_sampling: OffPolicySampling = "error"
    """Treatment of training calls whose recorded sampling is not the policy's own distribution: top_p, top_k,
    min_p, penalties, a bias, or temperature 0. error: the run ends. mask: their tokens are left out of the
    loss, and counted."""
    override_sampling: bool = False
    """Sample all calls of training rollouts at temperature 1, without top_p, top_k, min_p, penalties, biases
    and seeds, whatever the agent requests."""
    failure_reward: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a rollout whose agent failed; None excludes it."""
    max_steps_without_signal: int = Field(default=20, ge=1, le=MAX_COUNT)
    """Training stops after this many steps in a row in which no group has different rewards."""
    save_every: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps between saved adapters (`checkpoint/step-N`); 0: only the last one (`checkpoint`)."""
    seed: Seed = 0
    """Seed of the task order, the adapter's initial weights and sampling."""
    host: str | None = None
    """Address that the HTTP server listens on; None: loopback on a cluster that the run started, else this
    machine's address."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the HTTP server; 0: any free port."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(timeout_seconds=600.0))
    """Limits and retries of each rollout."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        hooks = {"prompt_of": self.prompt_of, "reward_of": self.reward_of}
        missing = [name for name, hook in hooks.items() if hook is None]
        if self.backend == "trl" and missing:
            raise ValueError(
                f"backend='trl' calls no agent and needs {' and '.join(missing)}; set them: prompt_of(task) "
                "-> prompt, reward_of(task, text) -> float"
            )
        if self.backend == "raylight" and len(missing) < len(hooks):
            raise ValueError(
                "prompt_of and reward_of are read by backend='trl' only; with backend='raylight' the agent "
                "does both"
            )
        if self.backend == "trl":
            self._reject_unread()
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

    def _reject_unread(self) -> None:
        """Raise ValueError for settings that TRL's loop does not read."""
        unread = sorted(self.model_fields_set & RAYLIGHT_ONLY)
        if unread:
            raise ValueError(
                f"nothing reads {', '.join(unread)}: backend='trl' has its own loop and serves no model"
            )

    @property
    def row_budget(self) -> int:
        """Limit of tokens, padding included, of one forward and backward pass."""
        return self.max_tokens_per_micro_batch or self.max_model_len

    def steps(self, n_train: int) -> int:
        """Return the number of steps for `n_train` training tasks."""
        if self.n_steps is not None:
            return self.n_steps
        return -(-n_train * self.n_epochs // self.tasks_per_step)


RAYLIGHT_ONLY = frozenset(
    (
        "max_concurrent",
        "memory_limit_gb",
        "max_logprob_mismatch",
        "off_policy_sampling",
        "override_sampling",
        "failure_reward",
        "max_steps_without_signal",
        "host",
        "port",
        "rollout",
    )
)
"""Settings that only the raylight backend reads."""
