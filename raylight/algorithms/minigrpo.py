"""MiniGRPO: GRPO of an adapter with a local learner, for a small GPU or a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from raylight._utils.bounds import MAX_CONCURRENT, MAX_COUNT, MAX_FACTOR, MAX_SAMPLES, MAX_TASKS, Seed
from raylight.algorithms.base import BaseAlgorithm
from raylight.algorithms.policy import GRPO, RunSettings
from raylight.base_config import Config
from raylight.config import LoraConfig
from raylight.errors import ConfigError
from raylight.types import JsonObject

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Names of the linear layers of a block in Llama, Qwen, Mistral and similar models."""
READ_BY_TRL = (
    "model backend trl_prompt_of trl_reward_of lora lr weight_decay grad_clip group_size tasks_per_step "
    "n_epochs n_steps ppo_epochs loss advantage kl_coef max_model_len "
    "max_new_tokens max_tokens_per_micro_batch dtype device gradient_checkpointing seed val_every "
    "val_before_train val_samples save_every"
)
"""Settings that TRL's loop reads."""
VARIANTS_OF_TRL = {
    "loss": ("vanilla", {"name", "clip_ratio_low", "clip_ratio_high"}),
    "advantage": ("grpo", {"name", "norm_adv_by_std"}),
}
"""Setting -> the variant that TRL's loop has, and what it reads of it."""
C = TypeVar("C", bound=Config)


