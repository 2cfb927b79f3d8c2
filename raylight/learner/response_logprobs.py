"""What a model's output says of the tokens of responses. Nothing is computed of prompts, of which no log-prob is asked."""

from __future__ import annotations

from typing import Any

import torch


def response_logprobs(output: Any, data: Any, *, packed: bool, entropy: bool) -> dict[str, torch.Tensor]:
    """Log-probs of the tokens of responses, and with `entropy` the policy's there, as verl nests them: entry i of a row is of its
    token i + 1; 0 in the prompt. Computed in float32, whatever the logits are.

    Args:
        output: of a model of the transformers library, over the micro-batch `data`, padded or `packed`.
    """
    logits, places = _logits_of_responses(output.logits, data, packed)
    counts = data["responses"].offsets().diff()
    temperature = data["temperature"].to(torch.float32)
    if not bool((temperature == 1).all()):
        logits = logits / temperature.repeat_interleave(counts)[:, None]
    logprobs = logits.float().log_softmax(-1)
    found = {"log_probs": logprobs.gather(-1, data["responses"].values()[:, None])[:, 0]}
    if entropy:
        found["entropy"] = -(logprobs.exp() * logprobs).sum(-1)
    whole, offsets = logprobs.new_zeros(places.shape), data["input_ids"].offsets()
    return {
        name: torch.nested.nested_tensor_from_jagged(whole.masked_scatter(places, values), offsets)
        for name, values in found.items()
    }


def select_response_tokens(nested: torch.Tensor, data: Any) -> torch.Tensor:
    """The entries of what is nested as above that are of responses, one row after the other."""
    return nested.values()[_places(data)[0]]


def _logits_of_responses(logits: torch.Tensor, data: Any, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that the tokens of responses were drawn from, one row after the other, and where these are among all tokens."""
    places, before = _places(data)
    return (logits[0][: len(places)][places] if packed else logits[:, : before.shape[1]][before]), places


def _places(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens before those of responses are: among all tokens of the rows, and by row, padded to the longest."""
    lengths, prompts = (data[name].offsets().diff()[:, None] for name in ("input_ids", "prompts"))
    at = torch.arange(int(lengths.max()), device=lengths.device)[None]
    before = (at >= prompts - 1) & (at < lengths - 1)
    return before[at < lengths], before
