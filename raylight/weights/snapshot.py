"""A copy of a rank's shards of the weights, from which they are sent while an update changes them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


class ShardCopies:
    """Copies of shards in host memory, which the next copies reuse.

    They belong to groups of the ranks that nothing else uses: gathering them in another thread does not mix
    with the collectives of an update. The groups communicate over gloo, because the ranks' GPUs could wait
    for each other if each ran the kernels of two groups of NCCL in another order.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def copy(self, tensors: dict[str, tuple[torch.Tensor, torch.dtype, bool]]) -> dict[str, torch.Tensor]:
        """Return copies by the names of the tensors. A collective, the first time.

        Args:
            tensors: by name, a tensor, the type of its copy, and True if training changes it. One that it
                does not change is copied once, and not at all on a CPU.
        """
        copies: dict[str, torch.Tensor] = {}
        copied: dict[object, torch.Tensor] = {}
        """Copies by address, because tied tensors have several names."""
        for name, (tensor, dtype, changes) in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            key = (local.data_ptr(), local.shape, dtype) if local.numel() else name
            if key not in copied:
                copied[key] = self._copy(name, local, dtype, changes)
            copies[name] = self._shard_like(tensor, copied[key])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _copy(self, name: str, local: torch.Tensor, dtype: torch.dtype, changes: bool) -> torch.Tensor:
        if name not in self._buffers:
            if not changes:
                self._buffers[name] = local.to("cpu", dtype)
                return self._buffers[name]
            self._buffers[name] = torch.empty(local.shape, dtype=dtype, pin_memory=local.is_cuda)
        if changes:
            self._buffers[name].copy_(local, non_blocking=True)
        return self._buffers[name]

    def _shard_like(self, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """Return the copy of a shard as a part of the whole copied tensor."""
        if not isinstance(tensor, DTensor):
            return copy
        mesh = tensor.device_mesh
        if mesh not in self._meshes:
            # without a backend torch would use existing groups
            override: dict[int | str, Any] = dict.fromkeys(range(mesh.ndim), "gloo")
            self._meshes[mesh] = init_device_mesh(
                "cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names, backend_override=override
            )
        return DTensor.from_local(
            copy,
            self._meshes[mesh],
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
