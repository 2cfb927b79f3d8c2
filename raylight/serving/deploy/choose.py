"""Which engine serves the model."""

from __future__ import annotations

import importlib.util

from raylight.config import EngineConfig
from raylight.errors import ConfigError

ENGINES = ("transformers", "vllm", "upstream")
ARGS = {"transformers": {"tool_parser", "reasoning"}, "upstream": set[str]()}
"""What `EngineConfig.args` may hold, where it is not for vLLM, which knows its own."""


def choose_engine(config: EngineConfig) -> str:
    """The engine that the settings mean, and that is there.

    Raises:
        ConfigError: vLLM is asked for and not installed, or the engine has no such arguments.
    """
    kind = _kind(config)
    for name in config.args.keys() - ARGS.get(kind, config.args.keys()):
        known = ", ".join(sorted(ARGS[kind])) or "none"
        raise ConfigError(f"EngineConfig.args: the {kind} engine has no argument {name!r}; it has: {known}")
    return kind


def _kind(config: EngineConfig) -> str:
    if config.kind == "auto":
        if config.url is not None:
            return "upstream"
        return "vllm" if config.num_gpus and has_vllm() else "transformers"
    if config.kind == "vllm" and not has_vllm():
        raise ConfigError(
            "vLLM is not installed: pip install 'raylight[vllm]' on a machine with a GPU, and on a CPU as docs/serving.md tells; "
            "or use the transformers engine"
        )
    return config.kind


def has_vllm() -> bool:
    try:
        return importlib.util.find_spec("vllm.v1") is not None  # a folder called vllm is not yet vLLM
    except ModuleNotFoundError:
        return False
