"""Shapes of models with random weights, and what a device can compute at most. Nothing is downloaded."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from raylight.quickstart import STARTER_MODEL

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHT_STD = 0.05
"""Standard deviation of random weights; with less, all tokens are equally likely."""
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
}
"""Dense bfloat16 operations per second by a part of the GPU's name, from NVIDIA's data sheets. The first
match counts."""


@dataclass(frozen=True)
class Shape:
    """A dense decoder of Qwen2's architecture, and the load that a test puts on it.

    Attributes:
        rows: rows of a training batch, and concurrent requests of an engine.
        row_tokens: length of a training row.
        answer_tokens: tokens that an engine samples for each request.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    rows: int
    row_tokens: int
    answer_tokens: int

    @property
    def parameters(self) -> int:
        """Number of parameters; the output layer is tied to the embeddings."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        biases = head * (self.heads + 2 * self.kv_heads)
        block = attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * block + self.hidden

    def flops(self, tokens: int, length: int, passes: int) -> float:
        """Return the operations for `tokens` in sequences of `length`.

        Args:
            passes: 1 for a forward pass; 3 with the backward pass.
        """
        attention = 2 * self.layers * self.hidden * length  # of a causal mask, half of all pairs
        return passes * tokens * (2 * self.parameters + attention)


SHAPES = {
    "tiny": Shape(128, 2, 4, 2, 256, 512, rows=4, row_tokens=64, answer_tokens=16),
    "0.5B": Shape(896, 24, 14, 2, 4864, 151_936, rows=32, row_tokens=1024, answer_tokens=256),
    "1.5B": Shape(1536, 28, 12, 2, 8960, 151_936, rows=32, row_tokens=1024, answer_tokens=256),
}
"""Shapes by name: a tiny one for tests on a CPU, and Qwen2.5 0.5B and 1.5B."""


def build(shape: Shape, folder: Path, device: str) -> str:
    """Save a model with random bfloat16 weights and the starter model's tokenizer; return the folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=WEIGHT_STD,
        eos_token_id=256,
        pad_token_id=257,
        dtype="bfloat16",
    )
    with torch.device(device):
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(Path(STARTER_MODEL) / name, folder)
    return str(folder)


def peak_flops() -> float | None:
    """Return the operations per second of the first GPU; None if they are not known."""
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
