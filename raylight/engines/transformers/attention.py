"""Attention masks of a model's layers, which see all earlier tokens or only those of a window."""

from __future__ import annotations

from typing import Any

import torch

from raylight.errors import EngineStartError

FULL, SLIDING = "full_attention", "sliding_attention"
Masks = torch.Tensor | dict[str, torch.Tensor]
"""The mask of all layers, or a mask for each kind of layer; shape (rows, 1, queries, keys)."""


class AttentionMasks:
    """Builds the masks of a forward pass with the engine's cache.

    Args:
        module: a model of transformers.

    Raises:
        EngineStartError: the model has layers that keep something else than keys and values.
    """

    def __init__(self, module: Any) -> None:
        config = module.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        self._by_kind = kinds is not None and SLIDING in kinds
        kinds = kinds or [SLIDING if window else FULL]
        if unknown := sorted(set(kinds) - {FULL, SLIDING}) or ["recurrent"] * module._is_stateful:
            raise EngineStartError(
                f"the transformers engine cannot serve {type(module).__name__}, which has layers of kind "
                f"{', '.join(unknown)}; use engine={{'kind': 'vllm'}}"
            )
        self._window: int | None = window if SLIDING in kinds else None
        # eager attention adds the mask to its scores
        self._adds = config._attn_implementation == "eager"
        self._dtype = module.dtype

    def build(self, positions: torch.Tensor, keys: int) -> Masks:
        """Return the masks of a pass.

        Args:
            positions: positions of the queries, shape (rows, queries); one row if all rows have the same.
            keys: number of keys; key i is at position i.
        """
        queries, places = positions[:, None, :, None], torch.arange(keys, device=positions.device)
        full = places <= queries
        if self._window is None:
            return self._convert(full)
        sliding = self._convert(full & (places > queries - self._window))
        return {FULL: self._convert(full), SLIDING: sliding} if self._by_kind else sliding

    def _convert(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._adds:
            return mask
        zero = torch.zeros((), dtype=self._dtype, device=mask.device)
        return zero.masked_fill(~mask, torch.finfo(self._dtype).min)
