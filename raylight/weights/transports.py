"""Registry of the transports of weights, and the choice of one.

A transport is one row of `TRANSPORTS`, or a user's transport, named by its dotted name
`package.module:transport`: an object with the attributes of `Transport`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from raylight.components import import_dotted_name
from raylight.config import EngineConfig, LearnerConfig
from raylight.errors import ConfigError
from raylight.weights.protocol import (
    SenderSettings,
    SyncClient,
    WeightReceiver,
    WeightSender,
    WeightStream,
)

WHERE = "EngineConfig.weight_transfer"


@dataclass(frozen=True)
class Transport:
    """A way in which weights travel.

    Attributes:
        sender: dotted name of the learners' side, a function or class that is called as
            `sender(SenderSettings, SyncClient, WeightStream)` and returns a `WeightSender`.
        backend: name of vLLM's backend for the engines' side.
        receiver: dotted name of the side of engines other than vLLM, which is called without arguments and
            returns a `WeightReceiver`. None: only vLLM can receive.
        needs_gpu: True if learners and engines must have GPUs.
        during_updates: True if the learners' side uses no connections of their updates, and can send a
            snapshot meanwhile.
    """

    sender: str
    backend: str
    receiver: str | None = None
    needs_gpu: bool = True
    during_updates: bool = True


TRANSPORTS: dict[str, Transport] = {
    "gloo": Transport(
        "raylight.weights.gloo:GlooSender",
        "gloo",
        "raylight.weights.gloo:GlooReceiver",
        needs_gpu=False,
    ),
    "nccl": Transport("raylight.weights.vllm_senders:open_nccl", "nccl"),
    # vLLM's side of these two exchanges handles over the learners' default group
    "ipc": Transport("raylight.weights.vllm_senders:open_ipc", "ipc", during_updates=False),
    "sharded_rdt": Transport(
        "raylight.weights.vllm_senders:open_sharded_rdt", "sharded_rdt", during_updates=False
    ),
}


def find_transport(name: str) -> Transport:
    """Return a transport by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    if ":" not in name and "." not in name:
        known = ["auto", *TRANSPORTS]
        nearest = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known)
        raise ConfigError(
            f"{WHERE}: there is no transport {name!r}; there are: {nearest}, or the dotted name of one, "
            "'package.module:transport'"
        )
    transport = import_dotted_name(name, WHERE)
    if not isinstance(transport, Transport):
        raise ConfigError(f"{WHERE}: {name} is not a raylight.weights.transports.Transport")
    return transport


def choose_transport(
    engine: EngineConfig, learner: LearnerConfig, workers: int, vllm_transfer: bool, during_updates: bool
) -> str:
    """Resolve `engine.weight_transfer` to the name of a transport that engines and learners support.

    Args:
        engine: its `kind` is resolved already.
        workers: most workers that all replicas may have.
        vllm_transfer: the engine receives weights by vLLM's backends.
        during_updates: weights are sent while the next update runs.

    Raises:
        ConfigError: the transport is unknown, or does not fit engine or learners.
    """
    name, on_gpus = engine.weight_transfer, bool(engine.num_gpus and learner.num_gpus)
    if name == "auto":
        name = _fastest(engine, learner, workers) if vllm_transfer and on_gpus else "gloo"
        return "gloo" if during_updates and not TRANSPORTS[name].during_updates else name
    transport = find_transport(name)
    if not vllm_transfer and transport.receiver is None:
        raise ConfigError(
            f"{WHERE}={name!r} is a backend of vLLM, and the engine is {engine.kind!r}; leave it out, or set "
            "engine.kind to 'vllm'"
        )
    if transport.needs_gpu and not on_gpus:
        raise ConfigError(
            f"{WHERE}={name!r} needs GPUs on both sides: engine.num_gpus is {engine.num_gpus:g} and "
            f"learner.num_gpus is {learner.num_gpus:g}; leave it out, or set it to 'gloo'"
        )
    if during_updates and not transport.during_updates:
        raise ConfigError(
            f"{WHERE}={name!r} cannot send weights during updates, as max_staleness needs; leave it out, "
            "or set max_staleness=0"
        )
    return name


def _fastest(engine: EngineConfig, learner: LearnerConfig, workers: int) -> str:
    """Return the transport between vLLM and learners on GPUs.

    ipc needs a learner on the GPU of every worker, and nccl a GPU for each process.
    """
    if engine.num_gpus >= 1 or (workers == 1 and learner.num_gpus >= 1):
        return "nccl"
    fits_beside_learner = learner.num_gpus < 1 and engine.num_gpus + learner.num_gpus <= 1
    return "ipc" if fits_beside_learner and workers <= learner.n else "gloo"


def check_more_workers(engine: EngineConfig, learner: LearnerConfig, before: int, workers: int) -> None:
    """Check that the transport which was chosen for fewer workers also reaches more.

    Args:
        before, workers: numbers of workers of all replicas, until now and from now on.

    Raises:
        ConfigError: it does not.
    """
    name = engine.weight_transfer
    if workers > before and name == _fastest(engine, learner, before) != _fastest(engine, learner, workers):
        raise ConfigError(
            f"{WHERE}={name!r} was chosen for {before} worker(s) of {engine.num_gpus:g} GPUs, and does not "
            f"reach {workers}; start the run again with more replicas, or with engine.weight_transfer='gloo'"
        )


def open_sender(
    name: str, settings: SenderSettings, client: SyncClient, source: WeightStream
) -> WeightSender:
    """Open the learners' side of a transfer with all engines. A collective of the learner ranks."""
    return import_dotted_name(find_transport(name).sender, WHERE)(settings, client, source)


def vllm_backend(name: str) -> str:
    """Return the name of vLLM's backend; "auto", which an engine without learners has, counts as gloo."""
    return find_transport("gloo" if name == "auto" else name).backend


def make_receiver(name: str) -> WeightReceiver:
    """Return the side of an engine other than vLLM; "auto" as for `vllm_backend`."""
    dotted = find_transport("gloo" if name == "auto" else name).receiver
    assert dotted is not None, "choose_transport has refused it"
    return import_dotted_name(dotted, WHERE)()
