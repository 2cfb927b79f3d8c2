"""Sizes of a model that its memory follows from, read on the meta device: no weight is loaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from raylight.config import LoraConfig
from raylight.engines.expert_routes import route_bytes
from raylight.errors import ConfigError
from raylight.images.model_inputs import ModelImages, auto_class, reads_images
from raylight.learner.model.adapter import peft_config
from raylight.learner.model.model_check import language_part
from raylight.learner.model.muon import muon_matrices
from raylight.learner.tokens.micro_batch import activation_bytes
from raylight.trainer.cluster_fit.local_memory import TensorMemoryCounter


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model, in numbers of elements unless stated otherwise.

    Attributes:
        architecture: name of the model's class.
        parameters: all weights; a tied weight counts once.
        vision: weights of the vision part, if it is loaded.
        matrices: weights that Muon updates.
        root: weights outside the layers, such as the embedding and the output layer. FSDP gathers them as one
            group.
        layer: weights of the largest layer. FSDP gathers each layer as a group.
        layers: number of layers.
        output: elements of the output layer.
        tied: the output layer is the embedding.
        vocabulary: tokens of the vocabulary.
        hidden: size of a hidden state.
        cache_per_token: key and value elements per token, over all layers that keep every token.
        cache_heads: heads of these, which tensor-parallel workers divide; 1 for latent attention.
        token_activations: bytes of the activations of a token, in float32, about.
        route_bytes: bytes of the routes of a token through a mixture of experts; 0 for other models.
        all_route_bytes: the same with room for the layers without experts, as vLLM keeps them.
        features: elements of the features of an image's token; 0 for a model of text alone.
        pixel_bytes: bytes of the pixels for which an image's token stands; 0 for a model of text alone.
        context: longest context of the model, in tokens; None if the model states none.
    """

    architecture: str
    parameters: int
    vision: int
    matrices: int
    root: int
    layer: int
    layers: int
    output: int
    tied: bool
    vocabulary: int
    hidden: int
    cache_per_token: int
    cache_heads: int
    token_activations: int
    route_bytes: int
    all_route_bytes: int
    features: int
    pixel_bytes: int
    context: int | None


