"""verl's own defaults, read from the file that it ships. Neither verl nor torch is imported."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

from raylight.errors import ConfigError

DEFAULTS = "trainer/config/_generated_ppo_trainer.yaml"


@functools.cache
def verl_defaults() -> Any:
    """An OmegaConf configuration, not to be changed.

    Raises:
        ConfigError: verl is not installed, or has no such file.
    """
    from omegaconf import OmegaConf

    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "verl is not installed, and VERL(config) reads its defaults; pip install verl==0.9.1"
        )
    path = Path(spec.origin).parent / DEFAULTS
    if not path.is_file():
        raise ConfigError(f"this verl has no {DEFAULTS}; raylight reads verl 0.9: pip install verl==0.9.1")
    return OmegaConf.load(path)
