"""Writes the table of architectures in docs/models.md: `python docs/generate_models.py`, with vLLM installed.

`--vllm` also loads each architecture, or the model types that follow, into vLLM and compares log-probs after
an update: up to a minute each. Without it, these columns are kept. Reasons are printed.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from raylight.config import LearnerConfig
from raylight.engines.vllm.update_repairs import load_tied_output
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.model.model_check import build_on_meta, round_trip, trained_class
from raylight.learner.model.varlen_attention import supports_varlen
from raylight.quickstart import STARTER_MODEL
from raylight.weights.source import WeightSource

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "learner"))

PAGE = Path(__file__).parent / "models.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
COLUMNS = ("names checked", "trains", "trained in tests", "in vLLM", "same log-probs", "packed rows")
HEADER = f"| architecture | `model_type` | {' | '.join(COLUMNS)} |"
UPDATE = Path(__file__).parents[1] / "tests" / "vllm_cpu" / "weight_update.py"
UPDATE_TIMEOUT_S = 240
MAX_DIFFERENCE = 1e-3
"""Largest difference of log-probs, in float32, between vLLM and transformers."""
MAX_MISMATCH = 1e-4
"""Largest mean difference of log-probs, in float32, between the learner and transformers."""
TRAINED = {"qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "qwen3_next", "gpt_oss"}
"""Model types that the tests train."""
SIZES = {
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 128,
    "n_embd": 128,
    "d_model": 128,
    "ffn_hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Small values of settings, where an architecture has them."""
UNSUPPORTED = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")
"""Parts of vLLM's registry with classes that it does not have."""
TEXT = (
    "vocab_size",
    "vocab_size_per_layer_input",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
PARTS = {"text_config": {name: SIZES[name] for name in TEXT}, "vision_config": {"num_hidden_layers": 2}}
LATENT = {"head_dim": 16, "num_key_value_heads": 4}
"""Attention with latent keys and values, which has as many heads of them as of queries."""
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""A layer with a state, and one with attention."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "glm4_moe": {"head_dim": 32},
    "gemma3": PARTS,
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": None},
    "gemma4": PARTS,
    "gemma4_unified": PARTS,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {
        "text_config": PARTS["text_config"] | {"num_local_experts": 4, "intermediate_size_mlp": 96},
        "vision_config": {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96}
        | {"num_attention_heads": 4, "vision_output_dim": 64, "projector_input_dim": 64},
    },
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "chunk_size": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "chunk_size": 16},
    "qwen3_5": {"text_config": PARTS["text_config"] | HYBRID, "vision_config": {"depth": 1}},
    "qwen3_5_moe": {
        "text_config": PARTS["text_config"] | HYBRID | EXPERTS,
        "vision_config": {"depth": 1},
    },
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "mamba_d_state": 16,
        "chunk_size": 16,
    },
}
"""Further settings, by model type."""


def architectures() -> dict[str, str]:
    """Return the classes that generate text in transformers and in vLLM, by model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    served = served_by_vllm()
    return {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in served}


def served_by_vllm() -> set[str]:
    """Return the names of vLLM's registry."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        raise SystemExit("vLLM is not installed here, and its registry is needed; see docs/install.md")
    path = Path(vllm.origin).parent / "model_executor" / "models" / "registry.py"
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            if ast.unparse(node.targets[0]) in UNSUPPORTED:
                continue
            names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return names


def tiny_config(model_type: str, name: str) -> Any:
    """Return a small configuration of an architecture."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {setting: value for setting, value in SIZES.items() if setting in known}
    config = AutoConfig.for_model(model_type, **sizes | CHANGES.get(model_type, {}))
    config.architectures = [name]
    return config


def build(config: Any, dtype: torch.dtype) -> Any:
    """Return the whole model, of which learners may load only the text part."""
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    return (whole or trained_class(config))._from_config(copy.deepcopy(config), dtype=dtype)


def check_names(config: Any) -> str:
    """Return "yes" if exported names and shapes load into the model and are exported again.

    Otherwise return the reason.
    """
    try:
        trained = build_on_meta(config)
        with torch.device("meta"):
            exported = export(build(config, torch.float32))
        loaded = round_trip(trained, exported)
    except ConfigError as error:
        reason = str(error).partition(": ")[2].partition(";")[0]
        return f"refused: {textwrap.shorten(reason, 150, placeholder=' ...')}"
    return (
        "yes" if loaded.items() <= exported.items() else "refused: transformers does not undo its conversion"
    )


def export(module: Any) -> dict[str, tuple[int, ...]]:
    return {param.name: param.shape for param in WeightSource(module, torch.float32, tied=False).metadata()}


def train_step(config: Any) -> str:
    """Return "yes" if a learner with default settings takes a step, and its log-probs are transformers'.

    Otherwise return the reason. This process must be in a group of torch.distributed.
    """
    from ranks import make_batch, plain_logprobs

    from raylight.learner.updates.policy import Policy

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        build(config, torch.float32).save_pretrained(folder)
        save_tokenizer(folder, config)
        plain: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            batch = make_batch([found.tolist() for found in plain_logprobs(plain.eval())])
        settings = PolicySettings(lr=1e-3, max_logprob_mismatch=MAX_MISMATCH)
        norm = Policy(folder, LearnerConfig(), settings, 1).update(batch)["learner/grad_norm"]
    return "yes" if 0 < norm < math.inf else f"no: a gradient with the norm {norm}"


def save_tokenizer(folder: str, config: Any) -> None:
    """Save the quickstart's tokenizer, with as many special tokens as the configuration has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    tokenizer.bos_token = tokenizer.eos_token  # some configurations need one
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.get_text_config().pad_token_id)
    tokenizer.save_pretrained(folder)


