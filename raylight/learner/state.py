"""The training state of all ranks: gathered whole on rank 0, and put into a policy of any number of ranks.

It holds what training changes: trained parameters (all of them, or the adapter's), the optimizer's moments, the place in the
learning-rate schedule, the critic's likewise, the adaptive KL coefficient, the count of gradients that were not finite, and the
random numbers of every rank. What settings say (learning rate, schedule, weight decay) is not part of it.
"""

from __future__ import annotations

import random
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from raylight.errors import CheckpointError
from raylight.learner.policy import Policy

FORMAT = 1


def gather(policy: Policy) -> dict[str, Any] | None:
    """The training state in the host's memory on rank 0; None elsewhere. A collective."""
    engines = {"policy": _gather_engine(policy.engine)}
    if policy.critic is not None:
        engines["critic"] = _gather_engine(policy.critic.engine)
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, _random_numbers())
    if dist.get_rank():
        return None
    return {
        "format": FORMAT,
        "engines": engines,
        "random": numbers,
        "plain": {
            "version": policy.version,
            "kl_coef": policy._kl.steered,
            "non_finite": policy._gradients.in_a_row,
        },
    }


def load(policy: Policy, file: IO[bytes] | None) -> None:
    """Continue from a state; `file` is it on rank 0, and is not looked at elsewhere. A collective.

    Random numbers go on where they were if there are as many ranks as before; else each rank draws others.

    Raises:
        CheckpointError: the state is of another model, or another version of raylight wrote it.
    """
    state = (
        torch.load(file, map_location="cpu", weights_only=True)
        if file is not None and dist.get_rank() == 0
        else None
    )
    box = [_outline(state)] if state is not None else [None]
    dist.broadcast_object_list(box)
    outline: Any = box[0]
    if outline["format"] != FORMAT:
        raise CheckpointError(
            f"the training state has format {outline['format']}, and this version of raylight reads {FORMAT}"
        )
    engines = {"policy": policy.engine} | (
        {"critic": policy.critic.engine} if policy.critic is not None else {}
    )
    if engines.keys() != outline["engines"].keys():
        raise CheckpointError(
            f"the training state is of {sorted(outline['engines'])}, and what is trained is {sorted(engines)}"
        )
    for name, engine in engines.items():
        _load_engine(engine, state["engines"][name] if state else outline["engines"][name])
    plain = outline["plain"]
    policy.version, policy._gradients.in_a_row = plain["version"], plain["non_finite"]
    policy._kl.go_on(plain["kl_coef"])
    _set_random_numbers(outline["random"], policy.version)


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    """The state with shapes in place of its large tensors."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shape(part) for name, part in value.items()}
        return value.to("meta") if isinstance(value, torch.Tensor) and value.dim() else value

    return state | {"engines": shape(state["engines"])}


def _gather_engine(engine: Any) -> dict[str, Any]:
    moments = engine.optimizer.state
    trained = _trained(engine)
    return {
        "model": {name: _whole(param) for name, param in trained.items()},
        "optimizer": {
            name: {key: _whole(value) for key, value in moments[param].items()}
            for name, param in trained.items()
            if param in moments
        },
        "updates": engine.lr_scheduler.last_epoch,
    }


def _trained(engine: Any) -> dict[str, torch.nn.Parameter]:
    return {name: param for name, param in engine.module.named_parameters() if param.requires_grad}


def _whole(value: Any) -> Any:
    """All of a tensor on rank 0, in memory of its own."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", copy=True) if dist.get_rank() == 0 else None


@torch.no_grad()
def load_weights(engine: Any, model: dict[str, torch.Tensor]) -> None:
    """Take over trained parameters; they are whole on rank 0, and shapes elsewhere. A collective.

    Raises:
        CheckpointError: they are of another model or another adapter.
    """
    trained = _trained(engine)
    ours = {name: tuple(param.shape) for name, param in trained.items()}
    theirs = {name: tuple(value.shape) for name, value in model.items()}
    if ours != theirs:
        wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise CheckpointError(
            f"the training state is of another model or another adapter: {len(wrong)} parameters differ, such as {wrong[0]} "
            f"({theirs.get(wrong[0], 'not there')} there, {ours.get(wrong[0], 'not there')} here)"
        )
    for name, param in trained.items():
        _local(param).copy_(_local(_share(model[name], param)))


def _load_engine(engine: Any, state: dict[str, Any]) -> None:
    load_weights(engine, state["model"])
    _load_optimizer(engine.optimizer, _trained(engine), state["optimizer"])
    scheduler, updates = engine.lr_scheduler, state["updates"]
    rates = [
        base * shape(updates) for base, shape in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    at = {"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | at)


def _load_optimizer(
    optimizer: Any, trained: dict[str, torch.nn.Parameter], moments: dict[str, dict[str, Any]]
) -> None:
    """Moments of the parameters; the optimizer's own settings stay."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    place = {id(param): index for index, param in enumerate(params)}
    state = {
        place[id(trained[name])]: {
            key: _share(value, trained[name]) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in values.items()
        }
        for name, values in moments.items()
    }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _share(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's share of what rank 0 has whole, laid out as the parameter is."""
    if not isinstance(param, DTensor):
        return whole
    if whole.is_meta:
        whole = torch.empty_like(whole, device="cpu")
    return distribute_tensor(whole, param.device_mesh, param.placements)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _random_numbers() -> dict[str, Any]:
    """This rank's generators; of types that torch.load takes without running code."""
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    numbers = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, keys.tolist(), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        numbers["cuda"] = torch.cuda.get_rng_state()
    return numbers


def _set_random_numbers(of_ranks: list[dict[str, Any]], version: int) -> None:
    rank = dist.get_rank()
    if len(of_ranks) != dist.get_world_size():
        seed = version * dist.get_world_size() + rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return
    numbers = of_ranks[rank]
    torch.set_rng_state(numbers["torch"])
    kind, keys, *rest = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(numbers["python"])
    if torch.cuda.is_available() and "cuda" in numbers:
        torch.cuda.set_rng_state(numbers["cuda"])
