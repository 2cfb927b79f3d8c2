"""Check that a model's weights keep their names and shapes from its files through training and back.

Only the headers of the files are read, and the model is built on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from raylight.errors import ConfigError
from raylight.images.model_inputs import auto_class, image_obstacle, reads_images
from raylight.learner.model.vision import LANGUAGE
from raylight.learner.tokens.response_logprobs import LogprobHead
from raylight.weights.source import WeightSource

Shapes = Mapping[str, tuple[int, ...]]
SHOWN = 3
"""Number of differing tensors that a message names."""
FILES = ("model.safetensors", "pytorch_model.bin")
"""Files of weights that transformers loads, in its order; large models have an index of several files."""
QUANTIZED = ("F8", "F6", "F4")
"""First letters of the types of quantized weights in the headers of safetensors files."""


def check_model(path: str) -> None:
    """Check that a model can be trained, and that engines can load what the learners send.

    transformers renames and packs tensors when it loads them. The weight source undoes that. Here the names
    and shapes in the model's files are loaded into a model on the meta device, and what the source makes of
    it is compared with the files.

    Args:
        path: folder of a Hugging Face model.

    Raises:
        ConfigError: the architecture, or these files of it, cannot be trained. The message names the
            architecture and the first tensors that differ.
    """
    config = AutoConfig.from_pretrained(path)
    if getattr(config, "quantization_config", None) is not None:
        method = dict(config.quantization_config).get("quant_method", "a custom method")
        raise ConfigError(
            f"the weights of {path} are quantized ({method}), and quantized weights cannot be trained; use "
            "the unquantized model, or dequantize this one: AutoModelForCausalLM.from_pretrained(PATH, "
            "dtype='bfloat16').dequantize() and save_pretrained"
        )
    model = build_on_meta(config, reads_images=reads_images(path))
    stored = read_shapes(path)
    exported = round_trip(model, stored)
    lost = {name: shape for name, shape in exported.items() if stored.get(name) != shape}
    if lost:
        raise ConfigError(
            f"the weights of {type(model).__name__} in {path} would be sent to the engines under other "
            f"names or shapes than in its files: {_some(lost)}; transformers cannot undo its conversion of "
            "this architecture, so choose a model of another one"
        )
    check_layout(model)


def check_layout(model: PreTrainedModel) -> None:
    """Check that log-probs can be computed from the last hidden states alone, as in training.

    The forward pass around the layers is run; the layers are not.

    Raises:
        ConfigError: they cannot.
    """
    head = LogprobHead(model)
    hidden = torch.empty(1, model.get_output_embeddings().weight.shape[1], device="meta")
    try:
        head.logits(hidden)
    except Exception as error:  # an architecture's own code may fail in any way
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(
            f"{type(model).__name__} cannot be trained: its forward pass does not compute logits from the "
            f"last hidden states alone ({reason}); choose a model of an architecture of docs/models.md"
        ) from error


def build_on_meta(config: PreTrainedConfig, reads_images: bool = False) -> PreTrainedModel:
    """Build a model without values.

    Args:
        reads_images: build a vision part too.

    Raises:
        ConfigError: transformers cannot build it, or see `trained_class`.
    """
    architecture = trained_class(config, reads_images)
    try:
        with torch.device("meta"):
            return auto_class(reads_images).from_config(config, dtype=torch.float32)
    except Exception as error:  # an architecture's own code may fail in any way
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(
            f"transformers cannot build {architecture.__name__}: {reason}; repair the model's config.json"
        ) from error


def language_part(model: PreTrainedModel) -> torch.nn.Module:
    """Return the transformer of a model that computes its tokens."""
    return getattr(model.base_model, LANGUAGE, model.base_model)


def trained_class(config: PreTrainedConfig, reads_images: bool = False) -> type[PreTrainedModel]:
    """Return transformers' class that learners and engines load: of `AutoModelForImageTextToText`
    for a model that reads images, else of `AutoModelForCausalLM`, which is the text part alone of some
    models with a vision part (Qwen 3.5).

    Raises:
        ConfigError: it does not generate text, or the files belong to a model without output
            layer.
    """
    name = (config.architectures or [""])[0]
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    served: Any = whole if reads_images else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if served is not None and name in {each.__name__ for each in (served, whole) if each is not None}:
        return served
    if served is None and whole is not None:
        raise ConfigError(
            f"the architecture {name or config.model_type} is trained with images alone, and "
            f"{config.name_or_path} takes none: {image_obstacle(str(config.name_or_path))}"
        )
    reason = "it does not generate text in transformers"
    if served is not None:
        reason = f"transformers generates text with {served.__name__}"
    raise ConfigError(
        f"the architecture {name or config.model_type} cannot be trained: {reason}; choose a model of an "
        "architecture of docs/models.md"
    )


def round_trip(model: PreTrainedModel, stored: Shapes) -> dict[str, tuple[int, ...]]:
    """Load tensors without values into a model on the meta device; return the names and shapes it exports.

    Raises:
        ConfigError: a tensor of the model is missing, unknown, or of another shape.
    """
    tensors = {name: torch.empty(shape, device="meta") for name, shape in stored.items()}
    mapping: Any = get_model_conversion_mapping(model)
    loading = LoadStateDictConfig(device_map={"": "meta"}, dtype=torch.float32, weight_mapping=mapping)
    bar = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(model, tensors, loading, tp_plan=None)
    finally:
        if bar:
            enable_progress_bar()
    for pair in model.all_tied_weights_keys.items():
        if not info.missing_keys.issuperset(pair):
            info.missing_keys -= set(pair)
    model._adjust_missing_and_unexpected_keys(info)
    problems = {
        "missing in the files": sorted(info.missing_keys),
        "unknown to the model": sorted(info.unexpected_keys),
        "of another shape": [
            f"{name} {tuple(found)} instead of {tuple(expected)}"
            for name, found, expected in sorted(info.mismatched_keys)
        ],
        "not convertible": sorted(info.conversion_errors),
    }
    if any(problems.values()):
        found = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
        raise ConfigError(
            f"the weights of this model do not fit {type(model).__name__}: {found}; use the files "
            "and the config.json of the same model"
        )
    return {param.name: param.shape for param in WeightSource(model, torch.float32, tied=False).metadata()}


def read_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a model's files by name. Only headers are read.

    Raises:
        ConfigError: see `weight_files`; or a file is missing or damaged, or a tensor quantized.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(Path(path)):
        try:
            shapes |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
        except (OSError, ValueError, SafetensorError, RuntimeError) as error:
            raise ConfigError(
                f"cannot read the weights in {file}: {error}; copy the model's files again"
            ) from error
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights.

    Raises:
        ConfigError: there are none.
    """
    for name in FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return sorted(folder / file for file in set(json.loads(index.read_text())["weight_map"].values()))
    raise ConfigError(
        f"{folder} has no weights ({' or '.join(FILES)}, or an index of several files); give the folder of a "
        "complete model"
    )


def _safetensors(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, "pt") as content:
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
        if quantized := [n for n, part in slices.items() if part.get_dtype().startswith(QUANTIZED)]:
            raise ValueError(f"{_some(quantized)} are quantized, and quantized weights cannot be trained")
        return {name: tuple(part.get_shape()) for name, part in slices.items()}


def _pickled(file: Path) -> dict[str, tuple[int, ...]]:
    tensors = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _some(names: Mapping[str, object] | Iterable[str]) -> str:
    """Return the first names of several, and how many more there are."""
    names = (
        [f"{name} {shape}" for name, shape in names.items()] if isinstance(names, Mapping) else list(names)
    )
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