@functools.cache
def start_vllm() -> None:
    """Join vLLM's process groups of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(VllmConfig()):
        folder = tempfile.mkdtemp()
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def load_in_vllm(config: Any) -> str:
    """Load the weights of a source into vLLM's model; return "yes" if every parameter was loaded.

    Otherwise return the reason.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    start_vllm()
    module = build(config, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        settings = EngineArgs(
            model=folder, dtype="bfloat16", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True
        ).create_engine_config()
        with set_current_vllm_config(settings):
            model: Any = initialize_model(settings)
        for parameter in model.parameters():
            parameter.data.fill_(math.nan if parameter.is_floating_point() else 0)
        load_tied_output(model)
        model.load_weights(iter(WeightSource(module, torch.bfloat16)))
    missing = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    return "yes" if not missing else f"no: not loaded: {', '.join(missing[:2])}"


def compare_in_vllm(config: Any) -> str:
    """Return "yes" if vLLM's log-probs match transformers', before and after an update of its weights.

    Otherwise return the reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(config, "initializer_range"):
            config.initializer_range = 0.1  # so that an update that is lost changes the log-probs
        build(config, torch.float32).save_pretrained(folder)
        command = [sys.executable, str(UPDATE), folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=UPDATE_TIMEOUT_S)
    if done.returncode:
        return f"no: {done.stderr.strip().splitlines()[-1]}"
    found = json.loads(done.stdout.splitlines()[-1])
    if found["loaded"] < MAX_DIFFERENCE > found["updated"] and found["old"] > MAX_DIFFERENCE:
        return "yes"
    return f"no: differences {found}"


def read_rows() -> dict[str, list[str]]:
    """Return the cells of the committed table, by model type."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[1].strip(" `"): row for row in rows}


def table(rows: dict[str, list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows.values()]
    return "\n".join([HEADER, "|---" * (2 + len(COLUMNS)) + "|", *lines]) + "\n"


def make_row(model_type: str, name: str, with_vllm: bool, known: dict[str, list[str]]) -> list[str]:
    config = tiny_config(model_type, name)
    names = check_names(config)
    trains = _result(train_step, config) if names == "yes" else ""
    found = known[model_type][5:7] if model_type in known else ["", ""]
    if with_vllm:
        found = ["", ""]
        for column, check in enumerate((load_in_vllm, compare_in_vllm)):
            result = _result(check, config) if names == "yes" else ""
            if result != "yes":
                print(model_type, check.__name__, result[:600], file=sys.stderr, flush=True)
                break
            found[column] = result
    trained = "yes" if model_type in TRAINED else ""
    return [f"`{name}`", f"`{model_type}`", names, trains, trained, *found, packed_rows(config, names)]


def packed_rows(config: Any, names: str) -> str:
    """Return "yes" if rows of a model that can be trained are packed without a mask."""
    return "yes" if names == "yes" and supports_varlen(config, trained_class(config)) else ""


def _result(check: Callable[[Any], str], config: Any) -> str:
    try:
        return check(config)
    except Exception as error:  # of any kind: vLLM's CPU build or this small configuration of it
        return f"no: {error!r}"


def main(arguments: list[str]) -> None:
    logging.disable(logging.WARNING)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    known, rows = read_rows(), {}
    for model_type, name in architectures().items():
        with_vllm = arguments[:1] == ["--vllm"] and (len(arguments) == 1 or model_type in arguments)
        rows[model_type] = make_row(model_type, name, with_vllm, known)
    torch.distributed.destroy_process_group()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main(sys.argv[1:])
