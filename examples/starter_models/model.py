"""Starter model: a small Qwen3 with random weights and two heads that attend to the previous token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from examples.starter_models.tokenizer import MODEL_LENGTH
from raylight.errors import ConfigError

HEAD_SIZE = 32
"""Size of an attention head; vLLM on a CPU requires a multiple of 32."""
ROPE_THETA = 1e5


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a starter model."""

    hidden: int
    layers: int
    heads: int

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.heads // 2


SIZES = {
    "tiny": ModelSize(64, 2, 2),
    "small": ModelSize(96, 2, 4),
    "medium": ModelSize(128, 4, 4),
    "large": ModelSize(256, 4, 8),
}
"""Sizes by name: about 0.1, 0.25, 0.7 and 3 million parameters with the tokens of bytes alone."""


def build_model(tokenizer: Any, size: str) -> Any:
    """Return a `Qwen3ForCausalLM` for a tokenizer.

    Args:
        size: a name in `SIZES`.

    Raises:
        ConfigError: the size is unknown.
    """
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    if size not in SIZES:
        raise ConfigError(f"there is no size {size!r} of a starter model; the sizes are: {', '.join(SIZES)}")
    chosen = SIZES[size]
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),  # without padding, which could be sampled
        hidden_size=chosen.hidden,
        intermediate_size=chosen.hidden * 5 // 2 // 32 * 32,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        num_key_value_heads=chosen.key_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MODEL_LENGTH,
        initializer_range=0.05,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    model = Qwen3ForCausalLM(config)
    attend_to_previous(model)
    # explicit, so that no engine applies its own sampling defaults
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **special)
    return model


def attend_to_previous(model: Any) -> None:
    """Let two heads of the first layer attend to the previous token, whatever the tokens are.

    Copying builds on such a head, and training alone takes long to find one.
    """
    import torch

    attention, size = model.model.layers[0].self_attn, model.config.head_dim
    pairs = torch.arange(4)  # of dimensions with the highest frequencies
    angles, weights = ROPE_THETA ** (-2 * pairs / size), torch.tensor([5.6, 5.6, 4.0, 4.0])
    with torch.no_grad():
        for head in range(2):  # both use the first key head
            query = attention.q_proj.bias[head * size : (head + 1) * size]
            query[pairs], query[pairs + size // 2] = weights * angles.cos(), -weights * angles.sin()
        attention.k_proj.bias[pairs] = weights
        attention.q_norm.weight *= 1.5
        attention.k_norm.weight *= 1.5
