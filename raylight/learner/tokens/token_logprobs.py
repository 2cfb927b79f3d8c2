"""Log-probs, entropies and sums of squared probabilities of tokens from hidden states, chunk by chunk, with
bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from raylight.learner.tokens.sampling_replay import SamplingReplay

CHUNK_LOGITS = {"cpu": 2**26, "cuda": 2**27}
"""Logits in memory at a time, by type of device; others count as GPUs. Smaller chunks cost
time: each reads all output weights."""
BLOCK_LOGITS = {"cpu": 2**18, "cuda": 2**25}
"""Logits whose float32 copies are in memory at a time. On a CPU they stay in its cache."""
SMALL_CHUNK = 128
"""Tokens whose logits are in memory at a time, if the memory is shared with an engine's cache."""
LOWEST_LOGPROB = -1e4
"""Bound of log-probs that are multiplied by their probability, which is 0 there: minus infinity times 0 is
not."""

OutputLayer = Callable[[torch.Tensor], torch.Tensor]
"""Function from hidden states, shape (tokens, hidden size), to logits, shape (tokens, vocabulary)."""


class TokenFigures(NamedTuple):
    """Figures of tokens, float32, shape (tokens,)."""

    logprobs: torch.Tensor
    entropies: torch.Tensor | None
    divergences: torch.Tensor | None


