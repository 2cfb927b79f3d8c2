"""A user's configuration as one flat mapping, and over verl's defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from raylight.algorithms.verl_config.defaults import verl_defaults
from raylight.errors import ConfigError


def flatten(config: Any, whole: Collection[str]) -> dict[str, Any]:
    """Dotted key -> value.

    Args:
        config: a mapping, nested or with dotted keys or both, or a DictConfig of OmegaConf.
        whole: keys whose value is a mapping that is left as it is.

    Raises:
        ConfigError: it is something else, or says two things of one key.
    """
    if type(config).__module__.startswith("omegaconf"):
        config = _plain(config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"VERL takes verl's configuration as a dict, not {type(config).__name__}")
    flat: dict[str, Any] = {}
    for key, value in _leaves(config, "", whole):
        if key in flat and flat[key] != value:
            raise ConfigError(f"{key} is given twice, as {flat[key]!r} and as {value!r}")
        flat[key] = value
    return flat


def _plain(config: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"verl's configuration cannot be resolved: {str(error).splitlines()[0]}") from None


def _leaves(node: Mapping[Any, Any], prefix: str, whole: Collection[str]) -> Any:
    for name, value in node.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"the keys of verl's configuration are strings, and {prefix or 'the outermost'} has {name!r}"
            )
        key = prefix + name
        if isinstance(value, Mapping) and key not in whole:
            yield from _leaves(value, key + ".", whole)
        elif value != "???":  # OmegaConf's mark of what is yet to be given
            yield key, value


class Merged:
    """Values that were given, over verl's defaults; references between keys are resolved."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: a value cannot stand in a configuration.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        self._given = given
        try:
            self._config = OmegaConf.merge(verl_defaults())
            for key, value in given.items():
                OmegaConf.update(self._config, key, value, merge=True, force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None

    def __call__(self, key: str) -> Any:
        """
        Raises:
            ConfigError: the value refers to a key that is not there.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            value = OmegaConf.select(self._config, key)
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None

    def given(self, key: str) -> bool:
        return key in self._given

    def stays(self, key: str, value: Any) -> bool:
        """Whether a key that is not among the given ones has this value by default."""
        from omegaconf import OmegaConf
        from omegaconf.errors import ConfigTypeError

        absent = object()
        try:
            default = OmegaConf.select(self._config, key, default=absent)
        except ConfigTypeError:  # its parent is no mapping
            return False
        plain = OmegaConf.to_container(default, resolve=True) if OmegaConf.is_config(default) else default
        return plain is not absent and plain == value
