"""Models whose rows can be packed without a mask between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEPARABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers in transformers whose attention ends at the bounds of a row. The state of other kinds goes
on into the next row."""
UNSUPPORTED = ("attn_logit_softcapping", "attention_dropout", "attention_chunk_size")
"""Settings of attention that the kernel for packed rows lacks."""
UNSUPPORTED_MODELS = {"gpt_oss"}
"""Types of models with attention sinks."""


def can_pack(config: Mapping[str, Any]) -> bool:
    """Return True if the kernel for packed rows computes all of a model's layers.

    Args:
        config: configuration of a language model in the format of Hugging Face.
    """
    kinds = {*(config.get("layer_types") or ())}
    return (
        kinds <= SEPARABLE_LAYERS
        and not any(config.get(name) for name in UNSUPPORTED)
        and config.get("model_type") not in UNSUPPORTED_MODELS
    )
