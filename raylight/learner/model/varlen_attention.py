"""Attention over packed rows, each of whose tokens attends to earlier tokens of its row.

There is no mask: a GPU computes it with torch's `varlen_attn` (FlashAttention 2,
https://arxiv.org/abs/2307.08691), a CPU row by row. Layers hand it the bounds of the rows, which the model's
forward pass receives as transformers' `FlashAttentionKwargs`. Ranks that share a sequence exchange heads and
tokens around it (Ulysses, https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

import itertools

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from raylight.errors import ConfigError
from raylight.learner import verl_api as verl
from raylight.learner.model.packing import can_pack

VARLEN = "raylight_varlen"
"""Name of this attention in transformers."""
MULTIPLE = 8
"""The kernels compute heads whose size is a multiple of this."""


def supports_varlen(config: PreTrainedConfig, architecture: type[PreTrainedModel]) -> bool:
    """Return True if a model can compute packed rows so.

    Args:
        config: transformers' configuration of the model.
        architecture: its class in transformers.
    """
    return architecture._supports_attention_backend and can_pack(config.get_text_config().to_dict())


def row_bounds(lengths: list[int], device: torch.device) -> dict[str, object]:
    """Return the arguments that tell a model where its packed rows begin and end.

    Args:
        lengths: tokens of each row, and of the padding after them.
    """
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _attend(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Return the output of an attention layer, shape (1, tokens, heads, head size).

    Args:
        query, key, value: shape (1, heads, tokens, head size); the tokens of this rank.
        sliding_window: earlier tokens that a token attends to, itself included; None: all.

    Raises:
        ConfigError: the layer does not hand on the bounds of the rows, or wants what is not computed here.
    """
    unknown = attention_mask is not None or softcap is not None or s_aux is not None or dropout
    if cu_seq_lens_q is None or unknown:
        raise ConfigError(
            f"{type(module).__name__} cannot compute packed rows without a mask; set learner.packed=False"
        )
    size, scale = value.shape[-1], scaling or query.shape[-1] ** -0.5
    dtype = _kernel_dtype(value) if query.is_cuda else value.dtype
    query, key, value = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
    shared = verl.get_ulysses_sequence_parallel_world_size() > 1
    if shared:
        query, key, value = (_gather_tokens(each) for each in (query, key, value))
    compute = _kernel if query.is_cuda else _row_by_row
    output = compute(query, key, value, cu_seq_lens_q, max_length_q, scale, sliding_window)[..., :size]
    if shared:
        output = verl.gather_heads_scatter_seq(output, head_dim=1, seq_dim=0)
    return output[None], None


def _gather_tokens(states: torch.Tensor) -> torch.Tensor:
    """Return the states of all tokens for this rank's heads, shape (tokens, heads, size). Keys and values are
    repeated for as many ranks as share a head."""
    ranks = verl.get_ulysses_sequence_parallel_world_size()
    repeated = states.repeat_interleave(max(ranks // states.shape[1], 1), dim=1)
    return verl.gather_seq_scatter_heads(repeated, seq_dim=0, head_dim=1)


def _kernel_dtype(value: torch.Tensor) -> torch.dtype:
    """Return the type of 16 bits that the kernel computes in; rope and norms may leave float32."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else value.dtype


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return the output (tokens, heads, size) of the kernel for GPUs, which needs heads of one size."""
    size = -(-max(query.shape[-1], value.shape[-1]) // MULTIPLE) * MULTIPLE
    query, key, value = (pad(each, (0, size - each.shape[-1])).contiguous() for each in (query, key, value))
    output = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output


def _row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return the same as `_kernel`."""
    grouped, outputs = query.shape[1] != key.shape[1], []
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    for start, end in itertools.pairwise(bounds.tolist()):
        near = None
        if window is not None and window < end - start:
            near = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device)
            near = near.tril().triu(1 - window)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, start:end],
                value[:, :, start:end],
                attn_mask=near,
                is_causal=near is None,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1).contiguous()


AttentionInterface.register(VARLEN, _attend)
