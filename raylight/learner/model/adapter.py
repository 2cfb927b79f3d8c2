"""LoRA adapters of the learners: which layers they adapt, as peft sees it."""

from __future__ import annotations

import re
from typing import Any, cast

import torch

from raylight.config import LoraConfig
from raylight.errors import ConfigError
from raylight.images.model_inputs import reads_images
from raylight.learner.model.vision import LANGUAGE


def adapted_layers(model_path: str, lora: LoraConfig) -> list[str]:
    """Return the last parts of the names of the adapted layers, without loading the model's weights.

    Raises:
        ConfigError: see `check_adapter`; or no layer has such a name.
    """
    import peft
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig

    from raylight.learner.model.model_check import build_on_meta

    model = build_on_meta(AutoConfig.from_pretrained(model_path), reads_images(model_path))
    with torch.device("meta"):
        try:
            peft.inject_adapter_in_model(peft_config(lora, None, model), model)
        except ValueError as error:
            raise ConfigError(f"the lora settings do not fit {model_path}: {error}") from None
    check_adapter(model, lora)
    layers = (name for name, layer in model.named_modules() if isinstance(layer, LoraLayer))
    return sorted({name.rpartition(".")[2] for name in layers})


def peft_config(lora: LoraConfig, task: str | None, module: Any) -> Any:
    """Return the settings of an adapter of a module as peft's configuration.

    In a mixture of experts, "all-linear" stands for the linear layers outside of the mixtures. peft would
    take it for the experts too, which it cannot merge exactly.
    """
    import peft

    targets = lora.target_modules
    names = [name for name, _ in module.named_modules()]
    mixtures = tuple(name.removesuffix("experts") for name in names if name.endswith(".experts"))
    if targets == "all-linear" and mixtures:
        targets = [
            name
            for name, layer in module.named_modules()
            if type(layer) is torch.nn.Linear
            and layer is not module.get_output_embeddings()
            and not name.startswith(mixtures)
        ]
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(Any, lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=_excluded(lora, names),
        target_parameters=lora.target_parameters or None,
        bias="none",
        task_type=task,
    )


def _excluded(lora: LoraConfig, names: list[str]) -> str | list[str] | None:
    """Return the modules that are not adapted: the settings' ones and, of a model with a vision part, all
    but its language part, whose layers have the same names.

    Args:
        names: of all modules.
    """
    language = next((name for name in names if name.rpartition(".")[2] == LANGUAGE), None)
    if language is None:
        return lora.exclude_modules
    others = f"(?!{re.escape(language)}\\.).*"
    if lora.exclude_modules is None:
        return others
    given = lora.exclude_modules
    own = given if isinstance(given, str) else rf"(.*\.)?({'|'.join(map(re.escape, given))})"
    return f"{others}|{own}"


def check_adapter(module: torch.nn.Module, lora: LoraConfig) -> None:
    """Check that every adapted layer can be sharded, and merged exactly: a linear layer within the
    transformer, or packed experts that are named.

    Raises:
        ConfigError: `target_modules` matches another layer, or one of `target_parameters` no packed experts.
    """
    from peft.tuners.lora import Linear, LoraLayer, ParamWrapper

    unmatched = set(lora.target_parameters)
    for name, layer in module.named_modules():
        if isinstance(layer, ParamWrapper) and layer.get_param().dim() == 3:
            key = f".{name.replace('.base_layer', '')}.{layer.parameter_name}"
            found = {target for target in lora.target_parameters if key.endswith(f".{target}")}
            unmatched -= found
            if found:
                continue
        if isinstance(layer, LoraLayer) and (type(layer) is not Linear or name.endswith("lm_head")):
            raise ConfigError(
                f"lora.target_modules={lora.target_modules!r} matches {name}, which cannot be adapted: only "
                "linear layers can, and not the output layer, and by lora.target_parameters the packed "
                "experts; name other layers, or add it to lora.exclude_modules"
            )
    if unmatched:
        packed = {name.split(".", 3)[-1] for name, param in module.named_parameters() if param.dim() == 3}
        raise ConfigError(
            f"lora.target_parameters={sorted(unmatched)} match no packed experts of the model; name some of "
            f"{sorted(name for name in packed if 'lora_' not in name) or 'another model'}"
        )
