"""How much memory a run will need, told before any is taken: the real model and loss are run on the meta device, and counted."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from raylight.algorithms.minigrpo.loss import clipped_loss
from raylight.algorithms.minigrpo.rows import Tokens
from raylight.algorithms.minigrpo.settings import MiniSettings
from raylight.algorithms.minigrpo.tuner import add_adapter, logprobs_of, trainable
from raylight.engines.transformers.slot_cache import GROWTH
from raylight.engines.transformers.worker import PREFILL_TOKENS

ATTENTION = "accounted"
"""Name under which transformers finds the attention that is only counted."""


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes at the peak of a run. While one trains nothing is sampled, so that only the larger of the two counts."""

    weights: int
    """The frozen model."""
    adapter: int
    gradients: int
    optimizer: int
    """Two moments for each parameter of the adapter."""
    cache: int
    """Keys and values of all sequences that are sampled at once."""
    training: int
    """Activations and logits of the forward and backward pass of one micro-batch."""
    sampling: int
    """Activations and logits of taking in new prompts."""

    @property
    def peak(self) -> int:
        held = self.weights + self.adapter + self.gradients + self.optimizer + self.cache
        return held + max(self.training, self.sampling)

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {getattr(self, field.name) / 1e6:.0f}" for field in fields(self))
        return f"{self.peak / 1e9:.2f} GB at the peak ({parts} MB)"


class LiveBytes(TorchDispatchMode):
    """Counts the storage of every tensor that lives while it is active.

    Attributes:
        now, peak: bytes of tensors that were made since it began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # the one value that transformers asks for: is each row a sequence of its own?
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._hold(leaf)
        return result

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor that was there before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def account(path: str, settings: MiniSettings, dtype: torch.dtype) -> MemoryAccount:
    """What a run with these settings needs.

    Args:
        path: folder of the model; only its configuration is read.
    """
    return account_of(AutoConfig.from_pretrained(path), settings, dtype)


def account_of(config: Any, settings: MiniSettings, dtype: torch.dtype) -> MemoryAccount:
    """The same of a model's configuration."""
    module, model = shaped(config, settings, dtype)
    own = trainable(model)
    adapter = sum(parameter.nbytes for parameter in own)
    everything = sum(parameter.nbytes for parameter in model.parameters()) + sum(
        b.nbytes for b in model.buffers()
    )
    rows = settings.row_budget // settings.max_model_len
    training = _training(module, settings, rows) - adapter  # the gradients are told apart
    return MemoryAccount(
        weights=everything - adapter,
        adapter=adapter,
        gradients=adapter,
        optimizer=2 * adapter,
        cache=_cache(config, settings, dtype),
        training=training,
        sampling=_sampling(module, settings),
    )


def shaped(config: Any, settings: MiniSettings, dtype: torch.dtype) -> tuple[Any, Any]:
    """The module and its adapter on the meta device: shapes without memory."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        model = add_adapter(module, settings.lora)
    module.tie_weights()
    if settings.gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module, model


def _training(module: Any, settings: MiniSettings, rows: int) -> int:
    """Peak of a pass over `rows` rows of the greatest length, all of whose tokens but the first are trained; gradients included."""
    width = settings.max_model_len
    count = rows * (width - 1)
    with torch.device("meta"):
        numbers = torch.empty(count, dtype=torch.long)
        floats = torch.empty(count)
        ids = torch.empty(rows, width, dtype=torch.long)
    tokens = Tokens(ids, numbers, numbers, floats, floats, floats, numbers)
    module.train()
    with LiveBytes() as live:
        for tensor in [*module.parameters(), *module.buffers(), ids, numbers, floats]:
            live.ignore(tensor)
        logprobs = logprobs_of(module, tokens)
        ref = logprobs.detach() if settings.kl_coef else None
        loss = _loss(logprobs, tokens, ref, settings)
        loss.backward()
        peak = live.peak
    module.zero_grad(set_to_none=True)
    module.eval()
    return peak


def _loss(
    logprobs: torch.Tensor, tokens: Tokens, ref: torch.Tensor | None, settings: MiniSettings
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
def _sampling(module: Any, settings: MiniSettings) -> int:
    """Peak of taking in as many prompts as one pass allows, each of its own length, so that as many logits are made as may be."""
    rows = max(1, min(settings.max_concurrent, PREFILL_TOKENS // settings.max_model_len))
    with torch.device("meta"):
        ids = torch.empty(rows, settings.max_model_len, dtype=torch.long)
    with LiveBytes() as live:
        for tensor in [*module.parameters(), *module.buffers(), ids]:
            live.ignore(tensor)
        module.base_model(input_ids=ids, use_cache=False)
        body = live.peak
    most = settings.max_concurrent
    with LiveBytes() as live, torch.device("meta"):
        logits = module.get_output_embeddings()(
            torch.empty(most, most, module.config.hidden_size, dtype=module.dtype)
        )
        chosen = logits[:, 0].float()
        torch.softmax(chosen.log_softmax(-1), -1)
    return max(body, live.peak)


def _cache(config: Any, settings: MiniSettings, dtype: torch.dtype) -> int:
    """Bytes of the sampler's slots when they have grown to the longest sequence; they grow by doubling."""
    length = GROWTH
    while length < settings.max_model_len:
        length *= 2
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * settings.max_concurrent * heads * head * length * dtype.itemsize


class _Attention(torch.autograd.Function):
    """The memory of fused attention: it keeps its inputs, its output and a number per row and head, and no scores."""

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
    """Memory that the device has free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available
