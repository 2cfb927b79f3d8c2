"""The settings of MiniGRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from raylight.config import Config, LoraConfig
from raylight.types import RolloutConfig

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a transformer block, as Llama, Qwen, Mistral and their kin name them."""


class MiniSettings(Config):
    """What `MiniGRPO` takes."""

    model: str
    """Folder of a Hugging Face model, or the name of one in the local cache."""
    backend: Literal["own", "trl"] = "own"
    """own: agents run unchanged, through raylight. trl: TRL's GRPOTrainer samples and updates; single-turn prompts only, of which
    `prompt_of` and `reward_of` take the place of the agent."""
    prompt_of: Callable[[Any], Any] | None = Field(default=None, exclude=True)
    """For "trl": a task -> its prompt, a text or a list of chat messages."""
    reward_of: Callable[[Any, str], float] | None = Field(default=None, exclude=True)
    """For "trl": a task and the model's text -> the reward."""
    lora: LoraConfig = Field(
        default_factory=lambda: LoraConfig(rank=8, alpha=16, dropout=0.05, target_modules=PROJECTIONS)
    )
    """The adapter. Its weights and their optimizer are held in float32, whatever `dtype` is."""
    lr: float = Field(default=1e-4, gt=0)
    """Of AdamW; an adapter wants ten to a hundred times that of the whole model."""
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    group_size: int = Field(default=8, ge=2)
    """Rollouts of one task that are compared with one another."""
    tasks_per_step: int = Field(default=4, ge=1)
    n_epochs: int = Field(default=1, ge=1)
    """Passes over the training tasks, unless `n_steps` says how many steps to take."""
    n_steps: int | None = Field(default=None, ge=0)
    passes: int = Field(default=1, ge=1)
    """Optimizer steps on each batch, each over the whole of it. With one, the ratio of PPO's objective is 1 and nothing is clipped;
    with more, it is taken to the sampled log-probabilities."""
    clip_ratio_low: float = Field(default=0.2, ge=0)
    clip_ratio_high: float = Field(default=0.2, ge=0)
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation; False is Dr.GRPO, https://arxiv.org/abs/2503.20783."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence (k3) to the model without its adapter."""
    max_model_len: int = Field(default=1024, ge=8)
    """Longest prompt plus response, in tokens, and so the longest row that is trained."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, whatever an agent asks for."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=8)
    """Tokens, with padding, of one forward and backward pass; None: `max_model_len`."""
    max_concurrent: int = Field(default=16, ge=1)
    """Sequences that are sampled at once; each has its part of the key-value cache."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Of the frozen model and of computation; auto: bf16 on a GPU and fp32 on a CPU."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    gradient_checkpointing: bool = True
    """Compute activations again in the backward pass instead of keeping them."""
    memory_limit_gb: float | None = Field(default=None, gt=0)
    """Memory that the run may need, in units of 10^9 bytes. None: what the device has free."""
    max_logprob_mismatch: float = Field(default=0.0, ge=0)
    """Largest allowed difference of log-probabilities between sampling and training; 0 chooses 1e-3 in fp32 and 0.5 in bf16."""
    val_every: int = Field(default=10, ge=0)
    """Steps between validations; 0 validates only at the end."""
    val_before_train: bool = True
    val_samples: int = Field(default=1, ge=1)
    """Rollouts per validation task."""
    failure_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of a rollout whose agent failed; None leaves it out."""
    max_steps_without_signal: int = Field(default=20, ge=1)
    """Training ends early after so many steps in a row in which no rollout was better than its group."""
    save_every: int = Field(default=0, ge=0)
    """Steps between saved adapters, `checkpoint/step-N`; 0 saves only the last one, `checkpoint`."""
    seed: int = 0
    """Of task order, of the adapter's first weights and of sampling."""
    host: str | None = None
    """Address that HTTP listens on. None: loopback on a cluster of one node, else this machine's address."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: any free one."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(timeout_seconds=600.0))
    """Limits and retries of each rollout."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        hooks = {"prompt_of": self.prompt_of, "reward_of": self.reward_of}
        missing = [name for name, hook in hooks.items() if hook is None]
        if self.backend == "trl" and missing:
            raise ValueError(
                f"backend='trl' drives single-turn prompts in one process and runs no agent; give {' and '.join(missing)}: "
                "prompt_of(task) -> prompt, reward_of(task, text) -> float"
            )
        if self.backend == "own" and len(missing) < len(hooks):
            raise ValueError(
                "prompt_of and reward_of are read by backend='trl' only; with backend='own' the agent does both"
            )
        if self.backend == "trl":
            self._refuse_unread()
        if self.max_new_tokens >= self.max_model_len:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in max_model_len={self.max_model_len}"
            )
        if self.row_budget < self.max_model_len:
            raise ValueError(
                f"a row may have max_model_len={self.max_model_len} tokens, more than max_tokens_per_micro_batch={self.row_budget}"
            )
        return self

    def _refuse_unread(self) -> None:
        """Raise ValueError for what was given and TRL's loop would not read."""
        unread = sorted(self.model_fields_set & OWN_ONLY)
        if unread:
            raise ValueError(
                f"nothing reads {', '.join(unread)}: backend='trl' brings its own loop and serves no model"
            )

    @property
    def row_budget(self) -> int:
        """Tokens of one forward and backward pass."""
        return self.max_tokens_per_micro_batch or self.max_model_len

    def steps(self, n_train: int) -> int:
        """Steps of the whole run for a training set of `n_train` tasks."""
        if self.n_steps is not None:
            return self.n_steps
        return -(-n_train * self.n_epochs // self.tasks_per_step)


OWN_ONLY = frozenset(
    (
        "max_concurrent",
        "memory_limit_gb",
        "max_logprob_mismatch",
        "failure_reward",
        "max_steps_without_signal",
        "host",
        "port",
        "rollout",
    )
)
"""Settings that only the own backend reads."""
