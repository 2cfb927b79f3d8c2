"""Training state of all ranks: each rank saves and loads its shards, with any number of ranks.

It contains what training changes: the trained parameters (all, or the adapter's), the optimizer's moments,
the position in the learning-rate schedule, the same of the critic, the adaptive KL coefficient, the count of
non-finite gradients, and the random number generators of every rank.

Laws: settings (learning rate, schedule, weight decay) are not part of it, so that a resumed run may change
them. No rank ever holds more than its shard of the model and of the optimizer.

Names: `policy/model/PARAMETER`, `policy/optimizer/PARAMETER/MOMENT`, the same of `critic`, `random/RANK/...`
and the document `plain`. With several models, each has all of these after its name and a slash.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raylight.errors import CheckpointError
from raylight.learner.model.fsdp import RaylightEngine
from raylight.learner.model.muon import MUON_MOMENT, MuonWithAdamW
from raylight.learner.state.state_files import StateReader, Tensors, document, parse_document
from raylight.learner.updates.policy_set import PolicySet
from raylight.learner.updates.trained_model import TrainedModel

PLAIN = "plain"
"""Name of the document with the numbers that are the same on all ranks."""


def collect(policy: TrainedModel | PolicySet) -> Tensors:
    """Return this rank's part of the training state: the live tensors, which training changes. With several
    models they are copies, with the model's name before each name."""
    if isinstance(policy, PolicySet):
        return Tensors(
            {
                f"{name}/{key}": tensor.clone()
                for name in policy.policies
                for key, tensor in collect(policy.use(name)).items()
            }
        )
    rank, tensors = dist.get_rank(), Tensors()
    for engine_name, engine in policy.engines.items():
        for name, param in _trained(engine).items():
            tensors[f"{engine_name}/model/{name}"] = param.detach()
            for moment, value in engine.optimizer.state.get(param, {}).items():
                tensors[f"{engine_name}/optimizer/{name}/{moment}"] = value
    tensors |= {f"random/{rank}/{name}": value for name, value in _random_state().items()}
    plain = {
        "ranks": dist.get_world_size(),
        "updates": {name: engine.lr_scheduler.last_epoch for name, engine in policy.engines.items()},
        "progress": policy.progress(),
    }
    return tensors | {PLAIN: document(plain)}


def load(policy: TrainedModel | PolicySet, url: str, group: object = None) -> None:
    """Load a training state into the policy. A collective.

    The random number generators continue if the state has as many ranks as there are now; otherwise each rank
    gets a new seed.

    Args:
        url: folder or URL of the state's content.
        group: ranks with a backend for CPUs; None for the default group.

    Raises:
        CheckpointError: the state belongs to another model, or was written by another version of raylight.
        OSError: the state cannot be read.
    """
    reader = StateReader(url, group)
    if not isinstance(policy, PolicySet):
        _load(policy, reader)
        return
    saved = sorted(name.removesuffix(f"/{PLAIN}") for name in reader.tensors if _is_of_model(name))
    if saved != sorted(policy.policies):
        raise CheckpointError(
            f"the training state has the models {', '.join(saved) or 'of a run with one'}, and this run "
            f"{', '.join(sorted(policy.policies))}; resume with the same models"
        )
    for name in policy.policies:
        _load(policy.use(name), reader, f"{name}/")


