"""Which engine serves the policy."""

from __future__ import annotations

from raylight.errors import ConfigError

ENGINES = ("transformers",)
"""Every engine there is; the first is what `auto` means, on CPUs and GPUs alike."""


def choose_engine(kind: str) -> str:
    """The engine that `EngineConfig.kind` means.

    Raises:
        ConfigError: there is no engine of this kind.
    """
    if kind == "auto":
        return ENGINES[0]
    if kind not in ENGINES:
        raise ConfigError(f"there is no engine {kind!r}; choose auto or one of: {', '.join(ENGINES)}")
    return kind
