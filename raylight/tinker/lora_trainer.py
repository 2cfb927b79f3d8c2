"""Training of many LoRA adapters on one model: each has separate gradients and a separate optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from raylight.config import LoraConfig
from raylight.engines.protocol import LoraAdapter
from raylight.errors import AdapterLostError, ConfigError, DeviceMemoryError, NonFiniteGradientError
from raylight.experience.batches.token_budgets import plan_micro_batches
from raylight.learner.model.adapter import check_adapter, peft_config
from raylight.learner.tokens.response_logprobs import LogprobHead, TargetTokens
from raylight.tinker.datums import Batch, Datum
from raylight.tinker.models import RESTARTED
from raylight.tinker.requests import AdamParams, LoraSpec
from raylight.tinker.tinker_losses import LOSSES, ROWS, TARGETS

ALPHA = 32.0
"""Scale of every adapter, which is multiplied by `ALPHA / rank`, as Tinker's."""
BASE = "base"
"""peft's name of an adapter that is never active: peft needs one at any time."""
ATTENTION = ("attn", "attention")
"""Parts of the names of attention layers."""


@dataclass(eq=False)
class Tenant:
    """An adapter in training.

    Attributes:
        key: peft's name of the adapter.
        params: its trained parameters.
    """

    key: str
    spec: LoraSpec
    params: list[torch.nn.Parameter]
    optimizer: torch.optim.AdamW


