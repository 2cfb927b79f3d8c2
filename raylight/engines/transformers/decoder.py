"""Model with key-value cache and LoRA adapters, which computes the logits of batches of sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from raylight.engines.expert_routes import ExpertRoutes
from raylight.engines.transformers.adapters import LoadedAdapter, PeftAdapters, check_state
from raylight.engines.transformers.prefixes import PrefixCache, count_kept_sequences
from raylight.engines.transformers.sequence import Sequence
from raylight.engines.transformers.slot_cache import SlotCache
from raylight.engines.transformers.vision import VisionPart
from raylight.errors import EngineStartError
from raylight.images.model_inputs import ModelImages, auto_class
from raylight.types import IntArray, TopLogprobs

CACHE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Mean difference of log-probs with and without the cache above which an architecture is refused, by type."""
GROUPED = "raylight_grouped"
"""Name in transformers of the attention for models whose query heads share keys and values."""
FULL, SLIDING = "full_attention", "sliding_attention"
STATEFUL = frozenset({"linear_attention", "conv"})
"""Kinds of layers that keep a state instead of keys and values."""
Masks = torch.Tensor | dict[str, torch.Tensor]
"""The mask of all layers, or a mask for each kind of layer; shape (rows, 1, queries, keys)."""


class Decoder:
    """A model that decodes up to `slots` sequences concurrently. All calls must come from one thread.

    Args:
        path: folder of a Hugging Face model.
        dtype: torch dtype of the parameters.
        device: torch device.
        slots: number of sequences in the cache.
        longest: tokens of the longest sequence.
        record_routes: record the experts that each token is sent to.
        images: conversion of images; None loads only the language part of a model.
    """

    def __init__(
        self,
        path: str,
        dtype: str,
        device: str,
        slots: int,
        longest: int,
        record_routes: bool = False,
        images: ModelImages | None = None,
    ) -> None:
        # transformers chooses "sdpa", or "eager" for an architecture without it
        module: Any = auto_class(images is not None).from_pretrained(path, dtype=getattr(torch, dtype))
        self.module = module.to(device).eval()
        text = module.config.get_text_config()
        kinds = getattr(text, "layer_types", None) or [FULL] * text.num_hidden_layers
        self._stateful = [kind in STATEFUL for kind in kinds]
        # a state covers all tokens before, so that no part of it can be taken
        self._keeps_prefixes = not any(self._stateful)
        if torch.device(device).type == "cpu":
            use_grouped_attention(self.module)
        self._masks = AttentionMasks(self.module)
        self.device = torch.device(device)
        self.slots, self._longest = slots, longest
        self.vision = None if images is None else VisionPart(self.module, images)
        self.adapters = PeftAdapters(self.module)
        self.active: list[Sequence] = []
        """Sequences in the cache, by slot."""
        self.prefixes = PrefixCache(count_kept_sequences(slots) * longest)
        self._cache = self._empty_cache()
        self._routes = ExpertRoutes(self.module) if record_routes else None
        self._check_cache()

    def _empty_cache(self) -> SlotCache:
        return SlotCache(self._stateful, self.slots, self._longest)

    def count_missing(self, sequence: Sequence) -> int:
        """Return the number of a new sequence's tokens that must be computed."""
        adapter = sequence.adapter or self.adapters.find(sequence.adapter_name or "")
        return sequence.length - self.prefixes.find(adapter, sequence.compared_ids)[1]

    def prefill(self, admitted: list[Sequence]) -> torch.Tensor:
        """Add sequences with all their tokens so far. Equal ones are computed once, and kept prefixes not at
        all.

        Returns:
            The logits of their next tokens, shape (rows, vocabulary).
        """
        places: dict[object, int] = {}
        place = [places.setdefault((s.adapter, s.compared_ids.tobytes()), len(places)) for s in admitted]
        computed = [admitted[place.index(i)] for i in range(len(places))]
        chosen = set(computed)
        repeated = [(s, i) for s, i in zip(admitted, place, strict=True) if s not in chosen]
        first = len(self.active)
        # before the pass: if it fails, these must fail too
        self.active += [*computed, *(sequence for sequence, _ in repeated)]
        logits = self._compute(computed, first)
        if repeated:
            slots = [(first + i, first + len(computed) + n) for n, (_, i) in enumerate(repeated)]
            self._cache.copy(slots, max(sequence.length for sequence, _ in repeated))
            for sequence, i in repeated:
                sequence.record_routes(computed[i].sample.routes, 0)
                sequence.position_delta = computed[i].position_delta
        for slot, sequence in enumerate(computed, first):
            if self._keeps_prefixes and self.count_missing(sequence) > 1:
                self._keep(sequence, slot, sequence.compared_ids)
        return logits[place]

    def _compute(self, admitted: list[Sequence], first: int) -> torch.Tensor:
        """Prefill the missing tokens of sequences into the slots from `first` on.

        Returns the logits of their next tokens, shape (sequences, vocabulary). Padding would change a layer's
        state, so a model with states computes one sequence at a time.
        """
        size = max(len(admitted), 1) if self._keeps_prefixes else 1
        parts = range(0, len(admitted), size)
        return torch.cat([self._compute_padded(admitted[at : at + size], first + at) for at in parts])

    def _compute_padded(self, admitted: list[Sequence], first: int) -> torch.Tensor:
        """Compute sequences in one pass, padded to the same length; returns shape (sequences, vocabulary)."""
        rows, found = len(admitted), [self.prefixes.find(s.adapter, s.compared_ids) for s in admitted]
        lengths = torch.tensor([s.length for s in admitted])
        known = torch.tensor([count for _, count in found])
        width = int((lengths - known).max())
        # no row is padded beyond the longest sequence: one that would be computes more of its tokens
        starts = known.minimum(lengths.max() - width)
        ids = torch.zeros(rows, width, dtype=torch.long)
        for row, (sequence, start) in enumerate(zip(admitted, starts.tolist(), strict=True)):
            ids[row, : sequence.length - start] = torch.from_numpy(sequence.ids[start:])
        self._cache.prefill(first, starts, width)
        for slot, (prefix, count) in enumerate(found, first):
            if prefix is not None:
                self._cache.write(slot, prefix.states, count)
                if prefix.routes is not None:
                    admitted[slot - first].record_routes([prefix.routes[:count]], 0)
        positions = (starts[:, None] + torch.arange(width)).to(self.device)
        same = self._cache.window.positions is None
        blocks = None if self.vision is None else self.vision.blocks(admitted, self._cache.window.width)
        mask = self._masks.build(positions[:1] if same else positions, self._cache.window.width, blocks)
        ids = ids.to(self.device)
        inputs: Mapping[str, torch.Tensor] = {"input_ids": ids}
        if self.vision is not None and any(s.images for s in admitted):
            inputs = self.vision.embed(admitted, ids, starts.tolist())
            positions = self.vision.positions(admitted, positions)
        # logits only at positions where some row ends
        ends, end_of_row = (lengths - starts - 1).unique(return_inverse=True)
        logits = self._forward(admitted, inputs, positions, mask, ends.to(self.device), starts.tolist())
        return logits[torch.arange(rows, device=self.device), end_of_row.to(self.device)]

    def decode(self) -> torch.Tensor:
        """Return the logits of the next token of every active sequence, shape (rows, vocabulary)."""
        positions = torch.tensor([s.length - 1 for s in self.active], device=self.device)
        ids = torch.tensor([[s.sample.output_ids[-1]] for s in self.active], device=self.device)
        self._cache.decode(positions)
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        mask = self._masks.build(positions[:, None], self._cache.window.width)
        inputs, starts = {"input_ids": ids}, positions.tolist()
        if self.vision is not None:
            positions = positions + torch.tensor([s.position_delta for s in self.active], device=self.device)
        return self._forward(self.active, inputs, positions[:, None], mask, first, starts)[:, 0]

    def _forward(
        self,
        sequences: list[Sequence] | list[None],
        inputs: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        mask: Masks,
        keep: torch.Tensor,
        starts: list[int] | None = None,
    ) -> torch.Tensor:
        """Return logits of shape (rows, len(keep), vocabulary) at the indices `keep`.

        Args:
            inputs: tokens, or what a model with images takes in their place.
            positions: rotary positions, of shape (rows, tokens) or a model's own.
            starts: index of the first token of each row; None does not record the routes.
        """
        if self._routes is not None and starts is not None:
            with self._routes.recording() as routes:
                logits = self._forward(sequences, inputs, positions, mask, keep)
            rows = routes().reshape(len(sequences), -1, self._routes.layers, self._routes.top_k)
            for sequence, found, start in zip(sequences, rows, starts, strict=True):
                assert sequence is not None
                sequence.record_routes([found[: sequence.length - start]], start)
            return logits
        return self.adapters.forward(
            [s.adapter if s else None for s in sequences],
            **inputs,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    @torch.inference_mode()
    def _check_cache(self) -> None:
        """Compare the last token of a short sequence, decoded with the cache, with one pass of the model.

        Raises:
            EngineStartError: they differ, as for an architecture whose layers use the cache in another way.
        """
        refused = f"the transformers engine cannot serve {type(self.module).__name__}: with its cache, "
        remedy = "use engine={'kind': 'vllm'}"
        length = 8
        # the first ids are special tokens, on which a pretrained model in bfloat16 differs from itself
        step = max(self.module.get_input_embeddings().num_embeddings // (length + 2), 1)
        ids = step * torch.arange(1, length + 1, device=self.device)[None]
        expected = self.module(input_ids=ids, use_cache=False).logits[0, -1]
        try:
            found = self._decode_last(ids)
        except Exception as error:  # an architecture's own code may fail in any way
            raise EngineStartError(f"{refused}it fails with {error!r:.200}; {remedy}") from error
        difference = (found.float().log_softmax(-1) - expected.float().log_softmax(-1)).abs().mean()
        if not difference <= CACHE_TOLERANCE[found.dtype]:
            raise EngineStartError(
                f"{refused}log-probs differ by {float(difference):.2g} on average; {remedy}"
            )

    def _decode_last(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits after the tokens `ids`, shape (1, length), of which the last is decoded, and the
        others are computed in two parts where prefixes are kept."""
        last = ids.shape[1] - 1
        bounds = [0, last // 2, last] if self._keeps_prefixes else [0, last]
        for start, end in itertools.pairwise(bounds):
            positions = torch.arange(start, end, device=self.device)[None]
            self._cache.prefill(0, positions[:, 0].cpu(), end - start)
            mask, at = self._masks.build(positions, end), torch.full_like(ids[0, :1], end - start - 1)
            self._forward([None], {"input_ids": ids[:, start:end]}, positions, mask, at)
        positions = torch.tensor([last], device=self.device)
        self._cache.decode(positions)
        mask = self._masks.build(positions[None], last + 1)
        final = {"input_ids": ids[:, -1:]}
        return self._forward([None], final, positions[None], mask, torch.zeros_like(ids[0, :1]))[0, 0]

    def logprobs(
        self, ids: list[int], adapter: LoadedAdapter | None, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-probabilities of `ids[1:]` at a temperature, each given the ids before it."""
        targets = torch.tensor(ids[1:], device=self.device)
        return self._distributions(ids, adapter, temperature).gather(-1, targets[:, None])[:, 0].tolist()

    def top_logprobs(self, ids: list[int], k: int, temperature: float) -> TopLogprobs:
        """Return the k most probable tokens in the place of each of `ids[1:]`, given the ids before it."""
        found = self._distributions(ids, None, temperature).topk(k)
        return TopLogprobs(found.indices.int().cpu().numpy(), found.values.cpu().numpy())

    def _distributions(
        self, ids: list[int], adapter: LoadedAdapter | None, temperature: float
    ) -> torch.Tensor:
        tokens = torch.tensor([ids], device=self.device)
        logits = self.adapters.forward([adapter], input_ids=tokens, use_cache=False).logits[0, :-1]
        return (logits.float() / temperature).log_softmax(-1)

    def retire(self, sequence: Sequence) -> None:
        """Remove a sequence, and cache the keys and values of all but its last token."""
        adapter = sequence.adapter
        is_current = adapter is None or self.adapters.find(adapter.name) is adapter
        if self._keeps_prefixes and is_current:
            self._keep(sequence, self.active.index(sequence), sequence.compared_ids[:-1])
        self.remove(sequence)

    def _keep(self, sequence: Sequence, slot: int, ids: IntArray) -> None:
        """Cache the keys and values of a sequence's first tokens, `ids` of shape (tokens,), as a prefix."""
        routes = np.concatenate(sequence.sample.routes)[: len(ids)] if self._routes is not None else None
        self.prefixes.keep(sequence.adapter, ids, self._cache.read(slot, len(ids)), routes)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; the last active one moves into its slot, so that slots stay dense."""
        slot, last = self.active.index(sequence), len(self.active) - 1
        if slot != last:
            self._cache.move(last, slot, self.active[last].length)
            self.active[slot] = self.active[last]
        self.active.pop()

    def clear(self) -> list[Sequence]:
        """Empty the cache; returns the sequences that were in it."""
        removed, self.active = self.active, []
        self.prefixes.clear()
        return removed

    def check_weights(self, shapes: Mapping[str, object]) -> None:
        """Check the names and shapes of all weights before they are loaded.

        Raises:
            WeightSyncError: they do not fit the model.
        """
        tied = getattr(self.module, "all_tied_weights_keys", None) or ()
        check_state(self.adapters.own_state(), tied, shapes)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some of the weights, by the names of the model's module."""
        own = self.adapters.own_state()
        for name, tensor in weights:
            if self.vision is not None:
                self.vision.check_features(name, own[name], tensor)
            own[name].copy_(tensor)

    def offload(self) -> None:
        """Free the device: move the parameters to main memory and drop the cache."""
        self._cache = self._empty_cache()
        if self.vision is not None:
            self.vision.clear()
        self.module.to("cpu")
        torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move the parameters back to the device."""
        self.module.to(self.device)


class AttentionMasks:
    """Builds the masks of a forward pass with the engine's cache.

    Args:
        module: a model of transformers.

    Raises:
        EngineStartError: the model has layers of an unknown kind.
    """

    def __init__(self, module: Any) -> None:
        config = module.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        self._by_kind = kinds is not None and SLIDING in kinds
        kinds = kinds or [SLIDING if window else FULL]
        unknown = sorted(set(kinds) - {FULL, SLIDING} - STATEFUL)
        if unknown := unknown or ["recurrent"] * (module._is_stateful and not STATEFUL & set(kinds)):
            raise EngineStartError(
                f"the transformers engine cannot serve {type(module).__name__}, which has layers of kind "
                f"{', '.join(unknown)}; use engine={{'kind': 'vllm'}}"
            )
        self._window: int | None = window if SLIDING in kinds else None
        # eager attention adds the mask to its scores
        self._adds = config._attn_implementation == "eager"
        self._dtype = module.dtype

    def build(self, positions: torch.Tensor, keys: int, blocks: torch.Tensor | None = None) -> Masks:
        """Return the masks of a pass.

        Args:
            positions: positions of the queries, shape (rows, queries); one row if all rows have the same.
            keys: number of keys; key i is at position i.
            blocks: number of the block of each key, shape (rows, keys), or -1. The tokens of a block attend
                to each other.
        """
        queries, places = positions[:, None, :, None], torch.arange(keys, device=positions.device)
        causal = full = places <= queries
        together: torch.Tensor | None = None
        if blocks is not None:
            own = blocks.gather(1, positions.expand(len(blocks), -1))[:, None, :, None]
            together = (own == blocks[:, None, None, :]) & (own >= 0)
            full = full | together
        if self._window is None:
            return self._convert(full)
        near = causal & (places > queries - self._window)
        sliding = self._convert(near if together is None else near | together)
        return {FULL: self._convert(full), SLIDING: sliding} if self._by_kind else sliding

    def _convert(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._adds:
            return mask
        zero = torch.zeros((), dtype=self._dtype, device=mask.device)
        return zero.masked_fill(~mask, torch.finfo(self._dtype).min)


def use_grouped_attention(module: Any) -> None:
    """Have a model on a CPU read the cache in place, if query heads share keys and values.

    transformers repeats the keys and values for each query head in every pass with a mask, which takes
    most of the attention's time in decoding. The results are the same to the last bit.
    """
    if module.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED, _attend)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        module.set_attn_implementation(GROUPED)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output of an attention layer, shape (rows, queries, heads, head size)."""
    if attention_mask is None or torch.is_grad_enabled():
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None
