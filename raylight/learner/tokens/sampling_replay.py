"""Penalties and truncation of sampled tokens, applied to a learner's logits as the engine applied them to its
own: penalties, then the temperature, then the choice of candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raylight.types import PenalisedRange, TokenSets
from raylight.types.token_sets import BITS


class PenalisedCall(NamedTuple):
    """Tokens that one call sampled with penalties."""

    tokens: torch.Tensor
    """Ids of the row up to the call's last token."""
    sampled: PenalisedRange


@dataclass(frozen=True, eq=False)
class SamplingReplay:
    """Penalties and candidates of the target tokens of a micro-batch."""

    candidates: TokenSets
    """Tokens that could have been sampled, for each target; empty if none was excluded."""
    calls: Sequence[PenalisedCall]
    call_of: NDArray[np.int64]
    """Index in `calls` for each target; -1 without penalties."""
    position_of: NDArray[np.int64]
    """Index of each target in its row."""

    def select(self, chosen: NDArray[np.int64]) -> SamplingReplay:
        """Return the part of some targets, given as ascending indices, shape (chosen,)."""
        candidates = self.candidates
        if len(candidates):
            mask = np.zeros(len(candidates), np.bool_)
            mask[chosen] = True
            candidates = candidates.select(mask)
        return SamplingReplay(candidates, self.calls, self.call_of[chosen], self.position_of[chosen])

    def penalise(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Apply the penalties to the float32 logits of a range of the targets, shape (targets,
        vocabulary)."""
        penalised = None
        for part, call, counts in self._histories(logits, rows):
            if penalised is None:
                penalised = logits.clone()
            penalty, line = call.sampled.penalties, penalised[part]
            line.mul_(self._factors(line, call, counts))
            line.sub_(counts, alpha=penalty.frequency).sub_((counts > 0).float(), alpha=penalty.presence)
        return logits if penalised is None else penalised

    def scale_grad(self, grad: torch.Tensor, logits: torch.Tensor, rows: slice) -> None:
        """Turn gradients of penalised logits, shape (targets, vocabulary), into the logits', in place."""
        for part, call, counts in self._histories(logits, rows):
            grad[part].mul_(self._factors(logits[part], call, counts))

    def exclude(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Set logits, shape (targets, vocabulary), of tokens that could not be sampled to -inf."""
        sets = self.candidates[rows] if len(self.candidates) else self.candidates
        if not len(sets.values):
            return logits
        return logits.masked_fill(~allowed_tokens(sets, logits.shape[1], logits.device), -torch.inf)

    def _histories(
        self, logits: torch.Tensor, rows: slice
    ) -> Iterator[tuple[slice, PenalisedCall, torch.Tensor]]:
        """Yield each call of a range of the targets, with its targets and with the number of times that each
        token occurs in the call's response before them, shape (targets, vocabulary)."""
        call_of = self.call_of[rows]
        for index in np.unique(call_of[call_of >= 0]):
            found, call = np.flatnonzero(call_of == index), self.calls[index]
            part = slice(int(found[0]), int(found[-1]) + 1)
            positions = torch.from_numpy(self.position_of[rows][part])
            start, stop = call.sampled.start, int(positions[-1])
            # each token counts from the first target after it on
            later = torch.searchsorted(positions, torch.arange(start, stop), right=True)
            counts = logits.new_zeros(len(positions), logits.shape[1])
            ones = counts.new_ones(stop - start)
            places = later.to(logits.device), call.tokens[start:stop].to(logits.device)
            yield part, call, counts.index_put_(places, ones, accumulate=True).cumsum_(0)

    def _factors(self, logits: torch.Tensor, call: PenalisedCall, counts: torch.Tensor) -> torch.Tensor:
        penalty = call.sampled.penalties.repetition
        seen = counts > 0
        seen[:, call.tokens[: call.sampled.start].to(seen.device)] = True
        factors = torch.where(logits > 0, 1 / penalty, penalty)
        return factors.where(seen, 1.0)


def allowed_tokens(sets: TokenSets, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return a mask of shape (positions, vocabulary) that is true for the tokens of each set."""
    sizes = torch.from_numpy(sets.sizes.astype(np.int64))
    values = torch.from_numpy(sets.values.astype(np.int64))
    allowed = torch.zeros(len(sizes), vocabulary, dtype=torch.bool, device=device)
    allowed[(sizes == 0).to(device)] = True
    starts = sizes.cumsum(0) - sizes
    filled = sizes.nonzero()[:, 0]
    are_bits = torch.zeros(len(sizes), dtype=torch.bool)
    are_bits[filled] = values[starts[filled]] == BITS
    row_of = torch.arange(len(sizes)).repeat_interleave(sizes)
    listed = ~are_bits[row_of]
    allowed[row_of[listed].to(device), values[listed].to(device)] = True
    if are_bits.any():
        words = torch.from_numpy(sets.values[~listed.numpy()]).view(int(are_bits.sum()), -1)[:, 1:]
        # bytes, not words: an integer of 64 bits for each logit would be more memory than the logits
        octets = words.contiguous().view(torch.uint8).to(device)
        bits = (octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
        allowed[are_bits.to(device)] = bits.flatten(1)[:, :vocabulary] == 1
    return allowed
