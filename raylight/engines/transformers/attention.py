"""Attention of a model's layers, which see all earlier tokens or only those of a window."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from raylight.errors import EngineStartError

GROUPED = "raylight_grouped"
"""Name in transformers of the attention for models whose query heads share keys and values."""
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
