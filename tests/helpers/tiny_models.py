"""Tiny models with random weights of several architectures, with the quickstart's tokenizer."""

from pathlib import Path
from typing import Any

SMALL = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": SHARED | {"head_dim": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None},
    "qwen3_next": SHARED
    | {
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
}
"""Settings of mixture-of-experts models, by model type."""


def build_model(model_type: str, folder: Path, **changes: Any) -> str:
    """Save a tiny model with its tokenizer; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from raylight.quickstart import STARTER_MODEL

    torch.manual_seed(0)
    settings = {name: value for name, value in (SMALL | MOE.get(model_type, {})).items() if value is not None}
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **settings | changes), dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(STARTER_MODEL).save_pretrained(folder)
    return str(folder)


def build_qwen3_5(folder: Path, model_type: str = "qwen3_5", **text: Any) -> str:
    """Save a tiny Qwen 3.5 in the form of its published checkpoints, with a vision part and the layers that
    predict further tokens; return its folder.

    Args:
        text: other settings of the text part.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    from raylight.quickstart import STARTER_MODEL

    torch.manual_seed(0)
    linear = {
        name: value for name, value in MOE["qwen3_next"].items() if name.startswith(("linear", "layer"))
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    experts = SHARED if model_type == "qwen3_5_moe" else {}
    text = SMALL | linear | experts | text
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(64, 128)}, file, metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(STARTER_MODEL).save_pretrained(folder)
    return str(folder)
