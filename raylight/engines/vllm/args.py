"""The arguments that vLLM is started with: the user's own, whatever vLLM knows, over raylight's defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylight.engines.vllm.worker import WORKER_EXTENSION
from raylight.errors import ConfigError

LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the distribution really sampled from; anything else could not be trained on."""
FIXED: dict[str, Any] = {
    "logprobs_mode": LOGPROBS_MODE,
    "worker_extension_cls": WORKER_EXTENSION,
    "enable_log_outputs": False,
}
"""What raylight relies on; another value is an error."""
ELSEWHERE = {
    "model": "the model",
    "served_model_name": "the model's name",
    "dtype": "EngineConfig.dtype",
    "host": "EngineConfig.host",
    "max_model_len": "EngineConfig.max_model_len",
    "max_num_seqs": "EngineConfig.max_concurrent",
    "port": "EngineConfig.port",
    "seed": "the run's seed",
}
"""Arguments that are settings of raylight, and where they are given."""
NOT_OURS = {
    "api_key",
    "uds",
    "root_path",
    "middleware",
    "lora_modules",
    "tokens_only",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_ciphers",
    "enable_ssl_refresh",
}
"""Arguments of vLLM's own HTTP server, which does not run here: Ray Serve and raylight's gateway do."""
TOOL_PARSERS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
}
"""What a chat template writes around a tool call -> vLLM's parser for it; the first that fits."""
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 64}


def known_args() -> frozenset[str]:
    """Every argument that vLLM's engine or its OpenAI frontend has."""
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    return frozenset(
        field.name for cls in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(cls)
    )


def check_args(args: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: an argument is unknown, belongs elsewhere, or contradicts what raylight needs.
    """
    known = known_args()
    for name, value in args.items():
        if name in ELSEWHERE:
            raise ConfigError(f"EngineConfig.args: {name!r} is given as {ELSEWHERE[name]}")
        if name in NOT_OURS:
            raise ConfigError(
                f"EngineConfig.args: {name!r} is of vLLM's own HTTP server, which does not run under raylight"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known - ELSEWHERE.keys() - NOT_OURS, n=3, cutoff=0.5)
            hint = f"; it has: {', '.join(near)}" if near else ""
            raise ConfigError(f"EngineConfig.args: vLLM has no argument {name!r}{hint}")
        if name in FIXED and value != FIXED[name]:
            raise ConfigError(f"EngineConfig.args: {name} must be {FIXED[name]!r}, not {value!r}")


def vllm_args(
    path: str,
    args: Mapping[str, Any],
    *,
    dtype: str,
    max_model_len: int,
    max_concurrent: int,
    max_waiting: int,
    seed: int,
    gpus: float,
    max_adapters: int,
) -> dict[str, Any]:
    """Arguments of vLLM's engine and frontend, without the model and its name.

    Args:
        path: of the model; its configuration and chat template are read.
        args: the user's own.

    Raises:
        ConfigError: see `check_args`.
    """
    check_args(args)
    limit, template = _own_limit(path), chat_template(path, args.get("chat_template"))
    defaults: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": min(max_model_len, limit or max_model_len),
        "max_num_seqs": max_concurrent,
        "max_num_queued_reqs": max_concurrent + max_waiting,
        "seed": seed,
        "generation_config": "vllm",  # neutral sampling where a request says nothing; ends of text are the model's all the same
        "enable_log_requests": False,
    }
    if gpus == 0:
        defaults["enforce_eager"] = True  # compiling takes minutes on a CPU
    if max_adapters:
        defaults |= LORA | {"max_loras": 2 * max_adapters}  # two versions of each may be in use at once
    if parser := tool_parser(template):
        defaults |= {"tool_call_parser": parser, "enable_auto_tool_choice": True}
    return defaults | FIXED | dict(args)


def tool_parser(template: str | None) -> str | None:
    """vLLM's parser of the tool calls that a chat template writes."""
    return next((parser for mark, parser in TOOL_PARSERS.items() if template and mark in template), None)


def chat_template(path: str, given: str | None = None) -> str | None:
    """The text of the chat template in use: the given one (itself, or its file), or the model's own."""
    if given is not None:
        return Path(given).read_text() if "{" not in given else given
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(path).chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _own_limit(path: str) -> int | None:
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(path).get_text_config(), "max_position_embeddings", None)
