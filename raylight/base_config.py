"""Base class of typed settings. An unknown key raises an error that names the nearest known keys."""

from __future__ import annotations

import difflib
import warnings
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from raylight._utils.bounds import check_plain
from raylight.errors import ConfigError

MAX_SHOWN = 120
"""Characters of a wrong value that an error message shows."""
SECRET = ("key", "password", "token")
"""Endings of the names of settings whose values no message shows."""


OLD_NAMES = {("StoreConfig", "lease_seconds"): "lease_s"}
"""Names of settings until version 0.2, by class and old name; they are read until 1.0."""
OLD_VALUES = {
    (cls, "dtype", old): new
    for cls in ("LearnerConfig", "MiniGRPO")
    for old, new in (("fp32", "float32"), ("bf16", "bfloat16"))
}
"""Values until version 0.2, by class, setting and old value; they are read until 1.0."""

PEERS_NAMES = {
    "adv_estimator": ("advantage_estimator",),
    "clip_ratio_high": ("epsilon", "epsilon_high", "eps_clip", "eps_clip_high", "ratio_clip_max"),
    "clip_ratio_low": ("epsilon", "eps_clip", "eps_clip_low", "ratio_clip_min"),
    "grad_clip": ("max_grad_norm",),
    "group_size": (
        "n",
        "n_samples",
        "n_samples_per_prompt",
        "num_generations",
        "num_generations_per_prompt",
        "rollouts_per_example",
    ),
    "kl_coef": ("beta", "kl_loss_coef", "reference_policy_kl_penalty"),
    "lam": ("gae_lambda", "lambd"),
    "loss_agg_mode": ("loss_reduction", "loss_type"),
    "loss_mode": ("loss_type",),
    "lr": ("learning_rate",),
    "lr_warmup_steps": ("warmup_steps",),
    "max_staleness": (
        "max_async_level",
        "max_head_offpolicyness",
        "max_off_policy_steps",
        "max_staleness_steps",
    ),
    "n_epochs": ("epochs", "max_num_epochs", "num_train_epochs", "total_epochs", "total_train_epochs"),
    "n_steps": ("max_num_steps", "max_steps", "num_rollout", "total_steps", "total_training_steps"),
    "norm_adv_by_std": ("norm_adv_by_std_in_grpo", "scale_rewards"),
    "ppo_epochs": ("num_iterations",),
    "tasks_per_step": ("num_prompts_per_step", "rollout_batch_size", "train_batch_size"),
    "val_every": ("eval_interval", "eval_steps", "test_freq", "val_period"),
}
"""Names that verl, TRL, SkyRL, slime, prime-rl, AReaL and NeMo-RL have for settings, by raylight's name. An
error about an unknown setting translates them."""


class Config(BaseModel):
    """Base class of all settings: frozen after creation; unknown keys are rejected; numbers are finite and
    bounded."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, **values: object) -> None:
        """Validate the settings.

        Raises:
            ConfigError: a key is unknown or a value is invalid; the message names each of them.
        """
        try:
            super().__init__(**renewed(type(self).__name__, values))
        except ValidationError as error:
            raise ConfigError(validation_message(type(self), error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain(cls, value: object, info: ValidationInfo) -> object:
        return check_plain(cls, str(info.field_name), value)

    @classmethod
    def parse(cls, values: Self | dict[str, object] | None, **overrides: object) -> Self:
        """Return settings from an instance, a dict, or None (all defaults), updated with overrides.

        Args:
            values: the settings.
            overrides: settings given as separate arguments, such as `n_runners`; None counts as not given.

        Raises:
            ConfigError: a key is unknown, a value is invalid, `values` has another type, or a setting has
                different values in `values` and in `overrides`.
        """
        if not isinstance(values, cls | dict | None):
            raise ConfigError(f"{cls.__name__} takes a dict or a {cls.__name__}, not {type(values).__name__}")
        settings = values.model_dump(exclude_unset=True) if isinstance(values, cls) else dict(values or {})
        arguments = {name: value for name, value in overrides.items() if value is not None}
        for name, value in arguments.items():
            if settings.get(name) is not None and settings[name] != value:
                raise ConfigError(
                    f"{cls.__name__}.{name} is {settings[name]!r} in the settings and {value!r} as an "
                    "argument; give it once"
                )
        return cls(**settings | arguments)


def renewed(cls: str, values: dict[str, object]) -> dict[str, object]:
    """Return the settings of a class with today's names and values, and warn of old ones."""
    found = {}
    for name, value in values.items():
        new = OLD_NAMES.get((cls, name), name)
        changed = OLD_VALUES.get((cls, new, value), value) if isinstance(value, str) else value
        if (new, changed) != (name, value):
            warnings.warn(
                f"raylight.{cls}: {name}={value!r} is now {new}={changed!r}; the old form works until 1.0",
                DeprecationWarning,
                stacklevel=4,
            )
        found[new] = changed
    return found


def validation_message(cls: type[BaseModel], error: ValidationError) -> str:
    """Return one phrase for each invalid key of a pydantic error, joined by semicolons."""
    phrases = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # of settings within these, whose message names them
            phrases.append(str(cause))
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            names = {*cls.model_fields, *getattr(cls, "flat_keys", tuple)()}
            known = [own for own, others in PEERS_NAMES.items() if name in others and own in names]
            known = known or difflib.get_close_matches(name, names, n=3, cutoff=0.5) or sorted(names)
            phrases.append(f"{cls.__name__} has no setting {name!r}; it has: {', '.join(known)}")
        else:
            place = ".".join(part for part in (cls.__name__, name) if part)
            # a key stays secret, and so do those among all settings, to which an error without a name refers
            hidden = (
                not name or name.endswith(SECRET) or item["type"] == "missing"
            )  # that one has all settings
            shown = "" if hidden else f" (got {excerpt(item.get('input'))})"
            phrases.append(f"{place}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return "; ".join(phrases)


def excerpt(value: object) -> str:
    """Return the representation of a value, cut to one line."""
    try:
        text = repr(value)
    except Exception as error:  # whatever the value's own class raises, or a number with too many digits
        return f"a {type(value).__name__} without representation: {type(error).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
