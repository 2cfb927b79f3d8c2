"""MiniGRPO: GRPO of an adapter with a local learner, for a small GPU or a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from raylight.algorithms.minigrpo.settings import AdapterSettings, TrlSettings, rename_passes
from raylight.algorithms.policy import GRPO, RunSettings
from raylight.base_config import Config
from raylight.bounds import MAX_CONCURRENT, MAX_COUNT, MAX_FACTOR, MAX_SAMPLES
from raylight.errors import ConfigError

C = TypeVar("C", bound=Config)


class MiniGRPO(AdapterSettings, GRPO):
    """Group relative policy optimisation (https://arxiv.org/abs/2402.03300) of a LoRA adapter with a local
    learner, for a GPU of 4 GB or a CPU.

    The process that calls `Trainer.fit` holds a single copy of the model. Agents run in the runners and call
    it over HTTP; it is trained in place between two decoding steps. These are GRPO's settings with other
    defaults, and those of a local learner (`learner={"kind": "local"}`) and its engine under short names.

    With `backend="trl"`, TRL's GRPOTrainer samples and updates in this process, with the settings of
    `TrlSettings`. It supports single-turn prompts only, so `prompt_of` and `reward_of` replace the agent,
    which is not called.

    Raises:
        ConfigError: a setting is unknown, out of range, in conflict with another, or would have no effect.
    """

    backend: Literal["raylight", "trl"] = "raylight"
    """raylight: agents run unchanged in runners. trl: TRL's loop, without an agent."""
    trl_prompt_of: Callable[[Any], Any] | None = Field(default=None, alias="prompt_of", exclude=True)
    trl_reward_of: Callable[[Any, str], float] | None = Field(default=None, alias="reward_of", exclude=True)
    """The two functions that replace the agent in TRL's loop, which alone reads them; see `TrlSettings`."""
    passes: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Another name of `ppo_epochs`."""
    max_concurrent: int = Field(default=16, ge=1, le=MAX_CONCURRENT)
    """Sequences sampled concurrently; each has its part of the key-value cache."""
    memory_limit_gb: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Limit of the run's estimated peak memory in 10^9 bytes; None: the free memory of the device."""
    save_every: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Steps between training states, from which a run resumes; 0: only after the last step; None: the
    Trainer's `checkpoint.every`."""
    host: str | None = None
    """Address that the HTTP server listens on; None: loopback on a cluster that the run started, else this
    machine's address."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the HTTP server; 0: any free port."""

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Return MiniGRPO, or with `backend="trl"` an algorithm with TRL's loop."""
        if settings.get("backend") == "trl":
            from raylight.algorithms.minigrpo.trl_algorithm import TrlGRPO

            given = {name: value for name, value in settings.items() if name != "backend"}
            read = {*TrlSettings.model_fields, "passes"}
            if unread := sorted(given.keys() & cls.model_fields.keys() - read):
                raise ConfigError(
                    f"nothing reads {', '.join(unread)}: backend='trl' has its own loop and serves no model"
                )
            return TrlGRPO(**given)
        return super().__new__(cls)

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("prompt_of") or values.get("reward_of"):
            raise ValueError(
                "prompt_of and reward_of are read by backend='trl' only; with backend='raylight' the agent "
                "does both"
            )
        return rename_passes(values)

    def adjust_run_settings(self, settings: RunSettings) -> RunSettings:
        """Return the settings of a run with a local learner.

        Raises:
            ConfigError: the Trainer has other values for settings of MiniGRPO.
        """
        engine: dict[str, Any] = {
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
        return replace(
            settings,
            engine=_combine("engine", settings.engine, engine),
            learner=_combine("learner", settings.learner, learner),
            checkpoint=_combine(
                "checkpoint",
                settings.checkpoint,
                {} if self.save_every is None else {"every": self.save_every},
            ),
            seed=settings.seed if self.seed is None else self.seed,
        )


def _combine(name: str, config: C, values: dict[str, Any]) -> C:
    """Return the Trainer's settings with those of MiniGRPO.

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
