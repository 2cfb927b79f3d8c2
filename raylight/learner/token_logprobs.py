"""Log-probs and entropies of tokens from hidden states, chunk by chunk, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**27}
"""Logits in memory at a time, by type of device. Smaller chunks cost time: each reads all output weights."""

OutputLayer = Callable[[torch.Tensor], torch.Tensor]
"""Function from hidden states, shape (tokens, hidden size), to logits, shape (tokens, vocabulary)."""


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens whose logits are in memory at a time."""
    return max(CHUNK_LOGITS[device.type] // vocabulary, 1)


def token_logprobs(
    head: OutputLayer,
    parameters: Iterable[torch.nn.Parameter],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    *,
    chunk: int,
    entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs of tokens, and with `entropy` the entropies of their distributions, both float32.

    Logits are computed chunk by chunk, and again in the backward pass, so that they are never in memory for
    more than a chunk. A single chunk is not computed again.

    Args:
        head: output layer.
        parameters: parameters that `head` reads.
        hidden: hidden states that predict the targets, shape (tokens, hidden size).
        targets: token ids, shape (tokens,).
        temperatures: sampling temperatures, shape (tokens,); None if all are 1.
        chunk: tokens of a chunk.
        entropy_grad: compute the gradient of the entropies too.
    """
    tokens = (targets, temperatures)
    if len(targets) <= chunk or not torch.is_grad_enabled():
        return _all_chunks(head, chunk, entropy, entropy_grad, hidden, *tokens)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    logprobs, entropies = _ChunkedLogprobs.apply(
        head, chunk, entropy, entropy_grad, *tokens, hidden, *trained
    )
    return logprobs, entropies if entropy else None


def _all_chunks(
    head: OutputLayer,
    chunk: int,
    entropy: bool,
    entropy_grad: bool,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs and entropies of all tokens, one chunk after the other."""
    chosen, entropies = [], []
    for part in _slices(len(targets), chunk):
        logprobs = _scale(head(hidden[part]), temperatures, part).log_softmax(-1)
        chosen.append(logprobs.gather(-1, targets[part, None])[:, 0])
        if entropy:
            with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
                entropies.append(-(logprobs.exp() * logprobs).sum(-1))
        del logprobs
    return torch.cat(chosen), torch.cat(entropies) if entropy else None


def _slices(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, max(tokens, 1), chunk)]


def _scale(logits: torch.Tensor, temperatures: torch.Tensor | None, part: slice) -> torch.Tensor:
    return logits.float() if temperatures is None else logits.float() / temperatures[part, None]


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs and entropies without stored logits.

    The gradient of the logits is written down rather than derived, which needs fewer copies of a chunk than
    `torch.utils.checkpoint`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: OutputLayer,
        chunk: int,
        entropy: bool,
        entropy_grad: bool,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = _all_chunks(head, chunk, entropy, entropy_grad, hidden, targets, temperatures)
        if entropies is None:
            entropies = logprobs.new_zeros(())
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        ctx.head, ctx.chunk, ctx.entropy_grad, ctx.parameters = head, chunk, entropy_grad, parameters
        device = hidden.device.type
        ctx.autocast = (
            {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
            if torch.amp.is_autocast_available(device)
            else None
        )
        ctx.save_for_backward(targets, temperatures, hidden)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        targets, temperatures, hidden = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        totals: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        for part in _slices(len(targets), ctx.chunk):
            inputs = hidden[part].detach().requires_grad_()
            logits = _recompute(ctx, inputs)
            grad_logits = _grad_logits(
                _scale(logits.detach(), temperatures, part),
                targets[part],
                grad[part],
                grad_entropy[part] if ctx.entropy_grad else None,
            )
            if temperatures is not None:
                grad_logits.div_(temperatures[part, None])
            found = torch.autograd.grad(
                logits, [inputs, *ctx.parameters], grad_logits.to(logits.dtype), allow_unused=True
            )
            grad_hidden[part] = found[0]
            totals = [_add(total, more) for total, more in zip(totals, found[1:], strict=True)]
        return None, None, None, None, None, None, grad_hidden, *totals


def _recompute(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return a chunk's logits with their graph, computed as in the forward pass."""
    with torch.enable_grad():
        if ctx.autocast is None:
            return ctx.head(inputs)
        with torch.autocast(inputs.device.type, **ctx.autocast):
            return ctx.head(inputs)


def _grad_logits(
    logits: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor, grad_entropy: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of a chunk's scaled logits.

    With p their softmax and H its entropy: `grad * (onehot - p) - grad_entropy * p * (log p + H)`.
    """
    if grad_entropy is None:
        result = logits.softmax(-1).mul_(-grad[:, None])
    else:
        logprobs = logits.log_softmax(-1)
        result = logprobs.exp()
        entropies = -(result * logprobs).sum(-1, keepdim=True)
        weights = logprobs.add_(entropies).mul_(grad_entropy[:, None]).add_(grad[:, None])
        result.mul_(weights.neg_())
    return result.scatter_add_(-1, targets[:, None], grad[:, None])


def _add(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if total is None or more is None:
        return more if total is None else total
    return total.add_(more)
