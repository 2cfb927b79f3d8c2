"""Log-probs and entropies of response tokens. Those of prompts are not computed, as nothing reads them."""

from __future__ import annotations

from typing import Any

import torch


def response_logprobs(output: Any, data: Any, *, packed: bool, entropy: bool) -> dict[str, torch.Tensor]:
    """Compute the log-probs of response tokens, and with `entropy` the policy's entropies at these tokens.

    Both are computed in float32, whatever the dtype of the logits.

    Args:
        output: output of a transformers model for the micro-batch `data`.
        packed: the rows of the micro-batch are concatenated rather than padded.

    Returns:
        Nested tensors `log_probs` and `entropy` of shape (rows, tokens of the row), in verl's layout: entry i
            belongs to token i + 1, and entries of the prompt are 0.
    """
    logits, selected = _response_logits(output.logits, data, packed)
    lengths = data["responses"].offsets().diff()
    temperature = data["temperature"].to(torch.float32)
    if not bool((temperature == 1).all()):
        logits = logits / temperature.repeat_interleave(lengths)[:, None]
    logprobs = logits.float().log_softmax(-1)
    results = {"log_probs": logprobs.gather(-1, data["responses"].values()[:, None])[:, 0]}
    if entropy:
        results["entropy"] = -(logprobs.exp() * logprobs).sum(-1)
    zeros, offsets = logprobs.new_zeros(selected.shape), data["input_ids"].offsets()
    return {
        name: torch.nested.nested_tensor_from_jagged(zeros.masked_scatter(selected, values), offsets)
        for name, values in results.items()
    }


def select_response_tokens(nested: torch.Tensor, data: Any) -> torch.Tensor:
    """Return the response entries of a tensor in the layout of `response_logprobs`, row after row."""
    return nested.values()[_response_masks(data)[0]]


def _response_logits(logits: torch.Tensor, data: Any, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits that predict response tokens, row after row, and their mask over all tokens."""
    flat, padded = _response_masks(data)
    return (logits[0][: len(flat)][flat] if packed else logits[:, : padded.shape[1]][padded]), flat


def _response_masks(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of the tokens before response tokens: flat over all tokens, and padded by row."""
    lengths, prompts = (data[name].offsets().diff()[:, None] for name in ("input_ids", "prompts"))
    position = torch.arange(int(lengths.max()), device=lengths.device)[None]
    padded = (position >= prompts - 1) & (position < lengths - 1)
    return padded[position < lengths], padded
