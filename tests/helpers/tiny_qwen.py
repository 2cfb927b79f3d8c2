"""A Qwen3 of two layers with random weights and a tokenizer of bytes, built in a second."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ASCII = ["Ċ", "Ġ", *map(chr, range(33, 127))]
"""Line feed, space and the printable characters, as a tokenizer of bytes writes them."""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Call one as <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
)
"""Beginning of a chat template that shows its tools."""


def build_tiny_qwen(
    folder: Path,
    template: str = CHAT,
    *,
    letters: Sequence[str] | None = None,
    markers: Sequence[str] = (),
    seed: int = 0,
    **config: Any,
) -> str:
    """Save the model and its tokenizer in a folder, and return the folder's path.

    Args:
        letters: the tokens; every byte if None.
        markers: words that are one token each.
        config: settings of `Qwen3Config` in place of the defaults below.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    letters = letters or sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens([*markers])
    tokenizer.chat_template = template
    settings = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | config
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
