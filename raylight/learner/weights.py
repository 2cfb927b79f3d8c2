"""The weights of a rank's model, for engines and for files: the whole model, an adapter merged into it, or the adapter by itself.

Every function is a collective; what it gives is on rank 0.
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
"""Of the names of a module that peft wraps."""
WRAPPED = ".base_layer."
"""What peft puts into the names of the weights of an adapted layer."""


def whole_model(engine: Any) -> dict[str, torch.Tensor] | None:
    """All weights in float32 on the CPU, by their Hugging Face names, an adapter merged; tied ones by each of their names."""
    pairs = _merged(engine) if hasattr(engine.module, "peft_config") else engine.get_per_tensor_param()[0]
    found = {}
    for name, tensor in pairs:
        if torch.distributed.get_rank() == 0:
            found[name] = tensor.detach().to("cpu", torch.float32)
    return found or None


def adapter_alone(engine: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """The adapter's configuration and its weights in float32 on the CPU, as peft writes them to files."""
    config = engine.module.peft_config["default"].to_dict()
    found = {}
    for name, tensor in engine.module.state_dict().items():
        if "lora_" in name:
            found[name.replace(".default.", ".")] = _full(tensor)
    return (
        ({key: _plain(value) for key, value in config.items()} | {"inference_mode": True}, found)
        if _is_first()
        else None
    )


def as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies, which training does not change."""
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def save_model(engine: Any, folder: str) -> None:
    """Write the model in Hugging Face format to `folder`, atomically."""
    with atomic_folder(folder) if _is_first() else contextlib.nullcontext() as partial:
        _write_model(engine, str(partial))
    torch.distributed.barrier()


def _write_model(engine: Any, folder: str) -> None:
    """Write the whole model, its tokenizer and, in the folder `adapter`, the adapter where there is one."""
    model_config, has_adapter = engine.model_config, hasattr(engine.module, "peft_config")
    tensors = whole_model(engine)
    if tensors is not None:
        architecture = copy.deepcopy(model_config.hf_config)
        with torch.device("meta"):
            shell = verl.get_hf_auto_model_class(architecture).from_config(architecture, dtype=torch.float32)
        if shell.can_generate() and model_config.generation_config is not None:
            shell.generation_config = model_config.generation_config
        vars(shell.config).pop("attn_implementation", None)  # which is of this machine
        verl.drop_tied_target_keys(tensors, shell, architecture)
        shell.save_pretrained(folder, state_dict=tensors)
        model_config.get_processor().save_pretrained(folder)
    if has_adapter:
        adapter = adapter_alone(engine)
        if adapter is not None:
            _write_adapter(adapter[1], engine.module.peft_config["default"], os.path.join(folder, "adapter"))


def _write_adapter(tensors: dict[str, torch.Tensor], config: Any, folder: str) -> None:
    """In peft's format."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        os.path.join(folder, "adapter_model.safetensors"),
    )
    written = copy.copy(config)
    written.inference_mode = True
    written.save_pretrained(folder)


def _merged(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with the adapter added in float32: verl would round the sum to bfloat16."""
    module, state = engine.module, engine.module.state_dict()
    names = {
        name.removeprefix(PEFT_PREFIX).replace(WRAPPED, "."): name for name in state if "lora_" not in name
    }
    names = verl.convert_weight_keys(names, module.get_base_model())

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, place in names.items():
            tensor = _full(state[place])
            if place.endswith(f"{WRAPPED}weight"):
                tensor = tensor + _change(module, state, place.removesuffix(f"{WRAPPED}weight"))
            yield name, tensor

    return verl.unfuse_moe_params(pairs(), engine.model_config.hf_config.model_type)


def _change(module: Any, state: dict[str, Any], layer: str) -> torch.Tensor:
    """What the adapter adds to the weight of a layer."""
    inner, outer = (_full(state[f"{layer}.{name}.default.weight"]) for name in ("lora_A", "lora_B"))
    adapted = module.get_submodule(layer)
    change = (outer @ inner) * adapted.scaling["default"]
    return change.T if adapted.fan_in_fan_out else change


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded weight as a whole, in float32 on the CPU. It is gathered where the ranks compute, though it may rest elsewhere."""
    if isinstance(tensor, DTensor):
        moved: Any = tensor.to(verl.get_device_id())
        tensor = moved.full_tensor()
    return tensor.detach().to("cpu", torch.float32)


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, set):
        return sorted(value)
    return getattr(value, "value", value)


def _is_first() -> bool:
    return torch.distributed.get_rank() == 0