def read_config(path: str, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


@functools.lru_cache(maxsize=8)
def read_shape(path: str) -> ModelShape:
    """Return the sizes of the model in a folder. Only its configuration is read.

    Raises:
        ConfigError: transformers has no causal language model of this architecture.
    """
    config = read_config(path)
    images = ModelImages.load(path)
    model = _build(path, config)
    text = config.get_text_config()
    layers = _layers(model)
    if not layers:
        raise ConfigError(f"{path}: {type(model).__name__} has no repeated layers, so FSDP cannot shard it")
    in_layers = {id(param) for layer in layers for param in layer.parameters()}
    output = model.get_output_embeddings()
    cache_heads, cache_per_head = _cache(text, len(layers))
    return ModelShape(
        architecture=type(model).__name__,
        parameters=count(model),
        vision=count(model.base_model) - count(language_part(model)),
        matrices=sum(model.get_parameter(name).numel() for name in muon_matrices(model)),
        root=sum(param.numel() for param in model.parameters() if id(param) not in in_layers),
        layer=max(count(layer) for layer in layers),
        layers=len(layers),
        output=output.weight.numel() if output is not None else 0,
        tied=bool(getattr(text, "tie_word_embeddings", config.tie_word_embeddings)),
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        cache_per_token=cache_heads * cache_per_head,
        cache_heads=cache_heads,
        token_activations=activation_bytes(model),
        route_bytes=route_bytes(model),
        all_route_bytes=route_bytes(model, len(layers)),
        features=0 if images is None else text.hidden_size * (1 + _deep_layers(config.vision_config)),
        pixel_bytes=0 if images is None else images.token_bytes(),
        context=getattr(text, "max_position_embeddings", None),
    )


def adapter_parameters(path: str, lora: LoraConfig) -> int:
    """Return the number of trained parameters of a LoRA adapter."""
    return _adapter_parameters(path, lora.model_dump_json())


@functools.lru_cache(maxsize=8)  # a search for what fits asks again for each size of the cluster
def _adapter_parameters(path: str, lora: str) -> int:
    import peft

    model = _build(path, read_config(path))
    with torch.device("meta"):
        adapted = peft.get_peft_model(
            model, peft_config(LoraConfig.model_validate_json(lora), "CAUSAL_LM", model)
        )
    return sum(param.numel() for param in adapted.parameters() if param.requires_grad)


def measure_activations(
    path: str,
    rows: int,
    length: int,
    dtype: torch.dtype,
    layers: int,
    checkpointing: bool = False,
) -> int:
    """Return the bytes of activations at the peak of a training pass.

    Forward and backward passes of few layers run with fake tensors, and their peaks are extrapolated.

    The pass ends at the last hidden state: log-probs are computed in chunks, whose memory does not depend on
    the layers. Memory for weights and gradients is left out.

    Args:
        rows: rows of the micro-batch, each of `length` tokens.
        layers: number of the model's layers.
        checkpointing: recompute the layers' activations in the backward pass.
    """
    first, period = _pattern(path)
    once = _traced_peak(path, first + period, rows, length, dtype, checkpointing)
    if layers == first + period:
        return once
    twice = _traced_peak(path, first + 2 * period, rows, length, dtype, checkpointing)
    return once + (layers - first - period) * max(twice - once, 0) // period


def measure_prefill(path: str, rows: int, length: int, dtype: torch.dtype) -> int:
    """Return the peak of a forward pass without gradients, weights and cache excluded, in bytes.

    A layer's tensors are freed before the next one's, so few layers show it.
    """
    return _traced_peak(path, sum(_pattern(path)), rows, length, dtype, trains=False)


def count(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(param.numel() for param in module.parameters())


def _build(path: str, config: Any) -> Any:
    try:
        with torch.device("meta"):
            return auto_class(reads_images(path)).from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(
            f"transformers has no causal language model for {config.model_type!r}: {error}"
        ) from None


def _layers(model: Any) -> nn.ModuleList:
    """Return the layers of the language part, which FSDP gathers one by one; empty if it has none."""
    names = set(model._no_split_modules or ())
    for module in language_part(model).modules():
        if isinstance(module, nn.ModuleList) and names & {type(layer).__name__ for layer in module}:
            return module
    return nn.ModuleList()


def _cache(text: Any, layers: int) -> tuple[int, int]:
    """Return the heads of keys and values, and elements of each per token. Layers with a bounded state are
    left out."""
    if not hasattr(text, "num_attention_heads"):  # all layers of Mamba have one
        return 1, 0
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    full = sum(kind == "full_attention" for kind in kinds)
    if latent := getattr(text, "kv_lora_rank", None):  # multi-head latent attention
        return 1, full * (latent + text.qk_rope_head_dim)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return heads, full * 2 * size


def _deep_layers(vision: object) -> int:
    """Return how many layers of the tower pass features to the language part besides the last ones."""
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


@functools.lru_cache(maxsize=8)
def _pattern(path: str) -> tuple[int, int]:
    """Return how many layers of a model come before those that repeat a pattern, and the pattern's length.

    The whole model is the pattern if a trace of it is shorter than two of a few layers.
    """
    config = read_config(path)
    layers = _layers(_build(path, config))
    kinds = getattr(config.get_text_config(), "layer_types", None) or [None] * len(layers)
    traits = [(kind, _traits(layer)) for kind, layer in zip(kinds, layers, strict=False)]
    shortest, pattern = len(traits), (0, len(traits))
    for period in range(1, len(traits) // 3 + 1):
        pairs = enumerate(zip(traits, traits[period:], strict=False))
        first = max((i + 1 for i, (one, other) in pairs if one != other), default=0)
        if 2 * first + 3 * period < shortest:
            shortest, pattern = 2 * first + 3 * period, (first, period)
    return pattern


def _traits(layer: nn.Module) -> list[object]:
    """Return what makes a layer's memory differ from another's: its modules, their settings and weights."""
    traits: list[object] = [param.shape for param in layer.parameters()]
    for module in layer.modules():
        settings = (item for item in vars(module).items() if isinstance(item[1], bool | float | str))
        traits += [type(module), *settings]
    return traits


@functools.lru_cache(maxsize=64)
def _traced_peak(
    path: str,
    layers: int,
    rows: int,
    length: int,
    dtype: torch.dtype,
    checkpointing: bool = False,
    trains: bool = True,
) -> int:
    """Return the peak of a pass without weights and gradients, in bytes.

    It is an estimate for experts whose code reads how many tokens each of them has, which fake tensors do not
    know.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    scale, text = 1, read_config(path).get_text_config()
    mixture = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if dtype == torch.float32 and mixture:
        dtype, scale = torch.bfloat16, 2  # fake tensors know grouped experts in bfloat16 only
    with FakeTensorMode():
        model = _few_layers(path, layers, dtype)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        counter = TensorMemoryCounter()
        for param in model.parameters():
            counter.ignore(param)
            if trains:  # gradients of earlier micro-batches
                param.grad = torch.zeros_like(param)
                counter.ignore(param.grad)
        ids = torch.zeros(rows, length, dtype=torch.long)
        positions = torch.arange(length).expand(rows, -1)
        try:
            with counter, torch.set_grad_enabled(trains):
                states = language_part(model)(input_ids=ids, position_ids=positions, use_cache=False)[0]
                if trains:
                    states.backward(torch.zeros_like(states))
        except DataDependentOutputException:
            packed = sum(sum(param.shape[1:]) for param in model.parameters() if param.dim() == 3)
            chosen = getattr(text, "num_experts_per_tok", None) or 1
            width = activation_bytes(model) // 4 + chosen * packed
            return scale * rows * length * width * dtype.itemsize
    return scale * counter.peak


def _few_layers(path: str, layers: int, dtype: torch.dtype) -> Any:
    """Return the model in training mode with its first layers only.

    The gradients of its embeddings are left out: they exist when the layers' activations are freed.
    """
    with no_init_weights():  # towers draw values in ways that fake tensors lack
        model = auto_class(reads_images(path)).from_config(read_config(path), dtype=dtype).train()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)
    model.enable_input_require_grads()
    del _layers(model)[layers:]
    return model