class TokenDivergence(Protocol):
    """Divergences of tokens from a teacher, computed from logits of the trained model."""

    def load(self, part: slice) -> None:
        """Prepare for a chunk of the tokens."""
        ...

    def __call__(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the divergences of some tokens of the chunk, differentiable, shape (tokens,).

        Args:
            logits: of the trained model, over the sampling temperature, float32, shape (tokens, vocabulary).
            rows: indices of the tokens.
        """
        ...


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens whose logits are in memory at a time."""
    return max(CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"]) // vocabulary, 1)


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
    replay: SamplingReplay | None = None,
    divergence: TokenDivergence | None = None,
) -> TokenFigures:
    """Return the log-probs of tokens, and if wanted the entropies of their distributions and the divergences
    from a teacher's.

    Logits are computed chunk by chunk, and again in the backward pass, so that they are never in memory for
    more than a chunk. The last chunk is kept for the backward pass.

    Args:
        head: output layer.
        parameters: parameters that `head` reads.
        hidden: hidden states that predict the targets, shape (tokens, hidden size).
        targets: token ids, shape (tokens,).
        temperatures: sampling temperatures, shape (tokens,); None if all are 1.
        chunk: tokens of a chunk.
        entropy_grad: compute the gradient of the entropies too.
        replay: penalties and candidates of the targets; None if they have neither.
        divergence: computes the divergences, of the distributions without penalties and exclusions.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    options = head, chunk, entropy, entropy_grad, divergence, torch.is_grad_enabled()
    return TokenFigures(*_ChunkedLogprobs.apply(*options, targets, temperatures, replay, hidden, *trained))


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs and entropies without stored logits.

    The gradient of the logits is written down rather than derived, and replaces them in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: OutputLayer,
        chunk: int,
        entropy: bool,
        entropy_grad: bool,
        divergence: TokenDivergence | None,
        training: bool,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        replay: SamplingReplay | None,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropies = torch.empty_like(logprobs) if entropy else None
        divergences = torch.empty_like(logprobs) if divergence is not None else None
        for part in _slices(len(targets), chunk):
            inputs = hidden[part].detach().requires_grad_()
            logits = block = None  # frees the previous chunk's
            with torch.set_grad_enabled(training and part.stop >= len(targets)):
                logits = head(inputs)
            if divergence is not None:
                divergence.load(part)
            for rows, block in _blocks(logits.detach(), part):
                if divergence is not None and divergences is not None:
                    divergences[rows] = divergence(_sampled_logits(block, temperatures, None, rows), rows)
                found = _sampled_logits(block, temperatures, replay, rows).log_softmax(-1)
                logprobs[rows] = found.gather(-1, targets[rows, None])[:, 0]
                if entropies is not None:
                    entropies[rows] = _entropies(found.exp(), found)
        if training:
            if entropies is not None and not entropy_grad:
                ctx.mark_non_differentiable(entropies)
            ctx.head, ctx.chunk, ctx.entropy_grad, ctx.parameters = head, chunk, entropy_grad, parameters
            ctx.replay, ctx.divergence = replay, divergence
            device = hidden.device.type
            ctx.autocast = (
                {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
                if torch.amp.is_autocast_available(device)
                else None
            )
            ctx.save_for_backward(targets, temperatures, hidden)
            ctx.last = inputs, logits
        return logprobs, entropies, divergences

    @staticmethod
    def backward(
        ctx: Any,
        grad: torch.Tensor,
        grad_entropy: torch.Tensor | None,
        grad_divergence: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        targets, temperatures, hidden = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        totals: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        for part in reversed(_slices(len(targets), ctx.chunk)):
            inputs, logits = ctx.last or _recompute(ctx, hidden[part])
            ctx.last = None
            grad_logits = logits.detach()
            if grad_divergence is not None:
                ctx.divergence.load(part)
            for rows, block in _blocks(grad_logits, part):
                found = _grad_logits(
                    _sampled_logits(block, temperatures, ctx.replay, rows),
                    targets[rows],
                    grad[rows],
                    grad_entropy[rows] if ctx.entropy_grad and grad_entropy is not None else None,
                )
                if temperatures is not None:
                    found.div_(temperatures[rows, None])
                if ctx.replay is not None:
                    ctx.replay.scale_grad(found, block.float(), rows)
                if grad_divergence is not None:
                    scaled = _sampled_logits(block, temperatures, None, rows)
                    more = _grad_divergence(ctx.divergence, scaled, rows, grad_divergence[rows])
                    found += more if temperatures is None else more.div_(temperatures[rows, None])
                block.copy_(found)
            grad_hidden[part], *grads = torch.autograd.grad(
                logits, [inputs, *ctx.parameters], grad_logits, allow_unused=True
            )
            totals = [_add(total, more) for total, more in zip(totals, grads, strict=True)]
            del inputs, logits, grad_logits, block, grads
        summed = [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(totals, ctx.parameters, strict=True)
        ]
        return *[None] * 9, grad_hidden, *summed


@torch.no_grad()
def squared_probs(
    head: OutputLayer,
    hidden: torch.Tensor,
    temperatures: torch.Tensor | None,
    *,
    chunk: int,
    replay: SamplingReplay | None = None,
) -> torch.Tensor:
    """Return the sum over the vocabulary of the squared probabilities, shape (tokens,), float32, without a
    gradient; see `token_logprobs` for the arguments."""
    sums = hidden.new_empty(len(hidden), dtype=torch.float32)
    for part in _slices(len(hidden), chunk):
        for rows, block in _blocks(head(hidden[part]), part):
            sums[rows] = _sampled_logits(block, temperatures, replay, rows).softmax(-1).square_().sum(-1)
    return sums


def _slices(tokens: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, max(tokens, 1), size)]


def _blocks(logits: torch.Tensor, part: slice) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield a chunk's logits, shape (tokens, vocabulary), block by block, each after its tokens' slice."""
    size = max(BLOCK_LOGITS.get(logits.device.type, BLOCK_LOGITS["cuda"]) // logits.shape[1], 1)
    for block in _slices(len(logits), size):
        yield slice(part.start + block.start, part.start + min(block.stop, len(logits))), logits[block]


def _sampled_logits(
    logits: torch.Tensor, temperatures: torch.Tensor | None, replay: SamplingReplay | None, rows: slice
) -> torch.Tensor:
    """Return the logits that the targets were sampled from, float32, shape (tokens, vocabulary)."""
    logits = logits.float()
    if replay is not None:
        logits = replay.penalise(logits, rows)
    if temperatures is not None:
        logits = logits / temperatures[rows, None]
    return logits if replay is None else replay.exclude(logits, rows)


def _entropies(probs: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the entropies of distributions (tokens, vocabulary). Overwrites both arguments."""
    return -probs.mul_(logprobs.clamp_(min=LOWEST_LOGPROB)).sum(-1)


def _recompute(ctx: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's detached inputs and its logits with their graph, computed as in the forward pass."""
    inputs = hidden.detach().requires_grad_()
    with torch.enable_grad():
        if ctx.autocast is None:
            return inputs, ctx.head(inputs)
        with torch.autocast(inputs.device.type, **ctx.autocast):
            return inputs, ctx.head(inputs)


def _grad_logits(
    logits: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor, grad_entropy: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of scaled logits, shape (tokens, vocabulary).

    With p their softmax and H its entropy: `grad * (onehot - p) - grad_entropy * p * (log p + H)`.
    """
    if grad_entropy is None:
        result = logits.softmax(-1).mul_(-grad[:, None])
    else:
        logprobs = logits.log_softmax(-1)
        result = logprobs.exp()
        entropies = _entropies(result.clone(), logprobs)[:, None]
        result.mul_(logprobs.add_(entropies).mul_(-grad_entropy[:, None]).sub_(grad[:, None]))
    return result.scatter_add_(-1, targets[:, None], grad[:, None])


def _grad_divergence(
    divergence: TokenDivergence, logits: torch.Tensor, rows: slice, grad: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of scaled logits, derived by autograd within the block."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(divergence(leaf, rows), leaf, grad)[0]


def _add(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of gradients, in float32 from the second on: a sum of many in 16 bits loses digits."""
    if total is None or more is None:
        return more if total is None else total
    return total.float().add_(more)
