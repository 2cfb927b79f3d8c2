"""Estimate of the peak memory of a local learner and its engine, before the model is loaded.

The real model and its log-probs run on the meta device, where tensors have shapes and no memory, and every
live tensor is counted.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoConfig
from transformers.masking_utils import AttentionMaskInterface

from raylight.config import EngineConfig, LearnerConfig
from raylight.engines.transformers.prefixes import count_kept_sequences
from raylight.engines.transformers.slot_cache import GROWTH
from raylight.engines.transformers.worker import PREFILL_TOKENS
from raylight.errors import DeviceMemoryError
from raylight.images.model_inputs import auto_class, reads_images
from raylight.learner.model.adapter import peft_config
from raylight.learner.model.model_check import language_part
from raylight.learner.model.vision import freeze_vision
from raylight.learner.tokens.token_logprobs import SMALL_CHUNK, token_logprobs

ATTENTION = "raylight_memory_estimate"
"""Name in transformers of the attention that only allocates."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a run. Training and sampling never overlap, so only the larger of the two
    counts."""

    weights: int
    """Frozen weights."""
    trained: int
    """Trained weights: the adapter's, or all."""
    gradients: int
    optimizer: int
    """Two moments per trained parameter."""
    cache: int
    """Key-value cache of all concurrent sequences."""
    training: int
    """Activations and logits of the forward and backward pass of one micro-batch."""
    sampling: int
    """Activations and logits of the prefill of new prompts."""

    @property
    def peak(self) -> int:
        """Bytes in use at the peak."""
        held = self.weights + self.trained + self.gradients + self.optimizer + self.cache
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

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
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


def check_memory(
    path: str, engine: EngineConfig, learner: LearnerConfig, device: torch.device, limit: int | None
) -> MemoryEstimate:
    """Return the memory that a run needs.

    Args:
        path: folder of the model, of which only the configuration is read.
        limit: bytes that the run may use; None for the free memory of the device.

    Raises:
        DeviceMemoryError: it needs more.
    """
    needed = estimate_memory(AutoConfig.from_pretrained(path), engine, learner, reads_images(path))
    available = free_bytes(device) if limit is None else limit
    if needed.peak > available:
        checkpointing = "" if learner.gradient_checkpointing else ", set gradient_checkpointing=True"
        bf16 = ", set dtype='bfloat16'" if engine.dtype == "float32" and learner.lora is not None else ""
        raise DeviceMemoryError(
            f"the run needs {needed} on {device}, where {available / 1e9:.2f} GB are available; "
            f"lower max_model_len, max_concurrent or max_tokens_per_micro_batch{checkpointing}{bf16}, "
            "or use a smaller model"
        )
    return needed


def estimate_memory(
    config: Any, engine: EngineConfig, learner: LearnerConfig, reads_images: bool = False
) -> MemoryEstimate:
    """Return the memory that a run needs, given a transformers configuration of the model.

    Args:
        reads_images: the model is loaded with its vision part.
    """
    module = build_on_meta(config, engine, learner, reads_images)
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    total = sum(parameter.nbytes for parameter in module.parameters())
    rows = max(learner.max_tokens_per_micro_batch // engine.max_model_len, 1)
    return MemoryEstimate(
        weights=total - trained + sum(buffer.nbytes for buffer in module.buffers()),
        trained=trained,
        gradients=trained,
        optimizer=2 * trained,
        cache=_cache(config.get_text_config(), engine, module.dtype),
        training=_training(module, rows, engine.max_model_len) - trained,  # gradients are a field
        sampling=_sampling(module, engine),
    )


def build_on_meta(
    config: object, engine: EngineConfig, learner: LearnerConfig, reads_images: bool = False
) -> Any:
    """Return the module, with the adapter in it, on the meta device."""
    import peft

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    with torch.device("meta"):
        module = auto_class(reads_images).from_config(
            copy.deepcopy(config), dtype=getattr(torch, engine.dtype), attn_implementation=ATTENTION
        )
        if learner.lora is not None:
            peft.get_peft_model(module, peft_config(learner.lora, "CAUSAL_LM", module))
    if reads_images and not learner.train_vision:
        freeze_vision(module.model)
    module.tie_weights()
    if learner.gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def _training(module: Any, rows: int, width: int) -> int:
    """Return the peak bytes of a pass over `rows` rows of the maximum length, gradients included.

    All tokens but the first of a row are trained.
    """
    count = rows * (width - 1)
    with torch.device("meta"):
        positions = torch.empty(count, dtype=torch.long)
        temperatures = torch.empty(count)
        ids = torch.empty(rows, width, dtype=torch.long)
    module.train()
    head = module.get_output_embeddings()
    with TensorMemoryCounter() as counter:
        for tensor in [*module.parameters(), *module.buffers(), ids, positions, temperatures]:
            counter.ignore(tensor)
        hidden = language_part(module)(input_ids=ids, use_cache=False)[0].flatten(0, 1)[positions]
        logprobs, *_ = token_logprobs(
            head, head.parameters(), hidden, positions, temperatures, chunk=SMALL_CHUNK, entropy=True
        )
        logprobs.sum().backward()
        peak = counter.peak
    module.zero_grad(set_to_none=True)
    module.eval()
    return peak


@torch.no_grad()
def _sampling(module: Any, engine: EngineConfig) -> int:
    """Return the peak bytes of a prefill with as many prompts as one pass allows, and of its logits.

    Prompts of different lengths produce the most logits.
    """
    rows = max(1, min(engine.max_concurrent, PREFILL_TOKENS // engine.max_model_len))
    with torch.device("meta"):
        ids = torch.empty(rows, engine.max_model_len, dtype=torch.long)
    with TensorMemoryCounter() as counter:
        for tensor in [*module.parameters(), *module.buffers(), ids]:
            counter.ignore(tensor)
        language_part(module)(input_ids=ids, use_cache=False)
        transformer = counter.peak
    rows = engine.max_concurrent
    with TensorMemoryCounter() as counter, torch.device("meta"):
        logits = module.get_output_embeddings()(
            torch.empty(rows, rows, module.config.get_text_config().hidden_size, dtype=module.dtype)
        )
        chosen = logits[:, 0].float()
        torch.softmax(chosen.log_softmax(-1), -1)
    return max(transformer, counter.peak)


def _cache(config: Any, engine: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the key-value cache at the maximum length; its length grows by doubling."""
    length = GROWTH
    while length < engine.max_model_len:
        length *= 2
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    rows = engine.max_concurrent + count_kept_sequences(engine.max_concurrent)
    return 2 * config.num_hidden_layers * rows * heads * head_dim * length * dtype.itemsize


class _Attention(torch.autograd.Function):
    """Memory use of fused attention: it saves its inputs, its output and a number per row and head, but no
    scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: object) -> object:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attention(
    module: object, query: object, key: object, value: object, mask: object, **rest: object
) -> tuple[torch.Tensor, None]:
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _no_mask(*args: object, **rest: object) -> None:
    return None


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available
