"""`raylight tinker`: a server of the Tinker API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raylight.cli.options import (
    Address,
    Assignments,
    Engine,
    MaxModelLen,
    ModelName,
    Precision,
    ReplicaCpus,
    ReplicaGpus,
    Replicas,
    StartTimeout,
    apply_assignments,
    given_options,
    import_from_here,
)
from raylight.types import JsonObject


def tinker(
    model: ModelName,
    engine: Engine = "auto",
    name: Annotated[
        str | None, typer.Option(help="Name of the model that clients ask for; by default --model as given.")
    ] = None,
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the checkpoints, which outlive the server.")
    ] = Path("outputs/tinker"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port of the API; 0: any free one.")
    ] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TINKER_API_KEY",
            help="API key that clients must send; it begins with tml-. By default any on loopback, and a new "
            "one, which is shown, elsewhere.",
        ),
    ] = None,
    max_models: Annotated[int, typer.Option(min=1, help="Adapters that may be in training at a time.")] = 8,
    max_samplers: Annotated[int, typer.Option(min=1, help="Adapters that the engines have at a time.")] = 8,
    max_rank: Annotated[int, typer.Option(min=1, max=1024, help="Highest rank of an adapter.")] = 128,
    session_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without a heartbeat after which a client's session ends.")
    ] = 300.0,
    stable_reinforce: Annotated[
        str | None,
        typer.Option(
            metavar="LOSS",
            help="Loss that trains requests for stable_reinforce, which only Tinker's own service defines: "
            "importance_sampling, ppo, cispo or dro. Without it they are rejected.",
        ),
    ] = None,
    learner_cpus: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="CPUs of the trainer, which computes with as many threads; by default the cores are shared.",
        ),
    ] = None,
    learner_gpus: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="GPUs of the trainer; by default one, or a part of one, if the cluster has some.",
        ),
    ] = None,
    replicas: Replicas = 1,
    num_cpus: ReplicaCpus = None,
    num_gpus: ReplicaGpus = None,
    dtype: Precision = None,
    max_model_len: MaxModelLen = None,
    start_timeout: StartTimeout = 600.0,
    address: Address = None,
    assignments: Assignments = None,
) -> None:
    """Serve the Tinker API: clients train LoRA adapters of one model and sample from them, until Ctrl-C.

    --set takes engine.NAME, engine.args.NAME for an argument of the engine itself, and tinker.NAME.
    """
    from raylight.config import EngineConfig
    from raylight.errors import ConfigError
    from raylight.tinker.serve import UPSTREAM, TinkerConfig, serve_tinker

    import_from_here()
    settings: JsonObject = {
        "engine": given_options(
            kind=engine,
            replicas=replicas,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            dtype=dtype,
            max_model_len=max_model_len,
            start_timeout_s=start_timeout,
        ),
        "tinker": given_options(
            host=host,
            port=port,
            api_key=api_key,
            output_dir=str(output_dir),
            max_models=max_models,
            max_samplers=max_samplers,
            max_rank=max_rank,
            session_timeout_s=session_timeout,
            stable_reinforce=stable_reinforce,
            learner_cpus=learner_cpus,
            learner_gpus=learner_gpus,
        ),
    }
    apply_assignments(assignments, settings)
    chosen = settings["engine"]
    if isinstance(chosen, dict) and chosen.get("kind") == "upstream":  # before its URL is asked for
        raise ConfigError(UPSTREAM)
    engine_config, config = EngineConfig(**settings["engine"]), TinkerConfig(**settings["tinker"])
    serve_tinker(model, engine_config, config, name=name, address=address)
