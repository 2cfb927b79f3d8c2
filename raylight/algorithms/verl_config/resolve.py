"""From a user's configuration to settings of raylight, by the table of keys."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass, field
from typing import Any, Final

from raylight.algorithms.verl_config.convert import MODEL, ROLLOUT, has_critic
from raylight.algorithms.verl_config.defaults import verl_defaults
from raylight.algorithms.verl_config.keys import KEYS
from raylight.algorithms.verl_config.read import Merged, flatten
from raylight.algorithms.verl_config.rows import NOTHING, KeyRule, NotHonouredError
from raylight.errors import ConfigError

WHOLE = {f"{ROLLOUT}.engine_kwargs.vllm"}
"""Keys whose value is a mapping with keys of its own."""
ABSENT: Final = object()


@dataclass(frozen=True)
class Found:
    """A setting, and where it is from."""

    value: Any
    key: str
    given: bool
    """Whether the configuration has the key (or another that the setting is made of); else the value is verl's default."""
    asked: bool
    """Whether it has this very key."""


@dataclass(frozen=True)
class Resolution:
    """All settings of a configuration, by target: `algorithm.lr`, `engine.args.enforce_eager`, ..."""

    found: dict[str, Found] = field(default_factory=dict)

    def section(self, name: str) -> dict[str, Any]:
        """Settings by name; `args` of engines are one of them."""
        settings: dict[str, Any] = {}
        for target, found in self.found.items():
            section, _, rest = target.partition(".")
            if section == name and rest.startswith("args."):
                settings.setdefault("args", {})[rest.removeprefix("args.")] = found.value
            elif section == name:
                settings[rest] = found.value
        return settings

    def get(self, target: str) -> Any:
        """The value of a setting, or None."""
        return self.found[target].value if target in self.found else None

    def algorithm(self) -> dict[str, Any]:
        """Arguments of a PolicyAlgorithm."""
        critic = self.section("critic")
        return self.section("algorithm") | ({"critic": critic} if critic else {})

    def in_words_of_verl(self, text: str, prefix: str) -> str:
        """A message with verl's keys for the names of settings."""
        for target, found in self.found.items():
            name = target.removeprefix("algorithm.")
            text = text.replace(f"{prefix}.{name}:", f"{found.key} ({name}):")
        return text

    def place(self, target: str, found: Found) -> None:
        """Keep a setting. Of two keys with one target the given one counts.

        Raises:
            ConfigError: both are given, and differ.
        """
        before = self.found.get(target)
        if before is not None and before.asked and found.asked and before.value != found.value:
            raise ConfigError(
                f"{before.key} and {found.key} mean the same, {target}, and are {before.value!r} and {found.value!r}; give one"
            )
        if before is None or (found.asked and not before.asked):
            self.found[target] = found


def resolve(config: Any, *, strict: bool) -> Resolution:
    """Settings of a configuration.

    Raises:
        ConfigError: it is malformed, or, where `strict`, raylight does not honour a key or its value. Otherwise each is a warning.
    """
    flat = flatten(config, WHOLE)
    values = Merged({key: value for key, value in flat.items() if key in KEYS})
    if not values.given(f"{MODEL}.path"):
        raise ConfigError(
            f"{MODEL}.path is missing: the folder of a Hugging Face model, or the name of one in the local cache"
        )
    problems = [
        _unknown(key) for key, value in flat.items() if key not in KEYS and not values.stays(key, value)
    ]
    problems += [
        problem for row in KEYS.values() if row.key in flat for problem in _disagrees(row, flat[row.key])
    ]
    resolution = Resolution()
    for row in KEYS.values():
        try:
            _honour(row, values, resolution)
        except NotHonouredError as why:
            problems.append(f"{row.key}={values(row.key)!r} {why}")
    if problems and strict:
        raise ConfigError(
            "; ".join(problems) + ". VERL(config, strict=False) leaves out what raylight does not honour"
        )
    for problem in problems:
        warnings.warn(f"left out: {problem}", stacklevel=3)
    return resolution


def _honour(row: KeyRule, values: Merged, resolution: Resolution) -> None:
    """Place the setting that a row makes."""
    asked = values.given(row.key)
    given = asked or any(values.given(key) for key in row.reads)
    if (
        not row.target
        or (row.own and not given)
        or (row.target.startswith("critic.") and not has_critic(values))
    ):
        return
    value = values(row.key)
    if row.own and value is None:
        return
    try:
        made = row.convert(value, values) if row.convert else value
    except TypeError as error:
        of = ", ".join(f"{key}={values(key)!r}" for key in (row.key, *row.reads))
        raise ConfigError(f"a value of {of} does not fit: {error}") from None
    if made is NOTHING:
        return
    if row.target != "engine.args":
        resolution.place(row.target, Found(made, row.key, given, asked))
        return
    for name, argument in made.items():
        resolution.place(f"engine.args.{name}", Found(argument, row.key, given, asked))


def _disagrees(row: KeyRule, value: Any) -> list[str]:
    """What is wrong with a value of which only some are what raylight does."""
    from omegaconf import OmegaConf

    if (
        row.agrees is None
        or value in row.agrees
        or value == OmegaConf.select(verl_defaults(), row.key, default=ABSENT)
    ):
        return []
    allowed = " or ".join(repr(known) for known in row.agrees)
    return [f"{row.key}={value!r} is not what raylight does: {row.why}; leave it out, or say {allowed}"]


def _unknown(key: str) -> str:
    return f"raylight does not honour {key}; it does: {', '.join(nearest(key))}"


def nearest(key: str) -> list[str]:
    """The three keys of the table that are most like another: as a whole, or in their last word."""

    def likeness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, key, known).ratio()
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], known.rpartition(".")[2]).ratio()
        return whole + last

    return sorted(KEYS, key=likeness, reverse=True)[:3]
