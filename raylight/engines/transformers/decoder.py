"""The model with its key-value cache and adapters: batches of sequences in, logits out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from raylight.engines.transformers.adapters import Adapters, LoadedAdapter, load_state
from raylight.engines.transformers.sequence import Sequence
from raylight.engines.transformers.slot_cache import SlotCache


class Decoder:
    """A model that decodes up to `slots` sequences at once. Its calls come from one thread.

    Args:
        path: folder of a Hugging Face model.
    """

    def __init__(self, path: str, dtype: str, device: str, slots: int) -> None:
        module: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.module = module.to(device).eval()
        self.device = torch.device(device)
        self.slots = slots
        self.adapters = Adapters(self.module)
        self.active: list[Sequence] = []
        """Those that are in the cache, by slot."""
        self._cache = SlotCache(self.module.config.num_hidden_layers, slots)

    def prefill(self, admitted: list[Sequence]) -> torch.Tensor:
        """Take sequences in, with all their tokens so far; returns the logits of the next ones, shape (rows, vocabulary)."""
        rows = len(admitted)
        self.active += admitted  # first: whatever fails, these fail with it
        lengths = torch.tensor([s.length for s in admitted])
        width = int(lengths.max())
        ids = torch.zeros(rows, width, dtype=torch.long)
        for row, sequence in enumerate(admitted):
            ids[row, : sequence.length] = torch.tensor(sequence.ids)
        self._cache.prefill(len(self.active) - rows, rows, width)
        places = torch.arange(width, device=self.device)
        mask = (places[None, :] <= places[:, None])[None, None].expand(rows, 1, width, width)
        last, which = (lengths - 1).unique(return_inverse=True)  # logits only where some row ends
        positions = places[None].expand(rows, -1)
        logits = self._forward(admitted, ids.to(self.device), positions, mask, last.to(self.device))
        return logits[torch.arange(rows, device=self.device), which.to(self.device)]

    def decode(self) -> torch.Tensor:
        """Logits of the next token of every active sequence, shape (rows, vocabulary)."""
        positions = torch.tensor([s.length - 1 for s in self.active], device=self.device)
        ids = torch.tensor([[s.sample.output_ids[-1]] for s in self.active], device=self.device)
        self._cache.decode(positions)
        places = torch.arange(self._cache.window.width, device=self.device)
        mask = (places[None] <= positions[:, None])[:, None, None]
        return self._forward(
            self.active, ids, positions[:, None], mask, torch.zeros(1, dtype=torch.long, device=self.device)
        )[:, 0]

    def _forward(
        self,
        sequences: list[Sequence],
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of shape (rows, len(keep), vocabulary) at the places `keep`."""
        return self.adapters.forward(
            [s.adapter for s in sequences],
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    def logprobs(self, ids: list[int], adapter: LoadedAdapter | None) -> list[float]:
        """Log-probabilities at temperature 1 of `ids[1:]`, each given those before it."""
        given = torch.tensor([ids], device=self.device)
        logits = self.adapters.forward([adapter], input_ids=given, use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(-1, given[0, 1:, None])[:, 0].tolist()

    def remove(self, sequence: Sequence) -> None:
        """Give a sequence's slot to the last active one, so that slots stay dense."""
        slot, last = self.active.index(sequence), len(self.active) - 1
        if slot != last:
            self._cache.move(last, slot, self.active[last].length)
            self.active[slot] = self.active[last]
        self.active.pop()

    def clear(self) -> list[Sequence]:
        """Empty the cache; returns who was in it."""
        removed, self.active = self.active, []
        return removed

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take new parameters.

        Raises:
            WeightSyncError: they do not fit, and the old ones stay.
        """
        load_state(
            self.adapters.own_state(), getattr(self.module, "all_tied_weights_keys", None) or (), weights
        )

    def leave(self) -> None:
        """Leave the device: the parameters move to main memory, and the cache goes."""
        self._cache = SlotCache(self.module.config.num_hidden_layers, self.slots)
        self.module.to("cpu")
        torch.cuda.empty_cache()

    def enter(self) -> None:
        """Come back to the device."""
        self.module.to(self.device)
