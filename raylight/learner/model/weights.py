"""Weights of a rank's model for engines and files: the model with a merged adapter, or the adapter.

Every function with an engine is a collective, and returns its result on rank 0.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, PreTrainedModel

from raylight._utils.files import atomic_folder
from raylight.engines.protocol import LoraAdapter
from raylight.errors import ConfigError
from raylight.learner.model.fsdp import RaylightEngine
from raylight.learner.model.model_check import weight_files
from raylight.types import JsonObject
from raylight.weights.peft_files import missing_files, read_adapter
from raylight.weights.source import WeightSource, base_model, gather

SHARD_BYTES = 4_000_000_000
"""Largest size of one file of a saved model."""
SCALE_SETTINGS = ("use_rslora", "alpha_pattern")
"""Settings of peft that change the scale of an adapter, but neither its rank, its alpha nor its tensors."""
PER_TOKEN = "ForTokenClassification"
"""End of the names of models with an output for each token."""


def gather_model(engine: RaylightEngine) -> dict[str, torch.Tensor] | None:
    """Return all weights in float32 on the CPU by Hugging Face name, with the adapter merged, on rank 0.

    A tied weight appears under each of its names.
    """
    weights = {}
    for name, tensor in WeightSource(engine.module, torch.float32):
        if _is_rank_0():
            weights[name] = tensor.cpu()
    return weights or None


def gather_adapter(engine: RaylightEngine) -> tuple[JsonObject, dict[str, torch.Tensor]] | None:
    """Return the adapter's configuration and float32 CPU weights, as in peft's files, on rank 0."""
    config = engine.module.peft_config["default"].to_dict()
    weights = {}
    for name, tensor in engine.module.state_dict().items():
        if "lora_" in name:
            weights[name.replace(".default.", ".")] = gather(tensor.detach()).to("cpu", torch.float32)
    if not _is_rank_0():
        return None
    return {key: _to_json(value) for key, value in config.items()} | {"inference_mode": True}, weights


def load_adapter(engine: RaylightEngine, folder: str) -> None:
    """Replace the weights of the engine's adapter by a folder's, in peft's format.

    Raises:
        ConfigError: the folder has no adapter, or one of another kind, rank, scale or other layers.
    """
    own = engine.module.peft_config["default"]
    if missing := missing_files(folder):
        raise ConfigError(
            f"there is no {Path(folder, missing[0])}; name a folder with a LoRA adapter in peft's format"
        )
    adapter = read_adapter(folder)
    config, tensors = adapter.config, adapter.weights
    params = {
        name.replace(".default.", "."): param
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    scale = (config.get("r"), float(config.get("lora_alpha", 0)))
    if scale != (own.r, own.lora_alpha) or shapes != {name: tuple(t.shape) for name, t in tensors.items()}:
        raise ConfigError(
            f"the adapter {folder} has rank {scale[0]}, alpha {scale[1]:g} and {len(tensors)} tensors, and "
            f"learner.lora asks for rank {own.r}, alpha {own.lora_alpha:g} and {len(shapes)} tensors; set "
            "learner.lora to the adapter's rank, alpha and layers"
        )
    if other := [name for name in SCALE_SETTINGS if config.get(name)]:
        raise ConfigError(
            f"the adapter {folder} was trained with {other[0]}={config[other[0]]!r}, which scales its "
            "matrices otherwise than learner.lora does; merge it into the base, or train one without "
            "this setting"
        )
    with torch.no_grad():
        for name, param in params.items():
            value = tensors[name].to(param.device, param.dtype)
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            param.copy_(value)


def copy_to_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copy CPU tensors to arrays, which training does not change."""
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def save_model(engine: RaylightEngine, folder: str, adapter: LoraAdapter | None = None) -> None:
    """Write the model in Hugging Face format to `folder`, atomically.

    With LoRA the adapter is merged into the model, and is also written to the subfolder `adapter` in peft's
    format.

    Args:
        adapter: a version of the adapter, in place of the current one.
    """
    tensors = None
    if adapter is not None:
        tensors = {name: torch.tensor(array) for name, array in adapter.weights.items()}
    with atomic_folder(folder) if _is_rank_0() else contextlib.nullcontext() as partial:
        _write_model(engine, str(partial), tensors)
    torch.distributed.barrier()


