"""Divergences of a model's next-token distributions from a teacher's, chunk by chunk.

The teacher's logits are computed from its hidden states whenever a chunk needs them, so that neither model's
are in memory for more than a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from raylight.experience.settings.advantages import DivergenceKind
from raylight.learner.tokens.token_logprobs import LOWEST_LOGPROB, OutputLayer

ROUNDING_MASS = 1e-6
"""Probability that rounding leaves to the tokens that an engine has not sent."""


class TeacherHidden(NamedTuple):
    """Hidden states of a teacher in this process, for some tokens of a micro-batch."""

    head: OutputLayer
    hidden: torch.Tensor
    """Hidden states that predict the tokens, shape (tokens, hidden size)."""
    tokens: torch.Tensor
    """Indices of the tokens among the sampled ones of the micro-batch, ascending."""


class LocalDivergence:
    """Divergences from teachers in this process.

    Both distributions are over the token ids that the models share: vocabularies are padded to other sizes.

    Args:
        top_k: the teacher's most probable tokens that it distinguishes; all others are one event. None: all.
        temperatures: sampling temperatures, shape (sampled tokens,); None if all are 1.
    """

    # no dataclass: FSDP would copy it, with tensors in its own data type
    def __init__(
        self,
        kind: DivergenceKind,
        beta: float,
        top_k: int | None,
        teachers: Sequence[TeacherHidden],
        temperatures: torch.Tensor | None,
    ) -> None:
        self._kind, self._beta, self._top_k = kind, beta, top_k
        self._teachers, self._temperatures = teachers, temperatures
        self._start, self._logits = 0, torch.empty(0)

    @torch.no_grad()
    def load(self, part: slice) -> None:
        self._logits, self._start = torch.empty(0), part.start  # frees the chunk before
        found = []
        for head, hidden, tokens in self._teachers:
            first, end = torch.searchsorted(tokens, torch.tensor([part.start, part.stop]).to(tokens)).tolist()
            found.append((head(hidden[first:end]), tokens[first:end] - part.start))
        if len(found) == 1:
            self._logits = found[0][0]
            return
        size = min(logits.shape[1] for logits, _ in found)
        self._logits = found[0][0].new_empty(sum(len(tokens) for _, tokens in found), size)
        for logits, tokens in found:
            self._logits[tokens] = logits[:, :size]

    def __call__(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        with torch.no_grad():
            others = self._logits[rows.start - self._start : rows.stop - self._start].float()
            if self._temperatures is not None:
                others = others / self._temperatures[rows, None]
            shared = min(logits.shape[1], others.shape[1])
            teacher = others[:, :shared].log_softmax(-1)
        own = logits[:, :shared].log_softmax(-1)
        if self._top_k is not None and self._top_k < shared:
            ids = teacher.topk(self._top_k).indices
            own, teacher = with_rest(own, ids), with_rest(teacher, ids)
        return divergence(own, teacher, self._kind, self._beta)


class TopDivergence:
    """Divergences from a teacher of which only the most probable tokens are known; all others are one event.

    Tokens that the trained model does not have are among the others.

    Args:
        ids: the teacher's most probable tokens, shape (sampled tokens, k).
        logprobs: their log-probs at the sampling temperatures, same shape.
    """

    def __init__(self, kind: DivergenceKind, beta: float, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        self._kind, self._beta, self._ids, self._logprobs = kind, beta, ids, logprobs

    def load(self, part: slice) -> None:
        """Do nothing: all is in memory."""

    def __call__(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        ids, teacher = self._ids[rows], self._logprobs[rows]
        size = logits.shape[1]
        teacher = teacher.where(ids < size, LOWEST_LOGPROB)
        mass = teacher.exp().sum(-1, keepdim=True)
        teacher = torch.cat([teacher, (1 - mass).clamp(min=ROUNDING_MASS).log()], -1)
        # one more column, for the ids that the trained model does not have
        own = torch.nn.functional.pad(logits.log_softmax(-1), (0, 1), value=LOWEST_LOGPROB)
        return divergence(with_rest(own, ids.clamp(max=size)), teacher, self._kind, self._beta)


def with_rest(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of some tokens, and last of all others together, shape (tokens, k + 1).

    Args:
        logprobs: shape (tokens, vocabulary).
        ids: shape (tokens, k).
    """
    rest = logprobs.scatter(-1, ids, LOWEST_LOGPROB).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), rest], -1)


def divergence(own: torch.Tensor, teacher: torch.Tensor, kind: DivergenceKind, beta: float) -> torch.Tensor:
    """Return the divergence of each row of log-probs from the teacher's, shape (rows,).

    forward_kl is KL(teacher || own), reverse_kl is KL(own || teacher). js is the generalised Jensen-Shannon
    divergence, beta KL(teacher || m) + (1 - beta) KL(own || m) with m = beta teacher + (1 - beta) own
    (https://arxiv.org/abs/2306.13649).
    """
    own, teacher = own.clamp(min=LOWEST_LOGPROB), teacher.clamp(min=LOWEST_LOGPROB)
    if kind == "forward_kl":
        return _kl(teacher, own)
    if kind == "reverse_kl":
        return _kl(own, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), own + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(own, mixture)


def _kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.exp() * (one - other)).sum(-1)
