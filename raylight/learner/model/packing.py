"""Models whose rows can be packed: without a mask between them, with one, or not at all."""

from __future__ import annotations

from raylight.types import JsonObject

# fmt: off
PACKED_MODELS = frozenset({
    "afmoe", "apertus", "arcee", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2",
    "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma",
    "gemma3_text", "gemma3n_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "granite",
    "granitemoe", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
    "jais2", "laguna", "llama", "longcat_flash", "mellum", "minimax_m2", "ministral3", "mistral",
    "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_5_vl_text",
    "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text", "smollm3", "starcoder2",
})
# fmt: on
"""Types of language models in transformers whose layers need no mask between rows, as the tests of
docs/models.md show. The state of others goes on into the next row, or their layers make masks of their
own."""
PACKED_VISION_MODELS = frozenset({"internvl", "llava_onevision", "qwen2_5_vl", "qwen3_vl"})
"""Types of models whose rows can be packed with images: as in text, each token attends to the earlier ones of
its row. (Tokens of an image attend to each other in Gemma's models, and Qwen 3.5 has layers with a state.)"""
STATE_LAYERS = {
    "compressed_sparse_attention",
    "conv",
    "heavily_compressed_attention",
    "hybrid",
    "linear_attention",
    "mamba",
    "mamba2",
    "recurrent",
}
"""Kinds of layers with a state that goes on from token to token, which no mask ends at the bound of a row."""
STATE_MODELS = {"bamba", "falcon_h1", "falcon_mamba", "jamba", "lfm2_moe", "mamba", "mamba2", "rwkv", "xlstm"}
"""Types of models with such layers whose configuration may not list its layers."""
LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
"""Settings that list the kinds of a model's layers."""
SEPARABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers of these models that need none."""
UNSUPPORTED = ("attn_logit_softcapping", "attention_dropout", "attention_chunk_size")
"""Settings of attention that the kernel for packed rows lacks."""
HEAD_SIZES = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
MAX_HEAD = 256
"""Largest head that the kernel computes."""
WINDOWS_IN_MASK = {"qwen2_moe"}
"""Types of models whose windows are in the mask alone."""


def can_pack(config: JsonObject) -> bool:
    """Return True if the kernel for packed rows computes all of a model's layers.

    Args:
        config: configuration of a language model in the format of Hugging Face.
    """
    kind, layers = config.get("model_type"), {*(config.get("layer_types") or ())}
    windows = "sliding_attention" in layers or config.get("use_sliding_window")
    return (
        kind in PACKED_MODELS
        and layers <= SEPARABLE_LAYERS
        and not any(config.get(name) for name in UNSUPPORTED)
        and not (windows and kind in WINDOWS_IN_MASK)
        and _largest_head(config) <= MAX_HEAD
    )


def keeps_state(config: JsonObject) -> bool:
    """Return True if a layer of a model keeps a state, so that each packed row would continue the one before.

    Args:
        config: configuration of a language model in the format of Hugging Face.
    """
    layers = {layer for name in LAYER_LISTS for layer in config.get(name) or ()}
    return bool(layers & STATE_LAYERS) or (not layers and config.get("model_type") in STATE_MODELS)


def _largest_head(config: JsonObject) -> int:
    sizes = [config.get(name) or 0 for name in HEAD_SIZES]
    latent = (config.get("qk_nope_head_dim") or 0) + (config.get("qk_rope_head_dim") or 0)
    plain = (config.get("hidden_size") or 0) // (config.get("num_attention_heads") or 1)
    return max(*sizes, latent) or plain
