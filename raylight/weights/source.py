"""Weights of a model as a stream of layer groups, for engines and files.

At most one group is materialised in full at a time. The module imports neither verl nor vLLM.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import build_glob_alternation, revert_weight_conversion

from raylight.errors import ConfigError
from raylight.weights.snapshot import ShardCopies

Names = Literal["checkpoint", "module"]
"""Naming of tensors: as in the model's files, or as in its module."""
PEFT_PREFIX = "base_model.model."
"""Prefix of parameter names in a module wrapped by peft."""
BASE_LAYER = ".base_layer"
"""Part that peft inserts into the weight names of an adapted layer."""


@dataclass(frozen=True)
class ParamMeta:
    """Name, type and shape of a tensor, without its values; with the fields of vLLM's class."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The weights of a module as a stream of layer groups: a `WeightSource` as vLLM's transfer expects it.

    Iteration is a collective: all ranks that share the module iterate in lockstep, and each materialises one
    group at a time. An adapter is merged in float32. Every iteration yields the current weights, or the last
    snapshot if one was taken.

    Args:
        module: a model of transformers, possibly wrapped by peft, sharded by FSDP2, or on the meta device.
        dtype: type of the yielded floating-point tensors. Buffers, and parameters that transformers keeps in
            float32, are not converted.
        names: "checkpoint" for the names and shapes in the model's files, which transformers and vLLM load:
            transformers renames and packs tensors while it loads them (as a layer's experts), and this is
            undone here. "module" for the module's own names.
        tied: yield a tied tensor under each of its names. vLLM on a CPU needs that, because it keeps a
            repacked copy of the output layer. Model files contain a tied tensor once.
        adapter: full tensors to merge, by the names in peft's files, in place of the module's own adapter.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype,
        *,
        names: Names = "checkpoint",
        tied: bool = True,
        adapter: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._module, self._dtype, self._names = module, dtype, names
        self._adapter = adapter
        self._base: Any = base_model(module)
        self._adapted: dict[str, object] = {}
        """Layers of peft by the names of what they adapt: a layer, or packed experts."""
        self._packed_experts: dict[str, str] = {}
        """Name of a layer of peft that adapts packed experts -> the name of these."""
        for name, layer in self._base.named_modules():
            if hasattr(layer, "lora_A"):
                adapted = name.replace(BASE_LAYER, "")
                if hasattr(layer, "parameter_name"):
                    self._packed_experts[name] = adapted = f"{adapted}.{layer.parameter_name}"
                self._adapted[adapted] = layer
        self._skipped = frozenset() if tied else frozenset(self._base.all_tied_weights_keys)
        self._buffers = {name for name, _ in self._base.named_buffers()}
        self._dtypes = self._base._get_dtype_plan(dtype)
        param = next(module.parameters())
        self._device = param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
        self._copies: ShardCopies | None = None
        self._snapshot: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None

    def take_snapshot(self) -> None:
        """Copy this rank's shards, which iteration yields from now on, in any thread, while training changes
        the module. A collective."""
        self._copies = self._copies or ShardCopies()
        model, adapters = self._current_state()
        trained = {
            self._plain(name) for name, param in self._module.named_parameters() if param.requires_grad
        }
        copied = {
            name: (tensor, self._snapshot_dtype(name, tensor, adapters), name in trained)
            for name, tensor in (model | adapters).items()
        }
        copies = self._copies.copy(copied)
        self._snapshot = {name: copies[name] for name in model}, {name: copies[name] for name in adapters}

    def metadata(self) -> list[ParamMeta]:
        """Return what iteration yields, in its order, without gathering anything."""
        return [param for group in self._layout.values() for param in group]

    def groups(self) -> list[list[str]]:
        """Return the names of the yielded tensors by layer group, as `layerwise_groups` divides them."""
        return [[param.name for param in group] for group in self._layout.values()]

    def held_names(self) -> None:
        """Return None: each rank yields all tensors."""
        return None

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield the names and full tensors of one layer group at a time, on the compute device."""
        state, adapters = self._state()
        for sources, group in self._layout.items():
            named = self._export({name: self._materialize(name, state[name], adapters) for name in sources})
            names = [param.name for param in group]
            yield names, [named.pop(name) for name in names]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for names, tensors in self.iter_groups():
            while names:
                yield names.pop(0), tensors.pop(0)

    @functools.cached_property
    def _layout(self) -> dict[tuple[str, ...], list[ParamMeta]]:
        """Names of the module's tensors in a group -> what they are exported as."""
        state = self._state()[0]
        layout = {}
        for sources in layerwise_groups(list(state)):
            on_meta = {
                name: torch.empty_like(state[name], dtype=self._dtype_of(name, state[name]), device="meta")
                for name in sources
            }
            exported = self._export(on_meta)
            layout[tuple(sources)] = [
                ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in exported.items()
            ]
        groups = [[param.name for param in group] for group in layout.values()]
        if layerwise_groups([name for group in groups for name in group]) != groups:
            raise ConfigError(
                f"the files of {type(self._base).__name__} do not store its layers one by one, so its "
                "weights cannot be transferred layer by layer; choose a model of another architecture"
            )
        return layout

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensors that iteration yields: of the last snapshot, or the current ones."""
        return self._snapshot or self._current_state()

    def _current_state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensors of the model and of its adapter by the names of a model without adapters."""
        model: dict[str, torch.Tensor] = {}
        adapter: dict[str, torch.Tensor] = {}
        for name, tensor in self._module.state_dict().items():
            plain = self._plain(name)
            if plain not in self._skipped:
                (adapter if "lora_" in name else model)[plain] = tensor.detach()
        if self._adapter is not None:
            files = {self._plain(name): tensor for name, tensor in self._adapter.items()}
            adapter = {name: files[name.replace(".default.", ".")] for name in adapter}
        return model, adapter

    def _plain(self, name: str) -> str:
        """Return the name of a tensor in a model without adapters, or of an adapter's matrix: the
        name of what it is added to, and its own."""
        name = name.removeprefix(PEFT_PREFIX)
        layer, matrix, rest = name.partition(".lora_")
        if matrix and layer in self._packed_experts:
            layer = self._packed_experts[layer]
        return layer.replace(BASE_LAYER, "") + matrix + rest

    def _export(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the tensors of a group from the module's names and shapes to the exported ones."""
        if self._names == "module":
            return tensors
        return dict(revert_weight_conversion(self._base, tensors))

    def _materialize(
        self, name: str, tensor: torch.Tensor, adapters: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return a full tensor on the compute device, with its adapter merged. A collective if it is sharded.

        It is converted before it is gathered, unless an adapter is added first.
        """
        layer = name.removesuffix(".weight")
        down, up = adapter_of(layer, adapters)
        if down is None or up is None:
            return self._gather(tensor.to(self._dtype_of(name, tensor)))
        delta = _delta(self._adapted[layer], self._gather(down.float()), self._gather(up.float()))
        return (self._gather(tensor.float()) + delta).to(self._dtype_of(name, tensor))

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor on the compute device; a snapshot is gathered in host memory."""
        return gather(tensor).to(self._device)

    def _snapshot_dtype(
        self, name: str, tensor: torch.Tensor, adapters: dict[str, torch.Tensor]
    ) -> torch.dtype:
        """Return the type in which a tensor is copied: the final one, unless an adapter is added to it."""
        if name in adapters or None not in adapter_of(name.removesuffix(".weight"), adapters):
            return tensor.dtype
        return self._dtype_of(name, tensor)

    def _dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """Return the type in which a tensor of the module is yielded."""
        if not tensor.is_floating_point() or name in self._buffers:
            return tensor.dtype
        if self._dtypes and build_glob_alternation(list(self._dtypes))[0].search(name):
            return torch.float32
        return self._dtype


def _delta(layer: Any, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return what `down` (rank, inputs) and `up` (outputs, rank) add to a layer, or to packed experts.

    Experts have their own rows of `down`, expert after expert, and columns of `up`, rank after rank.
    """
    if not hasattr(layer, "parameter_name"):
        delta = up @ down * layer.scaling["default"]
        return delta.T if layer.fan_in_fan_out else delta
    downs = down.unflatten(0, (layer.num_experts, -1))
    ups = up.unflatten(1, (-1, layer.num_experts))
    delta = torch.einsum("ore,eri->eoi", ups, downs) * layer.scaling["default"]
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    return delta.transpose(1, 2) if is_transposed else delta


def adapter_of(
    layer: str, adapters: dict[str, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a layer's matrices A (rank, inputs) and B (outputs, rank) of an adapter, or None for each."""
    return adapters.get(f"{layer}.lora_A.default.weight"), adapters.get(f"{layer}.lora_B.default.weight")


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a shard on the compute device. A collective.

    A shard that is offloaded to the host cannot be gathered there.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    moved: Any = tensor.to(tensor.device_mesh.device_type)
    return moved.full_tensor()


def layerwise_groups(names: list[str]) -> list[list[str]]:
    """Divide names into one group per layer, as vLLM's function of this name does.

    The first number in a name is its layer's. Names without a number form a group before the layers,
    if they precede all others, and else one after them.
    """
    before: list[str] = []
    after: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        found = re.match(r"(.*?)(?:^|(?<=\.))(\d+)(?:\.|$)", name)
        if found is None:
            (after if stacks else before).append(name)
        else:
            stacks.setdefault(found[1], {}).setdefault(int(found[2]), []).append(name)
    layers = [layer for stack in stacks.values() for _, layer in sorted(stack.items())]
    return [group for group in [before, *layers, after] if group]


def base_model(module: Any) -> Any:
    """Return the model of transformers that peft may have wrapped."""
    return module.get_base_model() if hasattr(module, "peft_config") else module
