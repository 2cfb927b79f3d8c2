"""Training state of all ranks: gathered in full on rank 0, and loaded into any number of ranks.

It contains what training changes: the trained parameters (all, or the adapter's), the optimizer's moments,
the position in the learning-rate schedule, the same of the critic, the adaptive KL coefficient, the count of
non-finite gradients, and the random number generators of every rank.

Law: settings (learning rate, schedule, weight decay) are not part of it, so that a resumed run may change
them.

`torch.distributed.checkpoint.state_dict` gathers and scatters the tensors. Three things remain to be done
here, because it would change a run: it initialises the moments of an optimizer that has taken no step (with a
step count of 1), so such an optimizer is neither gathered nor loaded; it restores the optimizer's param
groups, so only their parameter names are passed to it; and on a CPU it returns the live tensors, so these are
copied before training goes on.
"""

from __future__ import annotations

import random
from typing import IO, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from raylight.errors import CheckpointError
from raylight.learner.policy import Policy

FORMAT = 1
GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
SCATTER = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
"""Not strict: frozen parameters, and parameters that never had a gradient, are missing from a state."""

T = TypeVar("T")


def gather(policy: Policy) -> dict[str, Any] | None:
    """Return the training state in host memory on rank 0, None on other ranks. A collective."""
    engines = {name: _gather_engine(engine) for name, engine in policy.engines.items()}
    generators: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(generators, _random_state())
    if dist.get_rank():
        return None
    return {"format": FORMAT, "engines": engines, "random": generators, "plain": policy.progress()}


def load(policy: Policy, file: IO[bytes] | None) -> None:
    """Load a training state into the policy. A collective.

    The random number generators continue if the state has as many ranks as there are now; otherwise each rank
    gets a new seed.

    Args:
        file: the state on rank 0; ignored on other ranks.

    Raises:
        CheckpointError: the state is of another model, or was written by another version of raylight.
    """
    state: dict[str, Any] = {}
    if file is not None and dist.get_rank() == 0:
        state = torch.load(file, map_location="cpu", weights_only=True)
    small = _broadcast({name: value for name, value in state.items() if name != "engines"})
    if small["format"] != FORMAT:
        raise CheckpointError(
            f"the training state has format {small['format']}, but this version of raylight reads format "
            f"{FORMAT}; resume with the version that wrote it"
        )
    saved = _broadcast(sorted(state.get("engines", {})))
    if saved != sorted(policy.engines):
        raise CheckpointError(
            f"the training state contains {saved}, but this algorithm trains {sorted(policy.engines)}; "
            f"resume with an algorithm that {'has a' if 'critic' in saved else 'has no'} critic"
        )
    for name, engine in policy.engines.items():
        _load_engine(engine, state["engines"][name] if state else {})
    policy.restore_progress(small["plain"])
    _set_random_state(small["random"], policy.version)


@torch.no_grad()
def load_weights(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """Load the trained parameters. A collective.

    Args:
        weights: full tensors by name, on rank 0; ignored on other ranks.

    Raises:
        CheckpointError: they are of another model or another adapter.
    """
    shapes = {name: tuple(param.shape) for name, param in _trained(engine).items()}
    saved = _broadcast({name: tuple(value.shape) for name, value in weights.items()})
    if shapes != saved:
        differing = sorted(
            name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name)
        )
        first = differing[0]
        raise CheckpointError(
            f"the training state is of another model or another adapter: {len(differing)} parameters differ, "
            f"such as {first} (state: {saved.get(first, 'missing')}, model: {shapes.get(first, 'missing')}); "
            "resume with the same model and lora"
        )
    set_model_state_dict(engine.module, dict(weights), options=SCATTER)


def _gather_engine(engine: Any) -> dict[str, Any]:
    """Return the trained parameters, moments and schedule position of an engine; tensors on rank 0 only."""
    module, optimizer = engine.module, engine.optimizer
    model = get_model_state_dict(module, options=GATHER)
    optimizer_state: Any = {}
    if optimizer.state:
        optimizer_state = get_optimizer_state_dict(module, optimizer, options=GATHER).get("state", {})
    live = _live_storages(engine)
    names = _trained(engine)  # a tied weight has several names in `model`, and one here
    return {
        "model": {name: _detached(model.pop(name), live) for name in names if name in model},
        "optimizer": {
            name: {key: _detached(value, live) for key, value in optimizer_state.pop(name).items()}
            for name in names
            if name in optimizer_state
        },
        "updates": engine.lr_scheduler.last_epoch,
    }


def _load_engine(engine: Any, state: dict[str, Any]) -> None:
    """Load the state of an engine; `state` is empty on ranks other than 0."""
    load_weights(engine, state.get("model", {}))
    _load_optimizer(engine, state.get("optimizer", {}))
    _seek_schedule(engine, _broadcast(state.get("updates", 0)))


def _load_optimizer(engine: Any, moments: dict[str, dict[str, Any]]) -> None:
    """Load the moments of the parameters, and keep the optimizer's own settings."""
    module, optimizer = engine.module, engine.optimizer
    saved = set(_broadcast(list(moments)))
    if saved:
        names = {param: name for name, param in module.named_parameters()}
        groups = [{"params": [names[param] for param in group["params"]]} for group in optimizer.param_groups]
        state: Any = {"state": moments, "param_groups": groups} if dist.get_rank() == 0 else {}
        set_optimizer_state_dict(module, optimizer, state, options=SCATTER)
    for name, param in _trained(engine).items():
        if name not in saved:
            optimizer.state.pop(param, None)


def _seek_schedule(engine: Any, updates: int) -> None:
    """Set the learning-rate schedule of the settings to its position after `updates` updates."""
    scheduler = engine.lr_scheduler
    rates = [
        base * shape(updates) for base, shape in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    position = {"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | position)


def _trained(engine: Any) -> dict[str, torch.nn.Parameter]:
    return {name: param for name, param in engine.module.named_parameters() if param.requires_grad}


def _live_storages(engine: Any) -> set[int]:
    """Return the addresses of the memory that the parameters and moments of this rank use."""
    moments = [value for state in engine.optimizer.state.values() for value in state.values()]
    tensors = [t for t in [*engine.module.parameters(), *moments] if isinstance(t, torch.Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return {t.untyped_storage().data_ptr() for t in local}


def _detached(value: Any, live: set[int]) -> Any:
    """Return a tensor that training does not change, and whose storage contains nothing else."""
    if not isinstance(value, torch.Tensor):
        return value
    value, storage = value.detach(), value.untyped_storage()
    return value.clone() if storage.data_ptr() in live or storage.nbytes() > value.nbytes else value


def _broadcast(value: T) -> T:
    """Return rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def _random_state() -> dict[str, Any]:
    """Return the state of this rank's generators, in types that `torch.load` reads with `weights_only`."""
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, keys.tolist(), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(states: list[dict[str, Any]], version: int) -> None:
    """Restore this rank's generators, or seed them if the number of ranks changed."""
    rank = dist.get_rank()
    if len(states) != dist.get_world_size():
        seed = version * dist.get_world_size() + rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(state["python"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
