"""Which engine serves the policy."""

from __future__ import annotations

from raylight.errors import ConfigError

ENGINES = ("transformers",)
"""Every engine there is."""


def choose_engine(kind: str, vllm_present: bool, gpus: float) -> str:
    """The engine that `EngineConfig.kind` means where vLLM is installed or not and there are so many GPUs.

    The only engine so far is `transformers`, on CPUs and GPUs alike. One that needs vLLM is chosen by the other two facts.

    Raises:
        ConfigError: there is no engine of this kind.
    """
    if kind == "auto":
        return "transformers"
    if kind not in ENGINES:
        raise ConfigError(f"there is no engine {kind!r}; choose auto or one of: {', '.join(ENGINES)}")
    return kind
