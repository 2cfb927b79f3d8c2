"""Tokenizer of a starter model: one token per byte, and one for each word that the demonstrations share.

The words of instructions, of tool schemas and of the chat template become single tokens, so that long prompts
are short rows. Texts that differ from task to task, such as numbers and names, stay characters, so that the
model can copy, spell and count it. Nothing is trained or downloaded, and every text can be encoded.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONTROL = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
"""Tokens that end a turn, fill up a row, and begin a turn."""
CALLS = ("<tool_call>", "</tool_call>")
"""Markers around a tool call, in the format of Hermes and Qwen."""
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""Pieces of a text that may be one token: words, digits, punctuation, white space."""
SHARED = 0.3
"""Least part of the demonstrations that have a word which becomes a token."""
MAX_WORDS = 4000
"""Largest number of words that become tokens, the most frequent first."""
MODEL_LENGTH = 8192
"""Longest row of a starter model, in tokens."""


def chat_template() -> str:
    """Return the chat template, which shows a tool as one line and writes calls as Hermes and Qwen do."""
    return (Path(__file__).parent / "chat_template.jinja").read_text().rstrip("\n")


def shared_words(texts: Sequence[str], split: Callable[[str], list[str]]) -> list[str]:
    """Return the words that many texts share, the most frequent first.

    Args:
        split: splits a text into pieces, of which those with more than one character may be words.
    """
    counts = collections.Counter(itertools.chain.from_iterable(set(split(text)) for text in texts))
    shared = [(-n, piece) for piece, n in counts.items() if len(piece) > 1 and n >= SHARED * len(texts)]
    return [piece for _, piece in sorted(shared)][:MAX_WORDS]


def build_tokenizer(texts: Sequence[str]) -> Any:
    """Return the tokenizer for rendered conversations, a `PreTrainedTokenizerFast`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    markers = re.compile("|".join(map(re.escape, (*CONTROL, *CALLS))))

    def split(text: str) -> list[str]:
        parts = markers.split(text)
        return [piece for part in parts for piece, _ in pre_tokenizer.pre_tokenize_str(part)]

    words = shared_words(texts, split)
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    # words are whole tokens, and everything else is bytes: there is nothing to merge
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], ignore_merges=True))
    raw.pre_tokenizer = pre_tokenizer
    raw.decoder = decoders.ByteLevel()
    end, padding, begin = CONTROL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=end,
        pad_token=padding,
        additional_special_tokens=[begin],
        model_max_length=MODEL_LENGTH,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in CALLS])
    tokenizer.chat_template = chat_template()
    return tokenizer
