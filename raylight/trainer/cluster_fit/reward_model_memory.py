"""Memory of a reward model's replicas."""

from __future__ import annotations

import functools

import torch

from raylight.trainer.cluster_fit.model_shape import count, read_config
from raylight.trainer.cluster_fit.role_memory import Item, RoleMemory
from raylight.trainer.cluster_fit.role_needs import DTYPES, ENGINE_PROCESS, GPU_CONTEXT
from raylight.trainer.spec.settings import ServingSettings

LAYER_COPIES = 6
"""Tensors of a layer of the size of its hidden states that exist at the peak of a forward pass."""


def reward_model_memory(model: ServingSettings) -> RoleMemory:
    """Return the memory of one of a reward model's replicas."""
    engine, size = model.engine, DTYPES[model.engine.dtype].itemsize
    items = [
        Item("Python and libraries", ENGINE_PROCESS["transformers"], "host"),
        Item("weights", _parameters(model.model_path) * size),
    ]
    if engine.num_gpus:
        items.append(Item("CUDA context", GPU_CONTEXT, stays=True))
    text = read_config(model.model_path).get_text_config()
    width = LAYER_COPIES * text.hidden_size + 3 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    tokens = max(engine.args["max_batch_tokens"], engine.max_model_len)
    items.append(Item("activations of a batch", tokens * width * size, grows=True))
    return RoleMemory("reward model", engine.replicas, engine.num_gpus, tuple(items))


@functools.lru_cache(maxsize=8)
def _parameters(path: str) -> int:
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        return count(AutoModelForSequenceClassification.from_config(read_config(path)))
