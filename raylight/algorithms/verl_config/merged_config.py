"""User's configuration as one flat mapping, and merged over verl's defaults. Imports neither verl nor
torch."""

from __future__ import annotations

import functools
import importlib.util
import pickle
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException

from raylight.errors import ConfigError
from raylight.types import JsonObject

DEFAULTS_FILE = "trainer/config/_generated_ppo_trainer.yaml"
"""File in verl's package that holds its defaults."""


@functools.cache
def verl_defaults() -> Any:
    """Return verl's defaults as an OmegaConf configuration, which callers must not change.

    Raises:
        ConfigError: verl is not installed, or has no such file.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "VERL(config) reads verl's defaults, and verl is not installed; pip install verl==0.9.1"
        )
    path = Path(spec.origin).parent / DEFAULTS_FILE
    if not path.is_file():
        raise ConfigError(
            f"the installed verl has no {DEFAULTS_FILE}; raylight supports verl 0.9: pip install verl==0.9.1"
        )
    return OmegaConf.load(path)


def flatten(config: object, opaque_keys: Collection[str]) -> JsonObject:
    """Return a configuration as a mapping from dotted keys to values.

    Args:
        config: a mapping, nested or with dotted keys or both, or OmegaConf's DictConfig.
        opaque_keys: keys whose value is a mapping that is not flattened.

    Raises:
        ConfigError: `config` is something else, or has two values for one key.
    """
    if type(config).__module__.startswith("omegaconf"):
        config = _resolve_omegaconf(config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"VERL takes verl's configuration as a dict, and got {type(config).__name__}")
    flat: JsonObject = {}
    for key, value in _leaves(config, "", opaque_keys):
        if key in flat and flat[key] != value:
            raise ConfigError(f"{key} has two values, {flat[key]!r} and {value!r}; remove one")
        flat[key] = value
    return flat


@functools.cache
def _pickled_defaults() -> bytes:
    """Return verl's defaults for copies: `copy.deepcopy`, as OmegaConf does it, takes six times as long."""
    return pickle.dumps(verl_defaults())


def _resolve_omegaconf(config: object) -> object:
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"verl's configuration cannot be resolved: {str(error).splitlines()[0]}") from None


def _leaves(
    node: Mapping[object, object], prefix: str, opaque_keys: Collection[str]
) -> Iterator[tuple[str, object]]:
    for name, value in node.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"verl's configuration has the key {name!r} in {prefix or 'its outermost mapping'}; keys "
                f"are strings"
            )
        key = prefix + name
        if isinstance(value, Mapping) and key not in opaque_keys:
            yield from _leaves(value, key + ".", opaque_keys)
        elif isinstance(value, np.generic):  # OmegaConf holds Python's own types only
            yield key, value.item()
        elif value != "???":  # OmegaConf's mark of a missing value
            yield key, value


class MergedConfig:
    """Configuration merged over verl's defaults, with interpolations between keys resolved.

    Args:
        values: dotted keys and values of the user.

    Raises:
        ConfigError: OmegaConf cannot hold a value.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        try:
            self._config = pickle.loads(_pickled_defaults())
            for key, value in values.items():
                OmegaConf.update(self._config, key, value, merge=True, force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None

    def __call__(self, key: str) -> Any:
        """Return the value of a key: the user's, or else verl's default.

        Raises:
            ConfigError: the value refers to a key that does not exist.
        """
        try:
            value = OmegaConf.select(self._config, key)
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None

    def is_set(self, key: str) -> bool:
        """Return True if the user's configuration has the key."""
        return key in self._values

    def has_default(self, key: str, value: object) -> bool:
        """Return True if `value` is the default of a key that is not among the user's."""
        missing = object()
        try:
            default = OmegaConf.select(self._config, key, default=missing)
        except ConfigTypeError:  # the key's parent is not a mapping
            return False
        plain = OmegaConf.to_container(default, resolve=True) if OmegaConf.is_config(default) else default
        return plain is not missing and plain == value
