"""Weights of a rank's model for engines and files: the model with a merged adapter, or the adapter.

Every function with an engine is a collective, and returns its result on rank 0.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from raylight.files import atomic_folder
from raylight.learner import verl_api as verl

PEFT_PREFIX = "base_model.model."
"""Prefix of parameter names in a module wrapped by peft."""
BASE_LAYER = ".base_layer."
"""Part that peft inserts into the weight names of an adapted layer."""


def gather_model(engine: Any) -> dict[str, torch.Tensor] | None:
    """Return all weights in float32 on the CPU by Hugging Face name, with the adapter merged, on rank 0.

    A tied weight appears under each of its names.
    """
    pairs = _merged(engine) if hasattr(engine.module, "peft_config") else engine.get_per_tensor_param()[0]
    weights = {}
    for name, tensor in pairs:
        if _is_rank_0():
            weights[name] = tensor.detach().to("cpu", torch.float32)
    return weights or None


def gather_adapter(engine: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """Return the adapter's configuration and float32 CPU weights, as in peft's files, on rank 0."""
    config = engine.module.peft_config["default"].to_dict()
    weights = {}
    for name, tensor in engine.module.state_dict().items():
        if "lora_" in name:
            weights[name.replace(".default.", ".")] = _gather(tensor)
    if not _is_rank_0():
        return None
    return {key: _to_json(value) for key, value in config.items()} | {"inference_mode": True}, weights


def copy_to_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copy CPU tensors to arrays, which training does not change."""
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def save_model(engine: Any, folder: str) -> None:
    """Write the model in Hugging Face format to `folder`, atomically.

    With LoRA the adapter is merged into the model, and is also written to the subfolder `adapter` in peft's
    format.
    """
    with atomic_folder(folder) if _is_rank_0() else contextlib.nullcontext() as partial:
        _write_model(engine, str(partial))
    torch.distributed.barrier()


def _write_model(engine: Any, folder: str) -> None:
    """Write the model, its tokenizer and, if there is one, its adapter."""
    model_config, has_adapter = engine.model_config, hasattr(engine.module, "peft_config")
    tensors = gather_model(engine)
    if tensors is not None:
        hf_config = copy.deepcopy(model_config.hf_config)
        with torch.device("meta"):
            model = verl.get_hf_auto_model_class(hf_config).from_config(hf_config, dtype=torch.float32)
        if model.can_generate() and model_config.generation_config is not None:
            model.generation_config = model_config.generation_config
        vars(model.config).pop("attn_implementation", None)  # specific to this machine
        verl.drop_tied_target_keys(tensors, model, hf_config)
        model.save_pretrained(folder, state_dict=tensors)
        model_config.get_processor().save_pretrained(folder)
    if has_adapter:
        adapter = gather_adapter(engine)
        if adapter is not None:
            _write_adapter(adapter[1], engine.module.peft_config["default"], os.path.join(folder, "adapter"))


def _write_adapter(tensors: dict[str, torch.Tensor], config: Any, folder: str) -> None:
    """Write an adapter in peft's format."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        os.path.join(folder, "adapter_model.safetensors"),
    )
    inference_config = copy.copy(config)
    inference_config.inference_mode = True
    inference_config.save_pretrained(folder)


def _merged(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with the adapter added in float32; verl would round the sum to bfloat16."""
    module, state = engine.module, engine.module.state_dict()
    peft_names = {
        name.removeprefix(PEFT_PREFIX).replace(BASE_LAYER, "."): name for name in state if "lora_" not in name
    }
    peft_names = verl.convert_weight_keys(peft_names, module.get_base_model())

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, peft_name in peft_names.items():
            tensor = _gather(state[peft_name])
            if peft_name.endswith(f"{BASE_LAYER}weight"):
                tensor = tensor + _adapter_delta(module, state, peft_name.removesuffix(f"{BASE_LAYER}weight"))
            yield name, tensor

    return verl.unfuse_moe_params(pairs(), engine.model_config.hf_config.model_type)


def _adapter_delta(module: Any, state: dict[str, Any], layer: str) -> torch.Tensor:
    """Return the matrix that the adapter adds to the weight of a layer."""
    down, up = (_gather(state[f"{layer}.{name}.default.weight"]) for name in ("lora_A", "lora_B"))
    adapted = module.get_submodule(layer)
    delta = (up @ down) * adapted.scaling["default"]
    return delta.T if adapted.fan_in_fan_out else delta


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded weight in float32 on the CPU.

    It is gathered on the compute device, since an offloaded weight cannot be gathered where it is stored.
    """
    if isinstance(tensor, DTensor):
        moved: Any = tensor.to(verl.get_device_id())
        tensor = moved.full_tensor()
    return tensor.detach().to("cpu", torch.float32)


def _to_json(value: Any) -> Any:
    """Convert a set to a sorted list and an enum to its value."""
    if isinstance(value, set):
        return sorted(value)
    return getattr(value, "value", value)


def _is_rank_0() -> bool:
    return torch.distributed.get_rank() == 0
