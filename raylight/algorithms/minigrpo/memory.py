"""Estimate of a run's peak memory before the model is loaded.

The real model and loss run on the meta device, where tensors have shapes and no memory, and every live tensor
is counted.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from raylight.algorithms.minigrpo.adapter_trainer import add_adapter, trainable_parameters, trained_logprobs
from raylight.algorithms.minigrpo.loss import clipped_loss
from raylight.algorithms.minigrpo.rows import TokenBatch
from raylight.algorithms.minigrpo.settings import MiniGRPOSettings
from raylight.engines.transformers.slot_cache import GROWTH
from raylight.engines.transformers.worker import PREFILL_TOKENS

ATTENTION = "raylight_memory_estimate"
"""Name in transformers of the attention that only allocates."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a run. Training and sampling never overlap, so only the larger of the two
    counts."""

    weights: int
    """Frozen weights of the model."""
    adapter: int
    gradients: int
    optimizer: int
    """Two moments per parameter of the adapter."""
    cache: int
    """Key-value cache of all concurrent sequences."""
    training: int
    """Activations and logits of the forward and backward pass of one micro-batch."""
    sampling: int
    """Activations and logits of the prefill of new prompts."""

    @property
    def peak(self) -> int:
        """Bytes in use at the peak."""
        held = self.weights + self.adapter + self.gradients + self.optimizer + self.cache
        return held + max(self.training, self.sampling)

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {getattr(self, field.name) / 1e6:.0f}" for field in fields(self))
        return f"{self.peak / 1e9:.2f} GB at the peak ({parts} MB)"


class TensorMemoryCounter(TorchDispatchMode):
    """Counter of the storage of all live tensors that are created while it is active.

    Attributes:
        now: bytes of the live tensors.
        peak: largest value of `now`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # transformers reads one value: True if each row is one sequence
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def ignore(self, tensor: torch.Tensor) -> None:
        """Exclude a tensor that existed before."""
        self._counted.add(tensor.untyped_storage()._cdata)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted:
            return
        self._counted.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


def estimate_memory(path: str, settings: MiniGRPOSettings, dtype: torch.dtype) -> MemoryEstimate:
    """Return the memory that a run needs.

    Args:
        path: folder of the model, of which only the configuration is read.
    """
    return estimate_memory_of(AutoConfig.from_pretrained(path), settings, dtype)


def estimate_memory_of(config: Any, settings: MiniGRPOSettings, dtype: torch.dtype) -> MemoryEstimate:
    """Return the memory that a run needs, given a transformers configuration of the model."""
    module, model = build_on_meta(config, settings, dtype)
    adapter = sum(parameter.nbytes for parameter in trainable_parameters(model))
    total = sum(parameter.nbytes for parameter in model.parameters()) + sum(b.nbytes for b in model.buffers())
    rows = settings.row_budget // settings.max_model_len
    training = _training(module, settings, rows) - adapter  # gradients are a field of their own
    return MemoryEstimate(
        weights=total - adapter,
        adapter=adapter,
        gradients=adapter,
        optimizer=2 * adapter,
        cache=_cache(config, settings, dtype),
        training=training,
        sampling=_sampling(module, settings),
    )


def build_on_meta(config: Any, settings: MiniGRPOSettings, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the module and its peft model on the meta device."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        model = add_adapter(module, settings.lora)
    module.tie_weights()
    if settings.gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module, model


def _training(module: Any, settings: MiniGRPOSettings, rows: int) -> int:
    """Return the peak bytes of a pass over `rows` rows of the maximum length, gradients included.

    All tokens but the first of a row are trained.
    """
    width = settings.max_model_len
    count = rows * (width - 1)
    with torch.device("meta"):
        integers = torch.empty(count, dtype=torch.long)
        floats = torch.empty(count)
        ids = torch.empty(rows, width, dtype=torch.long)
    tokens = TokenBatch(ids, integers, integers, floats, floats, floats, integers)
    module.train()
    with TensorMemoryCounter() as counter:
        for tensor in [*module.parameters(), *module.buffers(), ids, integers, floats]:
            counter.ignore(tensor)
        logprobs = trained_logprobs(module, tokens)
        ref = logprobs.detach() if settings.kl_coef else None
        loss = _loss(logprobs, tokens, ref, settings)
        loss.backward()
        peak = counter.peak
    module.zero_grad(set_to_none=True)
    module.eval()
    return peak


def _loss(
    logprobs: torch.Tensor, tokens: TokenBatch, ref: torch.Tensor | None, settings: MiniGRPOSettings
) -> torch.Tensor:
    clip = (settings.clip_ratio_low, settings.clip_ratio_high)
    return clipped_loss(
        logprobs,
        logprobs.detach(),
        tokens.advantages,
        ref,
        clip=clip,
        kl_coef=settings.kl_coef,
        tokens=len(tokens.targets),
    ).value


@torch.no_grad()
def _sampling(module: Any, settings: MiniGRPOSettings) -> int:
    """Return the peak bytes of a prefill with as many prompts as one pass allows, and of its logits.

    Prompts of different lengths produce the most logits.
    """
    rows = max(1, min(settings.max_concurrent, PREFILL_TOKENS // settings.max_model_len))
    with torch.device("meta"):
        ids = torch.empty(rows, settings.max_model_len, dtype=torch.long)
    with TensorMemoryCounter() as counter:
        for tensor in [*module.parameters(), *module.buffers(), ids]:
            counter.ignore(tensor)
        module.base_model(input_ids=ids, use_cache=False)
        transformer = counter.peak
    rows = settings.max_concurrent
    with TensorMemoryCounter() as counter, torch.device("meta"):
        logits = module.get_output_embeddings()(
            torch.empty(rows, rows, module.config.hidden_size, dtype=module.dtype)
        )
        chosen = logits[:, 0].float()
        torch.softmax(chosen.log_softmax(-1), -1)
    return max(transformer, counter.peak)


def _cache(config: Any, settings: MiniGRPOSettings, dtype: torch.dtype) -> int:
    """Return the bytes of the key-value cache at the maximum length; its length grows by doubling."""
    length = GROWTH
    while length < settings.max_model_len:
        length *= 2
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * settings.max_concurrent * heads * head_dim * length * dtype.itemsize


class _Attention(torch.autograd.Function):
    """Memory use of fused attention: it saves its inputs, its output and a number per row and head, but no
    scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any
) -> tuple[torch.Tensor, None]:
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **rest: Any) -> None:
    return None


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available
