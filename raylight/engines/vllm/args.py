"""Arguments of vLLM: the user's, which may be any that vLLM has, over raylight's defaults."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylight.config import EngineConfig
from raylight.engines.families import Style, find_style
from raylight.errors import ConfigError
from raylight.types import JsonObject

WORKER_EXTENSION = "raylight.engines.vllm.transfer_worker.TransferWorkerExtension"
SCHEDULER = "raylight.engines.vllm.scheduler.recording_scheduler"
LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the distribution really sampled from; others cannot be trained on."""
FIXED: JsonObject = {
    "logprobs_mode": LOGPROBS_MODE,
    "worker_extension_cls": WORKER_EXTENSION,
    "enable_log_outputs": False,
}
"""Values that raylight relies on; another value is an error."""
RAYLIGHT_SETTINGS = {
    "model": "the model",
    "served_model_name": "the model's name",
    "dtype": "EngineConfig.dtype",
    "host": "EngineConfig.host",
    "max_model_len": "EngineConfig.max_model_len",
    "max_num_seqs": "EngineConfig.max_concurrent",
    "port": "EngineConfig.port",
    "seed": "the run's seed",
    "weight_transfer_config": "EngineConfig.weight_transfer",
}
"""Arguments of vLLM that are settings of raylight -> the setting."""
HTTP_SERVER_ARGS = {
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
"""Arguments of vLLM's HTTP server, which Ray Serve and raylight's gateway replace."""
ARGS_CLASSES = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "entrypoints/launchers/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
}
"""File of vLLM -> its dataclasses whose fields are arguments."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's limits of the rank of adapters."""
LORA_DEFAULTS: JsonObject = {"enable_lora": True, "max_lora_rank": 64}
UNKNOWN_CALLS = (
    "the model's tool calls stay text, because vLLM has no parser that is known to fit them: %s; set "
    "engine.args.tool_call_parser and enable_auto_tool_choice=True if one of vLLM's does"
)
logger = logging.getLogger(__name__)
RANK_REMEDY = "lower learner.lora.rank or engine.args.max_lora_rank, or set learner.lora.serve='merged'"


def workers_per_replica(args: JsonObject) -> int:
    """Return the workers of a replica, each with a part of the model.

    Args:
        args: the engine's arguments.
    """
    return int(args.get("tensor_parallel_size", 1)) * int(args.get("pipeline_parallel_size", 1))


def runs_in_core(args: JsonObject) -> bool:
    """Return True if a replica's only worker on a GPU runs in the process of vLLM's engine core.

    Args:
        args: the engine's arguments.
    """
    parallel = workers_per_replica(args) * int(args.get("data_parallel_size", 1))
    return parallel == 1 and args.get("distributed_executor_backend") in (None, "uni", "mp")


def most_workers(config: EngineConfig) -> int:
    """Return the workers of all replicas, as many as there may ever be."""
    return (config.max_replicas or config.replicas) * workers_per_replica(config.args)


