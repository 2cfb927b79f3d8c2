"""LoRA adapters on the engine's model.

Batches may mix adapters; a version is kept until its last sequence has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raylight.engines.protocol import LoraAdapter
from raylight.errors import WeightSyncError

BASE = "__base__"
"""peft's name of the base model, for a row without an adapter."""
UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
)
"""peft settings that do not work in a batch of mixed adapters."""


@dataclass(frozen=True)
class LoadedAdapter:
    """One version of an adapter.

    Attributes:
        key: peft's name of this version within the model.
    """

    name: str
    version: int
    key: str


class PeftAdapters:
    """The adapters of a module. peft wraps the module when the first adapter is loaded.

    Args:
        module: the model; peft replaces its layers in place.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._peft: Any = None
        self._current: dict[str, LoadedAdapter] = {}
        self._stale: list[LoadedAdapter] = []
        self._newest: dict[str, int] = {}
        self._numbers = itertools.count()

    @property
    def names(self) -> list[str]:
        """Names of the adapters that are served."""
        return list(self._current)

    def find(self, name: str) -> LoadedAdapter | None:
        """Return the version of an adapter that is currently served."""
        return self._current.get(name)

    def load(self, name: str, version: int, adapter: LoraAdapter) -> None:
        """Serve a new version of an adapter, replacing the previous one.

        Raises:
            WeightSyncError: the adapter does not fit the model, or the version is not newer than the last
                one.
        """
        if version <= self._newest.get(name, -1):
            raise WeightSyncError(
                f"adapter {name!r}: version {version} is not newer than {self._newest[name]}; versions are "
                "never reused"
            )
        key = f"adapter{next(self._numbers)}"
        try:
            self._add(key, adapter)
        except (
            Exception
        ) as error:  # peft and torch raise many kinds of errors for an invalid configuration or shape
            self._delete(key)
            raise WeightSyncError(f"adapter {name!r} does not fit the model: {error}") from error
        self.drop(name)
        self._current[name] = LoadedAdapter(name, version, key)
        self._newest[name] = version

    def drop(self, name: str) -> None:
        """Stop serving an adapter; `unload` frees it when no sequence uses it."""
        if name in self._current:
            self._stale.append(self._current.pop(name))

    def unload(self, used: Iterable[LoadedAdapter | None]) -> None:
        """Free replaced versions, except those in `used`."""
        if not self._stale:
            return
        in_use = set(used)
        for adapter in self._stale:
            if adapter not in in_use:
                self._delete(adapter.key)
        self._stale = [adapter for adapter in self._stale if adapter in in_use]

    def forward(self, adapters: list[LoadedAdapter | None], **inputs: Any) -> Any:
        """Run a forward pass, each row with its own adapter; None for the model itself."""
        if self._peft is None:
            return self._module(**inputs)
        first = adapters[0]
        if first is not None and all(adapter is first for adapter in adapters):  # faster than a mixed batch
            if self._peft.active_adapters != [first.key]:
                self._peft.set_adapter(first.key, inference_mode=True)
            return self._peft(**inputs)
        return self._peft(**inputs, adapter_names=[adapter.key if adapter else BASE for adapter in adapters])

    def own_state(self) -> dict[str, torch.Tensor]:
        """Return the model's own parameters, under the names that they have without adapters."""
        state = self._module.state_dict()
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in state.items()
            if ".lora_" not in name
        }

    def _add(self, key: str, adapter: LoraAdapter) -> None:
        from peft import LoraConfig, PeftModel, set_peft_model_state_dict

        if adapter.config.get("peft_type") != "LORA":
            raise ValueError(f"its peft_type is {adapter.config.get('peft_type')}; only LORA is supported")
        config = LoraConfig.from_peft_type(**adapter.config)
        unsupported = [name for name in UNSUPPORTED if getattr(config, name, None)]
        if unsupported or config.bias != "none":
            raise ValueError(
                f"it sets {', '.join(unsupported or ['bias'])}, which mixed batches do not support"
            )
        config.inference_mode, config.task_type = True, None
        if self._peft is None:
            self._peft = PeftModel(self._module, config, adapter_name=key)
        else:
            self._peft.add_adapter(key, config)
        self._peft.eval()
        weights = {name: torch.as_tensor(array) for name, array in adapter.weights.items()}
        result: Any = set_peft_model_state_dict(self._peft, weights, adapter_name=key)
        missing = [name for name in result.missing_keys if f".{key}." in name]
        if missing or result.unexpected_keys:
            raise ValueError(f"missing {missing[:3]}, unknown {list(result.unexpected_keys)[:3]}")

    def _delete(self, key: str) -> None:
        """Free an adapter. The last one takes peft's wrapper along, because peft needs at least one."""
        if self._peft is None or key not in self._peft.peft_config:
            return
        others = [other for other in self._peft.peft_config if other != key]
        if others:
            self._peft.set_adapter(others[0])
            self._peft.delete_adapter(key)
        else:
            self._peft.unload()
            vars(self._module).pop("peft_config", None)
            self._peft = None


def check_state(own: Mapping[str, torch.Tensor], tied: Iterable[str], shapes: Mapping[str, Any]) -> None:
    """Compare the shapes of a complete set of weights with a model's parameters.

    Args:
        own: the model's parameters by name.
        tied: names that may be missing, because they share their tensor with another parameter.

    Raises:
        WeightSyncError: a parameter is missing, unknown, or of another shape.
    """
    missing, unknown = own.keys() - shapes.keys() - set(tied), shapes.keys() - own.keys()
    if missing or unknown:
        raise WeightSyncError(
            f"weights do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
        )
    for name, shape in shapes.items():
        if tuple(own[name].shape) != tuple(shape):
            raise WeightSyncError(
                f"{name} has shape {tuple(shape)}; the engine's has {tuple(own[name].shape)}"
            )