class LoraTrainer:
    """A causal language model with an adapter for each tenant. All methods that use an adapter raise
    AdapterLostError if it is not there.

    Args:
        model_path: folder of the model.
        dtype: data type of the model; adapters and their gradients are float32.
        max_tokens: tokens of a micro-batch, padding included.
    """

    def __init__(self, model_path: str, dtype: str, device: torch.device, max_tokens: int) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        module: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
        self._module = module.to(device).eval().requires_grad_(False)
        self._device, self._max_tokens = device, max_tokens
        LogprobHead(self._module)
        self._layers = linear_layers(self._module)
        config = peft_config(LoraConfig(rank=1, alpha=ALPHA), None, self._module)
        self._peft: Any = peft.get_peft_model(self._module, config, adapter_name=BASE)
        self._peft.requires_grad_(False)
        self._tenants: dict[str, Tenant] = {}
        self._numbers = itertools.count()

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """Add an adapter that does not change the model yet.

        Raises:
            ConfigError: the model has no layer to adapt.
        """
        layers = [
            name
            for name in self._layers
            if (spec.train_attn if any(part in name for part in ATTENTION) else spec.train_mlp)
        ]
        if not layers:
            raise ConfigError("lora_config: no layer is left to train; set train_attn or train_mlp")
        key = f"tenant{next(self._numbers)}"
        lora = LoraConfig(rank=spec.rank, alpha=ALPHA, target_modules=layers)
        config = peft_config(lora, None, self._module)
        with torch.random.fork_rng(enabled=spec.seed is not None):
            if spec.seed is not None:
                torch.manual_seed(spec.seed)
            self._peft.add_adapter(key, config)
        check_adapter(self._peft, lora)
        self._peft.set_adapter(key)
        params = [param for param in self._peft.parameters() if param.requires_grad]
        self._tenants[model_id] = Tenant(key, spec, params, torch.optim.AdamW(params))

    def remove(self, model_id: str) -> None:
        """Free an adapter; unknown ones are ignored."""
        if (tenant := self._tenants.pop(model_id, None)) is not None:
            self._peft.set_adapter(BASE)
            self._peft.delete_adapter(tenant.key)

    def forward_backward(self, model_id: str, batch: Batch, backward: bool) -> tuple[float, list[np.ndarray]]:
        """Return the sum of all losses, and of each example its targets' log-probs, shape (targets,).

        Args:
            backward: add the gradient of the sum to the gradients since the last optimizer step. If the pass
                fails, these stay unchanged.

        Raises:
            DeviceMemoryError: the device ran out of memory.
        """
        tenant = self._activate(model_id)
        earlier = [None if param.grad is None else param.grad.clone() for param in tenant.params]
        try:
            return self._pass(batch, backward)
        except BaseException as error:
            for param, grad in zip(tenant.params, earlier, strict=True):
                param.grad = grad
            if isinstance(error, torch.OutOfMemoryError):
                raise DeviceMemoryError(
                    f"a pass of {len(batch.data)} examples ran out of memory ({error}); send shorter ones, "
                    "or start the server with a lower --set tinker.max_tokens_per_micro_batch"
                ) from None
            raise

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Take a step of AdamW with the gradients since the last step, and return metrics.

        Raises:
            ConfigError: there are no gradients.
            NonFiniteGradientError: the gradients are not finite; they are dropped, and no step is taken.
        """
        tenant = self._activate(model_id)
        if all(param.grad is None for param in tenant.params):
            raise ConfigError("there is no gradient for this step; call forward_backward first")
        limit = params.grad_clip_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(tenant.params, limit))
        try:
            if not np.isfinite(norm):
                raise NonFiniteGradientError(
                    f"the norm of the gradient is {norm}; no step was taken, and the gradient was dropped"
                )
            for group in tenant.optimizer.param_groups:
                group |= {
                    "lr": params.learning_rate,
                    "betas": (params.beta1, params.beta2),
                    "eps": params.eps,
                    "weight_decay": params.weight_decay,
                }
            tenant.optimizer.step()
        finally:
            tenant.optimizer.zero_grad()
        return {"grad_norm": norm}

    def export(self, model_id: str) -> LoraAdapter:
        from peft import get_peft_model_state_dict

        tenant = self._tenant(model_id)
        state = get_peft_model_state_dict(self._peft, adapter_name=tenant.key)
        config = self._peft.peft_config[tenant.key].to_dict()
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
        weights = {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}
        return LoraAdapter(plain, weights)

    def export_optimizer(self, model_id: str) -> dict[str, np.ndarray]:
        """Return the state of a tenant's optimizer: arrays by the number of the parameter and their name."""
        state = self._tenant(model_id).optimizer.state_dict()["state"]
        return {
            f"{number}.{name}": torch.as_tensor(value).detach().cpu().numpy().copy()
            for number, values in state.items()
            for name, value in values.items()
        }

    def load(self, model_id: str, adapter: LoraAdapter, optimizer: dict[str, np.ndarray] | None) -> None:
        """Replace the weights of a tenant's adapter, and the state of its optimizer.

        Args:
            optimizer: None for a new optimizer.

        Raises:
            ConfigError: the adapter has other layers or another rank.
        """
        from peft import set_peft_model_state_dict

        tenant = self._tenant(model_id)
        own = self.export(model_id).weights
        if {name: array.shape for name, array in own.items()} != {
            name: array.shape for name, array in adapter.weights.items()
        }:
            raise ConfigError("the checkpoint has an adapter of other layers or of another rank")
        weights = {name: torch.tensor(array) for name, array in adapter.weights.items()}
        set_peft_model_state_dict(self._peft, weights, adapter_name=tenant.key)
        tenant.optimizer.zero_grad()
        tenant.optimizer.state.clear()
        if optimizer:
            self._load_optimizer(tenant, optimizer)

    def _load_optimizer(self, tenant: Tenant, arrays: dict[str, np.ndarray]) -> None:
        state: dict[int, dict[str, torch.Tensor]] = {}
        for path, array in arrays.items():
            number, _, name = path.partition(".")
            state.setdefault(int(number), {})[name] = torch.tensor(array)
        tenant.optimizer.load_state_dict(tenant.optimizer.state_dict() | {"state": state})

    def _tenant(self, model_id: str) -> Tenant:
        if (tenant := self._tenants.get(model_id)) is None:
            raise AdapterLostError(RESTARTED)
        return tenant

    def _activate(self, model_id: str) -> Tenant:
        tenant = self._tenant(model_id)
        self._peft.set_adapter(tenant.key)
        return tenant

    def _pass(self, batch: Batch, backward: bool) -> tuple[float, list[np.ndarray]]:
        loss, total = LOSSES[batch.loss], 0.0
        outputs: list[np.ndarray] = [np.empty(0)] * len(batch.data)
        lengths = [len(datum.tokens) for datum in batch.data]
        for part in plan_micro_batches(lengths, self._max_tokens, packed=False):
            rows = [batch.data[i] for i in part]
            with torch.set_grad_enabled(backward):
                logprobs = self._logprobs(rows)
                losses = loss.function(logprobs, self._inputs(rows), batch.settings)
                summed = losses.sum()
                if backward:
                    summed.backward()
            total += summed.item()
            found = logprobs.detach().cpu().split([len(row.tokens) for row in rows])
            for i, values in zip(part, found, strict=True):
                outputs[i] = values.numpy()
        return total, outputs

    def _logprobs(self, rows: Sequence[Datum]) -> torch.Tensor:
        """Return the log-probs of all targets, row after row, float32, shape (targets,)."""
        tokens = [torch.tensor(row.tokens) for row in rows]
        ids = pad_sequence(tokens, batch_first=True)  # on the right, where no token attends
        within = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in tokens], batch_first=True)
        targets = torch.from_numpy(np.concatenate([row.inputs[TARGETS] for row in rows]))
        output = self._peft(
            input_ids=ids.to(self._device),
            use_cache=False,
            sampled=TargetTokens(within, targets.to(self._device), None, entropy=False, entropy_grad=False),
        )
        return cast(torch.Tensor, output["log_probs"])

    def _inputs(self, rows: Sequence[Datum]) -> dict[str, torch.Tensor]:
        """Return the inputs of the loss that all rows have, row after row, each of shape (tokens,)."""
        names = set.intersection(*({*row.inputs} for row in rows)) - {TARGETS}
        arrays = {name: np.concatenate([row.inputs[name] for row in rows]) for name in names}
        arrays[ROWS] = np.repeat(np.arange(len(rows)), [len(row.tokens) for row in rows])
        return {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}


def linear_layers(module: Any) -> list[str]:
    """Return the names of the linear layers that an adapter of a model may have: without the output layer
    and, in a mixture of experts, without experts, shared experts and routers.

    Raises:
        ConfigError: the model has other layers that an adapter would take.
    """
    mixtures = tuple(
        name.removesuffix("experts") for name, _ in module.named_modules() if name.endswith(".experts")
    )
    return [
        name
        for name, layer in module.named_modules()
        if type(layer) is torch.nn.Linear
        and layer is not module.get_output_embeddings()
        and not (mixtures and name.startswith(mixtures))
    ]