def _write_model(engine: RaylightEngine, folder: str, adapter: dict[str, torch.Tensor] | None) -> None:
    """Write the model, its tokenizer and, if there is one, its adapter."""
    module, settings = engine.module, engine.model_config
    model = base_model(module)
    rest: dict[str, torch.Tensor] = {}
    is_part = settings.hf_config.model_type != model.config.model_type  # only the text part is loaded
    if is_part or engine.images is not None:  # layers that predict further tokens are not loaded either
        rest = _other_tensors(str(settings.local_path), WeightSource(module, torch.float32))
    if _is_rank_0():
        _write_config(model, folder, settings.local_path if is_part else None)
        settings.tokenizer.save_pretrained(folder)
        for own in ("*processor_config.json", "chat_template.json"):  # which no tokenizer writes
            for file in Path(str(settings.local_path)).glob(own):
                shutil.copy(file, folder)
    _write_tensors(WeightSource(module, torch.float32, tied=False, adapter=adapter), folder, rest)
    if hasattr(module, "peft_config"):
        if adapter is None:
            _, adapter = gather_adapter(engine) or (None, None)
        if adapter is not None and _is_rank_0():
            _write_adapter(adapter, module.peft_config["default"], os.path.join(folder, "adapter"))


def _write_config(model: PreTrainedModel, folder: str, original: str | None) -> None:
    """Write the configurations.

    Args:
        original: folder of a model of which `model` is the text part.
    """
    config = copy.deepcopy(model.config) if original is None else AutoConfig.from_pretrained(original)
    if original is None:
        name = type(model).__name__.removeprefix("FSDP")  # FSDP2 renames the class
        if name.endswith(PER_TOKEN):  # a reward model, which scores the last token of a row
            name = name.removesuffix(PER_TOKEN) + "ForSequenceClassification"
        config.architectures = [name]
    config.dtype = "float32"
    vars(config).pop("attn_implementation", None)  # specific to this machine
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _other_tensors(folder: str, source: WeightSource) -> dict[str, torch.Tensor]:
    """Return the tensors in a model's files that a source does not have."""
    own = {param.name for param in source.metadata()}
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(Path(folder)):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as content:
                tensors |= {name: content.get_tensor(name) for name in {*content.keys()} - own}
        else:
            stored = torch.load(file, mmap=True, weights_only=True)
            tensors |= {name: tensor for name, tensor in stored.items() if name not in own}
    return tensors


def _write_tensors(source: WeightSource, folder: str, rest: dict[str, torch.Tensor]) -> None:
    """Write the tensors of a source, and further ones, to files of at most `SHARD_BYTES`, unless one tensor
    is larger.

    A collective. Rank 0 holds one file's tensors at a time.
    """
    split = split_torch_state_dict_into_shards(
        {
            param.name: torch.empty(param.shape, dtype=param.dtype, device="meta")
            for param in source.metadata()
        }
        | {name: tensor.to("meta") for name, tensor in rest.items()},
        max_shard_size=SHARD_BYTES,
    )
    parts: dict[str, dict[str, torch.Tensor]] = {file: {} for file in split.filename_to_tensors}
    for name, tensor in itertools.chain(source, rest.items()):
        if _is_rank_0():
            file = split.tensor_to_filename[name]
            parts[file][name] = tensor.cpu().contiguous()
            if len(parts[file]) == len(split.filename_to_tensors[file]):
                save_file(parts.pop(file), os.path.join(folder, file), metadata={"format": "pt"})
    if split.is_sharded and _is_rank_0():
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        Path(folder, SAFETENSORS_INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))


def _write_adapter(tensors: dict[str, torch.Tensor], config: Any, folder: str) -> None:
    """Write an adapter in peft's format."""
    os.makedirs(folder, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        os.path.join(folder, "adapter_model.safetensors"),
    )
    inference_config = copy.copy(config)
    inference_config.inference_mode = True
    inference_config.save_pretrained(folder)


def _to_json(value: object) -> object:
    """Convert a set to a sorted list and an enum to its value."""
    if isinstance(value, set):
        return sorted(value)
    return getattr(value, "value", value)


def _is_rank_0() -> bool:
    return torch.distributed.get_rank() == 0