def known_args() -> frozenset[str]:
    """Return all arguments of vLLM's engine and its OpenAI frontend.

    They are read from its source: an import takes half a minute on a cold disk.
    """
    package = importlib.util.find_spec("vllm")
    assert package is not None, "vLLM is installed"
    folder = Path(str(package.origin)).parent
    return frozenset(
        statement.target.id
        for file, classes in ARGS_CLASSES.items()
        for definition in ast.parse(Path(folder, file).read_text()).body
        if isinstance(definition, ast.ClassDef) and definition.name in classes
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


def check_args(args: Mapping[str, object]) -> None:
    """Check the user's arguments.

    Raises:
        ConfigError: an argument is unknown, is a setting of raylight, or contradicts a value that raylight
            needs.
    """
    known = known_args() if args else frozenset()
    for name, value in args.items():
        if name in RAYLIGHT_SETTINGS:
            raise ConfigError(f"EngineConfig.args: {name!r} must be set as {RAYLIGHT_SETTINGS[name]}")
        if name in HTTP_SERVER_ARGS:
            raise ConfigError(
                f"EngineConfig.args: {name!r} belongs to vLLM's HTTP server, which raylight's gateway "
                "replaces; leave it out"
            )
        if name not in known:
            nearest = difflib.get_close_matches(
                name, known - RAYLIGHT_SETTINGS.keys() - HTTP_SERVER_ARGS, n=3, cutoff=0.5
            )
            hint = f"; it has: {', '.join(nearest)}" if nearest else ""
            raise ConfigError(f"EngineConfig.args: vLLM has no argument {name!r}{hint}")
        if name in FIXED and value != FIXED[name]:
            raise ConfigError(f"EngineConfig.args: {name} must be {FIXED[name]!r}, not {value!r}")


def vllm_args(
    path: str,
    args: JsonObject,
    *,
    dtype: str,
    max_model_len: int,
    max_concurrent: int,
    max_waiting: int,
    seed: int,
    gpus: float,
    max_adapters: int,
    backend: str = "gloo",
) -> JsonObject:
    """Return the arguments of vLLM's engine and frontend, without the model and its name.

    Args:
        path: the model's folder; its configuration and chat template are read.
        args: the user's arguments.
        backend: backend of weight transfers.

    Raises:
        ConfigError: see `check_args` and `check_vision`.
    """
    from transformers import AutoConfig

    from raylight.images.model_inputs import reads_images

    check_args(args)
    config, style = AutoConfig.from_pretrained(path), model_style(path, args.get("chat_template"))
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    defaults: JsonObject = {
        "dtype": dtype,
        "max_model_len": min(max_model_len, limit or max_model_len),
        "max_num_seqs": max_concurrent,
        "max_num_queued_reqs": max_concurrent + max_waiting,
        "seed": seed,
        # neutral sampling defaults; the model's end-of-text tokens still apply
        "generation_config": "vllm",
        "enable_log_requests": False,
        "weight_transfer_config": {"backend": backend},
        "scheduler_cls": SCHEDULER,
    }
    if reads_images(path):
        check_vision(config.model_type, gpus)
    elif has_text_part(config):  # no update has weights of the other part; vLLM refuses images then
        defaults["language_model_only"] = True
    if gpus == 0:
        defaults["enforce_eager"] = True  # compilation takes minutes on a CPU
    if max_adapters:
        defaults |= LORA_DEFAULTS | {"max_loras": 2 * max_adapters}  # two versions of each may be in use
        rank = rank_limit(int((defaults | args)["max_lora_rank"]), RANK_REMEDY)
        args = {**args, "max_lora_rank": rank}
    if style.vllm_tools:
        defaults |= {"tool_call_parser": style.vllm_tools, "enable_auto_tool_choice": True}
    elif style.takes_tools and "tool_call_parser" not in args:
        logger.warning(UNKNOWN_CALLS, style.reason)
    if style.vllm_reasoning:
        defaults["reasoning_parser"] = style.vllm_reasoning
    return defaults | FIXED | dict(args)


def check_vision(model_type: str, gpus: float) -> None:
    """Check that vLLM serves a model that takes images as learners compute it.

    Raises:
        ConfigError: torchvision is missing, or vLLM computes other log-probs without a GPU.
    """
    if gpus == 0 and model_type == "gemma3":
        raise ConfigError(
            "vLLM without a GPU computes Gemma 3 with images wrongly: its log-probs differ from the "
            "learners'; set engine={'kind': 'transformers'}, or engine.num_gpus"
        )
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            "vLLM loads a model that takes images only with torchvision, which is not installed; install the "
            "version for this torch, or set engine={'kind': 'transformers'}"
        )


def has_text_part(config: Any) -> bool:
    """Return True if `AutoModelForCausalLM` loads only the text part of a model with a vision part."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    served = str(CLASSES.get(config.model_type, ""))
    return hasattr(config, "text_config") and served.endswith("ForCausalLM")


def model_style(path: str, override: str | None = None) -> Style:
    """Find how a model writes, with the chat template in use.

    Args:
        path: the model's folder.
        override: `chat_template` of vLLM's arguments: a template's text or file.
    """
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(path)
    return find_style(AutoTokenizer.from_pretrained(path), config.model_type, read_template(override))


def read_template(override: str | None) -> str | None:
    """Return the text of a chat template that is given as text or file; None for the model's own."""
    return override if override is None or "{" in override else Path(override).read_text()


def rank_limit(rank: int, remedy: str) -> int:
    """Return the smallest limit of vLLM that admits adapters of a rank.

    Args:
        remedy: end of the error: what to do about a rank that is too high.

    Raises:
        ConfigError: vLLM serves no adapters of this rank.
    """
    fitting = [limit for limit in LORA_RANKS if limit >= rank]
    if not fitting:
        raise ConfigError(f"vLLM serves adapters up to rank {LORA_RANKS[-1]}, not {rank}: {remedy}")
    return fitting[0]