class MiniGRPO(GRPO):
    """Group relative policy optimisation (https://arxiv.org/abs/2402.03300) of a LoRA adapter with a local
    learner, for a GPU of 4 GB or a CPU.

    The process that calls `Trainer.fit` holds a single copy of the model. Agents run in the runners and call
    it over HTTP; it is trained in place between two decoding steps. These are GRPO's settings with other
    defaults, and a local learner's settings (`learner={"kind": "local"}`) and its engine's under short names.

    With `backend="trl"`, TRL's GRPOTrainer samples and updates in this process. It supports single-turn
    prompts only, so `prompt_of` and `reward_of` replace the agent, which is not called.

    Raises:
        ConfigError: a setting is unknown, out of range, in conflict with another, or would have no effect.
    """

    backend: Literal["raylight", "trl"] = "raylight"
    """raylight: agents run unchanged in runners. trl: TRL's loop, without an agent."""
    trl_prompt_of: Callable[[Any], object] | None = Field(default=None, alias="prompt_of", exclude=True)
    """With `backend="trl"`: function from a task to its prompt, a text or a list of chat messages."""
    trl_reward_of: Callable[[Any, str], float] | None = Field(default=None, alias="reward_of", exclude=True)
    """With `backend="trl"`: function from a task and the model's response to the reward."""
    lora: LoraConfig = Field(
        default_factory=lambda: LoraConfig(rank=8, alpha=16, dropout=0.05, target_modules=PROJECTIONS)
    )
    """Adapter. Its weights and their optimizer state are float32 for any `dtype`."""
    lr: float = Field(default=1e-4, gt=0, le=MAX_FACTOR)
    """Learning rate of AdamW; an adapter needs 10 to 100 times the rate for the full model."""
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    tasks_per_step: int = Field(default=4, ge=1, le=MAX_TASKS)
    passes: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Another name of `ppo_epochs`."""
    max_model_len: int = Field(default=1024, ge=8, le=MAX_COUNT)
    """Limit of tokens of prompt plus response, and of a trained row."""
    max_new_tokens: int = Field(default=256, ge=1, le=MAX_COUNT)
    """Limit of tokens of a response; a request can only lower it."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=8, le=MAX_COUNT)
    """Limit of tokens, padding included, of one forward and backward pass; None: `max_model_len`."""
    max_concurrent: int = Field(default=16, ge=1, le=MAX_CONCURRENT)
    """Sequences sampled concurrently; each has its part of the key-value cache."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the frozen model and of computation; auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """Torch device; auto: cuda if there is a GPU, else cpu."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of storing them."""
    memory_limit_gb: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Limit of the run's estimated peak memory in 10^9 bytes; None: the free memory of the device."""
    save_every: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Steps between training states, from which a run resumes; 0: only after the last step; None: the
    Trainer's `checkpoint.every`. With `backend="trl"`: steps between saved adapters."""
    host: str | None = None
    """Address that the HTTP server listens on; None: loopback on a cluster that the run started, else this
    machine's address."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the HTTP server; 0: any free port."""
    seed: Seed | None = None
    """Seed of the task order, the adapter's initial weights and sampling; None: the Trainer's."""

    @model_validator(mode="before")
    @classmethod
    def _rename_passes(cls, values: Any) -> object:
        passes = values.get("passes") if isinstance(values, dict) else None
        if type(passes) is not int or not 1 <= passes <= MAX_SAMPLES:  # its own bounds reject it
            return values
        if "ppo_epochs" in values:
            raise ValueError("passes is another name of ppo_epochs; give one of them")
        return {name: value for name, value in values.items() if name != "passes"} | {"ppo_epochs": passes}

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        functions = {"prompt_of": self.trl_prompt_of, "reward_of": self.trl_reward_of}
        missing = [name for name, function in functions.items() if function is None]
        if self.backend == "raylight" and len(missing) < len(functions):
            raise ValueError(
                "prompt_of and reward_of are read by backend='trl' only; with backend='raylight' the agent "
                "does both"
            )
        if self.backend == "trl" and missing:
            raise ValueError(
                f"backend='trl' calls no agent and needs {' and '.join(missing)}; set them: prompt_of(task) "
                "-> prompt, reward_of(task, text) -> float"
            )
        if self.backend == "trl" and (unread := self._unread_by_trl()):
            raise ValueError(
                f"nothing reads {', '.join(unread)}: backend='trl' has its own loop and serves no model"
            )
        return self

    def _unread_by_trl(self) -> list[str]:
        unread = self.model_fields_set.difference(READ_BY_TRL.split())
        for field, (name, keys) in VARIANTS_OF_TRL.items():
            variant = getattr(self, field)
            unread |= variant.model_fields_set - keys if variant.name == name else {f"{field}={variant.name}"}
        return sorted(unread)

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

    def with_loop(self) -> BaseAlgorithm:
        if self.backend == "raylight":
            return self
        from raylight.algorithms.trl_grpo import TrlGRPO

        return TrlGRPO(self)

    def adjust_run_settings(self, settings: RunSettings) -> RunSettings:
        """Return the settings of a run with a local learner.

        Raises:
            ConfigError: the Trainer has other values for settings of MiniGRPO.
        """
        engine: JsonObject = {
            "kind": "transformers",
            "max_model_len": self.max_model_len,
            "max_concurrent": self.max_concurrent,
            "args": {"max_new_tokens": self.max_new_tokens},
            "host": self.host,
            "port": self.port or None,
        }
        if self.dtype != "auto":
            engine["dtype"] = self.dtype
        learner = {
            "kind": "local",
            "lora": self.lora,
            "max_tokens_per_micro_batch": self.row_budget,
            "gradient_checkpointing": self.gradient_checkpointing,
            "device": self.device,
            "memory_limit_gb": self.memory_limit_gb,
        }
        if None not in (settings.seed, self.seed) and settings.seed != self.seed:
            raise ConfigError(
                f"the Trainer's seed={settings.seed} is not MiniGRPO's, {self.seed}; remove one"
            )
        saves = {} if self.save_every is None else {"every": self.save_every}
        return replace(
            settings,
            engine=_combine("engine", settings.engine, engine),
            learner=_combine("learner", settings.learner, learner),
            checkpoint=_combine("checkpoint", settings.checkpoint, saves),
            seed=settings.seed if self.seed is None else self.seed,
        )


def _combine(name: str, config: C, values: JsonObject) -> C:
    """Return the Trainer's settings, overridden by MiniGRPO's.

    Raises:
        ConfigError: the Trainer sets one of them to another value.
    """
    for field, value in values.items():
        given = getattr(config, field)
        if field in config.model_fields_set and given != value:
            raise ConfigError(
                f"{name}.{field}={given!r:.80} contradicts MiniGRPO, which sets it to {value!r:.80}; "
                f"leave it out and set it in MiniGRPO, or use GRPO with learner={{'kind': 'local'}}"
            )
    return config.model_copy(update=values)