def _load(policy: TrainedModel, reader: StateReader, prefix: str = "") -> None:
    """Load a model from the state.

    Args:
        prefix: of the names of its tensors.
    """
    if prefix + PLAIN not in reader.tensors:
        raise CheckpointError(
            "the training state is of a run with several models; resume with the same models"
        )
    plain = reader.read_document(prefix + PLAIN)
    if sorted(plain["updates"]) != sorted(policy.engines):
        raise CheckpointError(
            f"the training state contains {sorted(plain['updates'])}, but this algorithm trains "
            f"{sorted(policy.engines)}; resume with an algorithm that "
            f"{'has a' if 'critic' in plain['updates'] else 'has no'} critic"
        )
    tensors, continues = Tensors(), plain["ranks"] == dist.get_world_size()
    generators = _random_state() if continues else {}
    for name, engine in policy.engines.items():
        part = prefix + name
        tensors |= _parameters(reader, part, engine) | _moments(reader, part, engine)
    for name in generators:
        if (
            full_name := f"{prefix}random/{dist.get_rank()}/{name}"
        ) in reader.tensors:  # "cuda" may be missing
            generators[name] = tensors[full_name] = reader.empty(full_name)
    reader.read(tensors)
    for name, engine in policy.engines.items():
        engine.place_optimizer()
        _seek_schedule(engine, plain["updates"][name])
    policy.restore_progress(plain["progress"])
    if continues:
        _set_random_state(generators)
    else:
        _seed(policy.version * dist.get_world_size() + dist.get_rank())


def _is_of_model(name: str) -> bool:
    """Return True for the name of a model's document, in the state of several models."""
    return name.endswith(f"/{PLAIN}") and name.count("/") == 1


def load_weights(engine: RaylightEngine, url: str, model: str = "") -> None:
    """Load the trained parameters of the policy, without its optimizer. A collective.

    Args:
        model: name of the policy in a run with several models; empty if there is one.

    Raises:
        CheckpointError, OSError: as for `load`.
    """
    reader = StateReader(url)
    reader.read(_parameters(reader, f"{model}/policy" if model else "policy", engine))


def _parameters(reader: StateReader, engine_name: str, engine: RaylightEngine) -> Tensors:
    """Return the trained parameters by their names in the state.

    Raises:
        CheckpointError: the state has other ones.
    """
    prefix, trained = f"{engine_name}/model/", _trained(engine)
    shapes = {name: tuple(param.shape) for name, param in trained.items()}
    saved = reader.shapes(prefix)
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
    return {prefix + name: param.detach() for name, param in trained.items()}


def _moments(reader: StateReader, engine_name: str, engine: RaylightEngine) -> Tensors:
    """Give the optimizer moments to read into, and return them by their names in the state.

    A parameter without moments in the state, which never had a gradient, has none afterwards.
    """
    prefix, tensors = f"{engine_name}/optimizer/", Tensors()
    saved: dict[str, list[str]] = {}
    for full_name in reader.shapes(prefix):
        name, _, moment = full_name.rpartition("/")
        saved.setdefault(name, []).append(moment)
    optimizer = engine.optimizer
    was_muon = any(MUON_MOMENT in moments for moments in saved.values())
    if saved and was_muon != isinstance(optimizer, MuonWithAdamW):
        was, now = ("muon", "adamw") if was_muon else ("adamw", "muon")
        raise CheckpointError(
            f"the training state has the moments of optimizer={was!r}, and the {engine_name} has "
            f"optimizer={now!r}; resume with optimizer={was!r}, or start from the model that was saved"
        )
    for name, param in _trained(engine).items():
        optimizer.state.pop(param, None)
        for moment in saved.get(name, ()):
            value = reader.empty(f"{prefix}{name}/{moment}", like=param.detach())
            optimizer.state[param][moment] = tensors[f"{prefix}{name}/{moment}"] = value
    return tensors


def _seek_schedule(engine: RaylightEngine, updates: int) -> None:
    """Set the learning-rate schedule of the settings to its position after `updates` updates."""
    scheduler = engine.lr_scheduler
    rates = [
        base * shape(updates) for base, shape in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    position = {"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | position)


def _trained(engine: RaylightEngine) -> dict[str, torch.nn.Parameter]:
    return {name: param for name, param in engine.module.named_parameters() if param.requires_grad}


def _random_state() -> Tensors:
    """Return the state of this process's generators."""
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    plain = {"numpy": [kind, keys.tolist(), *rest], "python": random.getstate()}
    state = {"torch": torch.get_rng_state(), PLAIN: document(plain)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Tensors) -> None:
    """Restore the generators from what `_random_state` returned."""
    plain = parse_document(state[PLAIN])
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
