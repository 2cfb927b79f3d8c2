"""Cache for continuous batching, with one slot per sequence, as a transformers `Cache`.

Layers of attention keep keys and values, and others (linear attention, convolutions) a state.

Sequences that are decoded occupy slots 0..n-1. New sequences are prefilled into the slots after those, behind
the tokens that are known of them. When one ends, the last one moves into its slot. A forward pass
sees the slots `rows` up to `width` tokens, without copying.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

GROWTH = 256
"""Smallest growth of the slots, in tokens. Slots grow on demand, so that short tasks do not pay for the
model's longest context."""


class Window:
    """The part of the slots that the current forward pass reads and writes; shared by all layers.

    Args:
        longest: tokens of the longest sequence.
    """

    def __init__(self, slots: int, longest: int) -> None:
        self.slots, self.longest = slots, longest
        self.rows = slice(0, 0)
        self.start = 0
        """Position from which every row writes, without `positions`."""
        self.positions: torch.Tensor | None = None
        """Positions at which the rows write, shape (rows, tokens); None if all rows write at the same."""
        self.width = 0


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, shape (slots, heads, length, head size)."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.window = window
        self.is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        slots = self.window.slots
        self.keys = key_states.new_zeros(slots, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.grow()
        window = self.window
        keys, values = self.keys[window.rows], self.values[window.rows]
        if window.positions is None:
            at = slice(window.start, window.start + key_states.shape[2])
            keys[:, :, at] = key_states
            values[:, :, at] = value_states
        else:
            rows = torch.arange(len(window.positions), device=window.positions.device)[:, None]
            keys[rows, :, window.positions] = key_states.transpose(1, 2)
            values[rows, :, window.positions] = value_states.transpose(1, 2)
        return keys[:, :, : window.width], values[:, :, : window.width]

    def grow(self) -> None:
        """Make room for the window."""
        if self.window.width > self.keys.shape[2]:
            self.keys, self.values = (_grow(old, self.window) for old in (self.keys, self.values))

    def move(self, source: int, target: int, length: int) -> None:
        if not self.is_initialized:  # after a pass that failed before this layer
            return
        self.keys[target, :, :length] = self.keys[source, :, :length]
        self.values[target, :, :length] = self.values[source, :, :length]

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        self.keys[targets, :, :length] = self.keys[sources, :, :length]
        self.values[targets, :, :length] = self.values[sources, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.width, 0

    def get_seq_length(self) -> int:
        return self.window.start

    def get_max_cache_shape(self) -> int:
        return -1


class StateLayer(LinearAttentionCacheLayerMixin):
    """States of one layer, shape (slots, ...): of its convolution, and of its recurrence if it has one.

    transformers reads and overwrites the states of the window's rows in place.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self._states: dict[str, torch.Tensor] = {}

    @property
    def has_previous_state(self) -> bool:  # type: ignore[override]
        """True while one token is decoded."""
        return self.window.positions is not None

    @property
    def conv_states(self) -> torch.Tensor:  # type: ignore[override]
        return self._states["conv"][self.window.rows]

    @property
    def recurrent_states(self) -> torch.Tensor:  # type: ignore[override]
        return self._states["recurrent"][self.window.rows]

    def lazy_initialization(
        self, conv_states: torch.Tensor | None = None, recurrent_states: torch.Tensor | None = None
    ) -> None:
        """Do nothing: the first update makes the states."""

    def update_conv_state(self, conv_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return self._update("conv", conv_states)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return self._update("recurrent", recurrent_states)

    def _update(self, name: str, new: torch.Tensor) -> torch.Tensor:
        if name not in self._states:
            self._states[name] = new.new_zeros(self.window.slots, *new.shape[1:])
        states = self._states[name][self.window.rows]
        kept = states.shape[-1] - new.shape[-1] if name == "conv" else 0
        states.copy_(torch.cat([states[..., -kept:], new], dim=-1) if kept else new)
        return states

    def move(self, source: int, target: int, length: int) -> None:
        for states in self._states.values():
            states[target] = states[source]

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        for states in self._states.values():
            states[targets] = states[sources]


class SlotCache(Cache):
    """The slots of all layers.

    Args:
        stateful: True for each layer that keeps a state.
        slots: number of sequences.
        longest: tokens of the longest sequence.
    """

    def __init__(self, stateful: list[bool], slots: int, longest: int) -> None:
        self.window = Window(slots, longest)
        self.slot_layers: list[SlotLayer | StateLayer] = [
            StateLayer(self.window) if state else SlotLayer(self.window) for state in stateful
        ]
        super().__init__(layers=list(self.slot_layers))

    def prefill(self, first: int, starts: torch.Tensor, width: int) -> None:
        """Have the next pass write `width` tokens into each slot from `first` on.

        Args:
            starts: position of the first token of each slot, shape (rows,).
        """
        window, last = self.window, int(starts.max())
        window.rows, window.start, window.width = slice(first, first + len(starts)), last, last + width
        same = bool((starts == last).all())
        window.positions = None if same else starts[:, None] + torch.arange(width)

    def decode(self, positions: torch.Tensor) -> None:
        """Have the next pass write one token at `positions[i]` of slot i; shape (active slots,)."""
        window = self.window
        window.rows, window.positions = slice(0, len(positions)), positions[:, None]
        window.start = int(positions.max())
        window.width = window.start + 1

    def read(self, slot: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy a slot's first keys and values, per layer two tensors of shape (heads, length, head size)."""
        layers = self._attention
        return [(x.keys[slot, :, :length].clone(), x.values[slot, :, :length].clone()) for x in layers]

    def write(self, slot: int, states: list[tuple[torch.Tensor, torch.Tensor]], length: int) -> None:
        """Write the first `length` tokens of `states`, in the shapes that `read` returns, into a slot."""
        for layer, (keys, values) in zip(self._attention, states, strict=True):
            layer.grow()
            layer.keys[slot, :, :length] = keys[:, :length]
            layer.values[slot, :, :length] = values[:, :length]

    @property
    def _attention(self) -> list[SlotLayer]:
        return [layer for layer in self.slot_layers if isinstance(layer, SlotLayer)]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a sequence of `length` tokens to another slot."""
        for layer in self.slot_layers:
            layer.move(source, target, length)

    def copy(self, slots: list[tuple[int, int]], length: int) -> None:
        """Copy the first `length` tokens of several slots.

        Args:
            slots: pairs of a slot and the slot that it is copied to.
        """
        sources, targets = torch.tensor(slots).T
        for layer in self.slot_layers:
            layer.copy(sources, targets, length)


def _grow(old: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the slots, shape (slots, heads, length, head size), with room for the window and later tokens.

    New entries are zero, because masked NaN times 0 would still be NaN.
    """
    length = max(window.width, min(max(2 * old.shape[2], GROWTH), window.longest))
    new = old.new_zeros(old.shape[0], old.shape[1], length, old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new
