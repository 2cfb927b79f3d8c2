"""The rows that one pass of a model computes, as tensors on its device."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from raylight.learner.tokens.response_logprobs import TargetTokens
from raylight.learner.tokens.rows import TrainRow
from raylight.learner.tokens.sampling_replay import PenalisedCall, SamplingReplay
from raylight.types import TokenSets

HOST_ACTIVATIONS = 2**30
"""Bytes of the activations of one pass on a CPU, about. Larger passes are not faster there."""
SMALL_PASS = 512
"""Tokens of a pass below which matrix products become slower."""


def activation_bytes(module: PreTrainedModel) -> int:
    """Return about the bytes that a token adds to the activations of a training pass in float32: the inputs
    and outputs of all matrix products within the transformer."""
    outside = {module.get_input_embeddings(), module.get_output_embeddings()}
    weights = [getattr(layer, "weight", None) for layer in module.modules() if layer not in outside]
    return 4 * sum(sum(weight.shape) for weight in weights if weight is not None and weight.dim() == 2) or 1


def host_tokens(token_bytes: int) -> int:
    """Return the tokens of a pass on a CPU.

    Args:
        token_bytes: activations of a token, see `activation_bytes`.
    """
    return max(HOST_ACTIVATIONS // token_bytes, SMALL_PASS)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of a mini-batch.

    Its matrices, shape (rows, tokens), have a column for each token of the longest response, and are 0 after
    a response. The model's input has the shape (1, all tokens) if packed, else (rows, longest row).
    """

    rows: list[TrainRow]
    device: torch.device
    packed: bool
    """True if the model receives the rows as one sequence; else they are padded."""
    rollouts: int
    """Rollouts of the mini-batch on all ranks, the divisor of means over rollouts."""
    tokens: int
    """Sampled tokens of the mini-batch on all ranks, the divisor of means over tokens."""
    dp_size: int
    """Ranks among which the mini-batch is divided."""
    has_images: bool = False
    """True if a row of the mini-batch has images, on any rank."""
    entropy: bool = False
    """Compute the entropies of the sampled tokens' distributions too."""
    entropy_grad: bool = False
    """Compute the gradient of the entropies."""
    squares: bool = False
    """Compute the sums of squared probabilities of the sampled tokens' distributions too."""
    router_logits: bool = False
    """Return the logits of the routers of a mixture of experts too."""
    observations: int | None = None
    """Observed tokens of the mini-batch on all ranks, whose log-probs are computed too; None to leave them
    out."""

    def matrix(self, field: str) -> Any:
        """Return a field as (rows, tokens, ...); None unless all rows have it."""
        values = [getattr(row, field) for row in self.rows]
        if any(value is None for value in values):
            return None
        return pad_sequence(values, batch_first=True).to(self.device)

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """True for sampled tokens, shape (rows, tokens)."""
        return self._mask.to(self.device)

    @functools.cached_property
    def observed(self) -> torch.Tensor:
        """True for tokens that the environment returned, if they are computed, shape (rows, tokens)."""
        return self._observed.to(self.device)

    @functools.cached_property
    def computed(self) -> torch.Tensor:
        """True for tokens whose log-probs are computed, shape (rows, tokens)."""
        return self._computed.to(self.device)

    @functools.cached_property
    def within(self) -> torch.Tensor:
        """True for tokens of responses, shape (rows, tokens)."""
        return self._within.to(self.device)

    # what the model reads is found in host memory, so that no pass waits for the device
    @functools.cached_property
    def _mask(self) -> torch.Tensor:
        return pad_sequence([row.mask == 1 for row in self.rows], batch_first=True)

    @functools.cached_property
    def _observed(self) -> torch.Tensor:
        known = [row.observed for row in self.rows if row.observed is not None]
        if self.observations is None or len(known) < len(self.rows):
            return torch.zeros_like(self._mask)
        return pad_sequence(known, batch_first=True) == 1

    @functools.cached_property
    def _computed(self) -> torch.Tensor:
        return self._mask | self._observed

    @functools.cached_property
    def _within(self) -> torch.Tensor:
        return pad_sequence([torch.ones_like(row.mask, dtype=torch.bool) for row in self.rows], True)

    def value_positions(self) -> torch.Tensor:
        """Return True at each token before a response token: a host mask in the model's input shape."""
        return self._predicting(self._within)

    def _predicting(self, mask: torch.Tensor) -> torch.Tensor:
        """Return True for the tokens before a mask's tokens, in the shape of the model's input."""
        row, column = mask.nonzero(as_tuple=True)
        prompts = torch.tensor([len(row.prompt) for row in self.rows])
        lengths = [row.tokens for row in self.rows]
        if self.packed:
            starts = torch.tensor(self._offsets[:-1])
            found = mask.new_zeros(1, sum(lengths))
            found[0, (starts + prompts)[row] + column - 1] = True
        else:
            found = mask.new_zeros(len(lengths), max(lengths))
            found[row, prompts[row] + column - 1] = True
        return found

    def targets(self) -> TargetTokens:
        """Return the tokens of which the model computes log-probs: the sampled ones and, at temperature 1,
        observations."""
        chosen = self._computed
        temperatures = None
        if any(row.temperature != 1 for row in self.rows):
            by_row = torch.tensor([row.temperature for row in self.rows])
            of_tokens = by_row[:, None].expand(chosen.shape).where(self._mask, 1.0)
            temperatures = of_tokens[chosen].to(self.device)
        response = pad_sequence([row.response for row in self.rows], batch_first=True)
        return TargetTokens(
            positions=self._predicting(chosen),
            targets=response[chosen].to(self.device),
            temperatures=temperatures,
            entropy=self.entropy,
            entropy_grad=self.entropy_grad,
            squares=self.squares,
            router_logits=self.router_logits,
            replay=self._replay(),
        )

    def _replay(self) -> SamplingReplay | None:
        """Return the penalties and candidates of the sampled tokens; None if they have neither."""
        if not any(row.penalised or row.candidates for row in self.rows):
            return None
        candidates, calls, call_of, position_of = [], list[PenalisedCall](), [], []
        for row, computed in zip(self.rows, self._computed, strict=True):
            chosen = computed[: len(row.mask)].numpy()  # observations too, at which nothing was excluded
            positions = len(row.prompt) + np.flatnonzero(chosen)
            candidates.append((row.candidates or TokenSets.unrestricted(len(chosen))).select(chosen))
            owners = np.full(len(positions), -1)
            for found in row.penalised:
                owners[(found.start <= positions) & (positions < found.stop)] = len(calls)
                calls.append(PenalisedCall(torch.cat([row.prompt, row.response])[: found.stop], found))
            call_of.append(owners)
            position_of.append(positions)
        return SamplingReplay(
            TokenSets.join(candidates), calls, np.concatenate(call_of), np.concatenate(position_of)
        )

    def padded_inputs(self) -> dict[str, torch.Tensor]:
        """Return the model's `input_ids`, shape (rows, longest row).

        Rows are padded on the right, where no token of a causal model attends. Without a mask, attention
        takes its fastest path.
        """
        return {"input_ids": pad_sequence(self._sequences(), batch_first=True).to(self.device)}

    def packed_inputs(self) -> dict[str, object]:
        """Return verl's input for a packed pass; its tensors are jagged, (rows, tokens of a row)."""
        offsets = torch.tensor(self._offsets, device=self.device)

        def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.nested_tensor_from_jagged(torch.cat(tensors).to(self.device), offsets)

        return {
            "input_ids": nested(self._sequences()),
            "position_ids": nested([torch.arange(row.tokens) for row in self.rows]),
            "temperature": torch.ones(len(self.rows), device=self.device),  # the head has its own
            "use_remove_padding": True,
        }

    def real_tokens(self) -> torch.Tensor:
        """Return True for the tokens of rows that are trained, and False for padding and for rows that only
        keep a rank busy, shape (tokens of the model's input,)."""
        kept = [torch.full((row.tokens,), bool(row.mask.any())) for row in self.rows]
        found = torch.cat(kept) if self.packed else pad_sequence(kept, batch_first=True).flatten()
        return found.to(self.device)

    def image_tokens(self) -> torch.Tensor:
        """Return True for the tokens of images, in the shape of the model's input, in host memory."""
        found = []
        for row in self.rows:
            inside = torch.zeros(row.tokens, dtype=torch.bool)
            for image in row.images:
                inside[image.start : image.stop] = True
            found.append(inside)
        return torch.cat(found)[None] if self.packed else pad_sequence(found, batch_first=True)

    def routes(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the experts of the input's tokens, shape (tokens, layers, experts of a token), and True for
        the tokens that have some, shape (tokens,); None if none has any."""
        found = [row.routes for row in self.rows]
        some = next((routes for routes in found if routes is not None), None)
        if some is None:
            return None
        width = None if self.packed else max(row.tokens for row in self.rows)
        lengths = [width or row.tokens for row in self.rows]
        padded = some.new_zeros(sum(lengths), *some.shape[1:])
        known = torch.zeros(len(padded), dtype=torch.bool)
        for start, routes in zip(itertools.accumulate(lengths, initial=0), found, strict=False):
            if routes is not None:
                padded[start : start + len(routes)] = routes
                known[start : start + len(routes)] = True
        return padded.to(self.device), known.to(self.device)

    def _sequences(self) -> list[torch.Tensor]:
        return [torch.cat([row.prompt, row.response]) for row in self.rows]

    @functools.cached_property
    def _offsets(self) -> list[int]:
        return [0, *itertools.accumulate(row.tokens for row in self.rows)]


def place(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the mask's shape: `values`, shape (True entries,), where it is True, else 0."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
