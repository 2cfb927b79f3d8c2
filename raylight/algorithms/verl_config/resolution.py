"""Resolution of a user's configuration into raylight's settings, by the table of keys."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass, field
from typing import Any, Final

from omegaconf import OmegaConf

from raylight.algorithms.verl_config.converters import (
    MODEL,
    ROLLOUT,
    UNSET,
    UnsupportedValueError,
    has_critic,
    translate,
)
from raylight.algorithms.verl_config.keys import KEYS, KeyRule
from raylight.algorithms.verl_config.merged_config import MergedConfig, flatten, verl_defaults
from raylight.base_config import excerpt
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import TABLES
from raylight.types import JsonObject

OPAQUE_KEYS = {f"{ROLLOUT}.engine_kwargs.vllm"}
"""Keys whose value is a mapping with any keys."""
MISSING: Final = object()
MAX_NUMBER = 1e15
"""Largest number in a configuration, far above the bounds of all settings."""


@dataclass(frozen=True)
class ResolvedSetting:
    """Value of a raylight setting, and its origin in the configuration."""

    value: object
    key: str
    from_user: bool
    """True if the user set the key or another that its converter reads; False: the value is verl's
    default."""
    key_is_set: bool
    """True if the user set this very key."""


@dataclass(frozen=True)
class Resolution:
    """Settings that a configuration resolves to, by target: `algorithm.lr`, `engine.args.enforce_eager`,
    ..."""

    settings: dict[str, ResolvedSetting] = field(default_factory=dict)

    def section(self, name: str) -> JsonObject:
        """Return the settings of a section by name; arguments of the engine are collected under `args`."""
        values: JsonObject = {}
        for target, setting in self.settings.items():
            section, _, rest = target.partition(".")
            if section == name and rest.startswith("args."):
                values.setdefault("args", {})[rest.removeprefix("args.")] = setting.value
            elif section == name:
                values[rest] = setting.value
        return values

    def get(self, target: str) -> Any:
        """Return the value of a setting, or None."""
        return self.settings[target].value if target in self.settings else None

    def algorithm_settings(self) -> JsonObject:
        """Return the arguments of a PolicyAlgorithm."""
        critic = self.section("critic")
        return self.section("algorithm") | ({"critic": critic} if critic else {})

    def with_verl_keys(self, message: str, prefix: str) -> str:
        """Return an error message with verl's key before each name of a setting."""
        variants = [variant.__name__ for table in TABLES for variant in table.variants]
        for target, setting in self.settings.items():
            name = target.removeprefix("algorithm.")
            for owner in (prefix, *variants):
                message = message.replace(f"{owner}.{name}:", f"{setting.key} ({name}):")
        return message

    def add(self, target: str, setting: ResolvedSetting) -> None:
        """Add a setting. Of two keys with one target, the one that the user set counts.

        Raises:
            ConfigError: the user set both keys, to different values.
        """
        present = self.settings.get(target)
        if (
            present is not None
            and present.key_is_set
            and setting.key_is_set
            and present.value != setting.value
        ):
            raise ConfigError(
                f"{present.key}={present.value!r} and {setting.key}={setting.value!r} both set {target}; "
                f"remove one"
            )
        if present is None or (setting.key_is_set and not present.key_is_set):
            self.settings[target] = setting


def resolve(config: object, *, strict: bool) -> Resolution:
    """Resolve a configuration.

    Args:
        strict: False turns an unsupported key or value into a warning.

    Raises:
        ConfigError: the configuration is malformed, or, if `strict`, has an unsupported key or value.
    """
    flat = flatten(config, OPAQUE_KEYS)
    _check_numbers(flat)
    merged = MergedConfig({key: value for key, value in flat.items() if key in KEYS})
    if not merged.is_set(f"{MODEL}.path"):
        raise ConfigError(
            f"{MODEL}.path is missing; set it to the folder of a Hugging Face model, or its name in the "
            f"local cache"
        )
    problems = [
        f"raylight does not support {key}; the nearest keys that it supports: {', '.join(nearest(key))}"
        for key, value in flat.items()
        if key not in KEYS and not merged.has_default(key, value)
    ]
    problems += [
        problem
        for rule in KEYS.values()
        if rule.key in flat
        for problem in _check_value(rule, flat[rule.key])
    ]
    resolution = Resolution()
    for rule in KEYS.values():
        try:
            _apply(rule, merged, resolution)
        except UnsupportedValueError as error:
            problems.append(f"{rule.key}={merged(rule.key)!r} {error}")
    if problems and strict:
        raise ConfigError("; ".join(problems) + ". VERL(config, strict=False) ignores what is not supported")
    for problem in problems:
        warnings.warn(f"ignored: {problem}", stacklevel=3)
    return resolution


def _check_numbers(flat: JsonObject) -> None:
    """Raise a ConfigError for a number that no setting can have, even in a key that is not read."""
    wrong = [
        f"{key} is {excerpt(value)}"
        for key, value in flat.items()
        if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER  # true for NaN too
    ]
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)}; give a finite number of at most {MAX_NUMBER:g}")


def _apply(rule: KeyRule, merged: MergedConfig, resolution: Resolution) -> None:
    """Add the setting that a rule makes, if any."""
    key_is_set = merged.is_set(rule.key)
    from_user = key_is_set or any(merged.is_set(key) for key in rule.reads)
    if (
        not rule.target
        or (rule.own_default and not from_user)
        or (rule.target.startswith("critic.") and not has_critic(merged))
    ):
        return
    value = merged(rule.key)
    if (rule.own_default and value is None) or (rule.when and not merged(rule.when)):
        return
    try:
        if rule.values is not None:
            converted = translate(rule.values, value)
        else:
            converted = rule.converter(rule.key, merged) if rule.converter else value
    except TypeError as error:
        values = ", ".join(f"{key}={merged(key)!r}" for key in (rule.key, *rule.reads))
        raise ConfigError(f"one of {values} has a wrong type: {error}") from None
    if converted is UNSET:
        return
    if rule.target != "engine.args":
        resolution.add(rule.target, ResolvedSetting(converted, rule.key, from_user, key_is_set))
        return
    for name, argument in converted.items():
        resolution.add(f"engine.args.{name}", ResolvedSetting(argument, rule.key, from_user, key_is_set))


def _check_value(rule: KeyRule, value: object) -> list[str]:
    """Return the problem of a value that raylight does not support, or nothing."""
    default = OmegaConf.select(verl_defaults(), rule.key, default=MISSING)
    if rule.accepted is None or value in (*rule.accepted, default):
        return []
    accepted = " or ".join(repr(known) for known in rule.accepted)
    return [f"{rule.key}={value!r} is not supported: {rule.reason}; remove it, or set it to {accepted}"]


def nearest(key: str) -> list[str]:
    """Return the three supported keys that resemble a key most, as a whole and in their last part."""

    def similarity(known: str) -> float:
        full = difflib.SequenceMatcher(None, key, known).ratio()
        last_part = difflib.SequenceMatcher(None, key.rpartition(".")[2], known.rpartition(".")[2]).ratio()
        return full + last_part

    return sorted(KEYS, key=similarity, reverse=True)[:3]
