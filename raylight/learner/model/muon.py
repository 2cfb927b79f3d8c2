"""Muon for the matrices of a model's layers, with AdamW for its other parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

MUON_MOMENT = "momentum_buffer"
"""Name of the only moment that torch's Muon keeps of a matrix."""
LR_SCALE = "match_rms_adamw"
"""Scale of torch's Muon with which its updates are as large as AdamW's, https://arxiv.org/abs/2502.16982."""


class ShardedMuon(torch.optim.Muon):
    """torch's Muon, extended to matrices that FSDP2 shards.

    Orthogonalisation needs the whole matrix, so that each rank gathers the update of one matrix at a time, in
    bfloat16, in which torch computes it.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step. A collective if the matrices are sharded."""
        if not any(isinstance(param, DTensor) for group in self.param_groups for param in group["params"]):
            return super().step(closure)
        loss = None if closure is None else closure()
        for group in self.param_groups:
            params: list[Any] = []
            gradients: list[Any] = []
            buffers: list[Any] = []
            self._init_group(group, params, gradients, buffers)
            for param, gradient, buffer in zip(params, gradients, buffers, strict=True):
                self._update(group, param, gradient, buffer)
        return loss

    def _update(self, group: dict[str, Any], param: DTensor, gradient: DTensor, buffer: DTensor) -> None:
        """Update one matrix as torch's Muon does, which it computes whole on each rank."""
        momentum, lr = group["momentum"], float(group["lr"])
        buffer.lerp_(gradient, 1 - momentum)
        part: Any = gradient.lerp(buffer, momentum).bfloat16()
        whole = part.full_tensor()
        whole = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        update = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(update, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], param.shape))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon of the matrices in a model's layers, and AdamW of embeddings, output layers, heads, vectors and
    tensors of more dimensions.

    Args:
        module: model, sharded or not, all of whose parameters are trained.
        momentum: of Muon.
        betas: of AdamW.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        lr: float,
        weight_decay: float,
        momentum: float,
        betas: tuple[float, float],
    ) -> None:
        matrices = set(muon_matrices(module))
        params = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self._muon = ShardedMuon(
            [param for name, param in params if name in matrices],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn=LR_SCALE,
        )
        self._adamw = torch.optim.AdamW(
            [param for name, param in params if name not in matrices],
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            fused=True,
        )
        # the groups and the state are shared, so that schedules, offloading and training states see one
        # optimizer
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._muon.state = self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step of both. A collective if the matrices are sharded."""
        loss = self._muon.step(closure)
        self._adamw.step()
        return loss


def muon_matrices(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that Muon updates: the matrices of a model's layers."""
    base = getattr(module, getattr(module, "base_model_prefix", ""), module)
    inside = {id(param) for param in base.parameters()}
    outside = {
        id(param)
        for part in module.modules()
        if isinstance(part, torch.nn.Embedding)
        for param in part.parameters()
    }
    return [
        name
        for name, param in module.named_parameters()
        if param.requires_grad and param.dim() == 2 and id(param) in inside - outside
    ]
