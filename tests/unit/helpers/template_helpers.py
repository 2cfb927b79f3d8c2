"""A small tokenizer with merges, and chat templates that change past turns as real ones do."""

import functools
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|system|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEXT = (
    "the cat sat on the mat and then the other cat sat there too, so that they sat together and that was "
    "that "
)
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds numbers.", "parameters": {"type": "object"}},
}


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def make_tokenizer(chat_template: str) -> Any:
    """Return a byte-level tokenizer, in which any text has several tokenisations.

    The template is given as text, not by name.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token="<s>",
        eos_token="<|im_end|>",
        extra_special_tokens=SPECIAL,
    )
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in MARKERS])
    tokenizer.chat_template = chat_template
    return tokenizer


@functools.cache
def _trained() -> str:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator([TEXT], trainer)
    return str(raw.to_str())


def call_of(name: str, arguments: Any, call_id: str = "call_0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: Any, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def result(text: Any, call_id: str = "call_0") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}
