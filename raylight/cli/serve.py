"""`raylight serve`: a served model, which learns from sessions with --learn."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from raylight.cli.options import (
    Address,
    Assignments,
    Engine,
    MaxModelLen,
    ModelName,
    Port,
    Precision,
    ReplicaCpus,
    ReplicaGpus,
    Replicas,
    StartTimeout,
    Ui,
    apply_assignments,
    given_options,
    import_from_here,
)
from raylight.errors import ConfigError
from raylight.types import JsonObject

LEARNING = ("algorithm", "learner", "checkpoint", "store")
"""Sections of --set that are read with --learn."""


def serve(
    model: ModelName,
    engine: Engine = "auto",
    name: Annotated[
        str | None, typer.Option(help="Model name that clients send; the folder's by default.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback requires an API key.")
    ] = "127.0.0.1",
    port: Port = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RAYLIGHT_API_KEY", help="API key that clients must send.")
    ] = None,
    replicas: Replicas = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Scale up to this number of replicas under load.")
    ] = None,
    num_cpus: ReplicaCpus = None,
    num_gpus: ReplicaGpus = None,
    dtype: Precision = None,
    max_model_len: MaxModelLen = None,
    url: Annotated[
        str | None, typer.Option(help="Base URL of an upstream model to which requests are forwarded.")
    ] = None,
    upstream_key: Annotated[
        str | None, typer.Option(envvar="RAYLIGHT_UPSTREAM_KEY", help="API key of the upstream model.")
    ] = None,
    start_timeout: StartTimeout = 600.0,
    learn: Annotated[
        bool, typer.Option("--learn", help="Train on the sessions that agents open at /v1/sessions.")
    ] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="With --learn: the run directory; a new one by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --learn: continue the run in output_dir, if it has one.")
    ] = False,
    sessions_per_step: Annotated[
        int | None,
        typer.Option(min=1, help="With --learn: sessions with a reward in a training step; by default 16."),
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="With --learn: seconds without a call until a session expires; by default 60."
        ),
    ] = None,
    max_sessions: Annotated[
        int | None,
        typer.Option(min=1, help="With --learn: sessions that may be open at a time; by default 64."),
    ] = None,
    ui: Ui = False,
    address: Address = None,
    assignments: Assignments = None,
) -> None:
    """Serve a model over the OpenAI and Anthropic APIs, until Ctrl-C.

    --set takes engine.NAME, and engine.args.NAME for an argument of the engine itself.

    With --learn, agents open sessions by POST /v1/sessions, and their rewards
    train the model. --set then also takes algorithm.NAME, learner.NAME,
    checkpoint.NAME and store.NAME; algorithm.name=GRPO chooses an algorithm.
    """
    from raylight.config import EngineConfig
    from raylight.trainer.runs.serve_model import serve_model

    import_from_here()
    settings: JsonObject = {
        "engine": given_options(
            kind=engine,
            host=host,
            port=port,
            replicas=replicas,
            max_replicas=max_replicas,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            dtype=dtype,
            max_model_len=max_model_len,
            url=url,
            api_key=upstream_key,
            start_timeout_s=start_timeout,
        )
    }
    learning = {
        "--output-dir": output_dir,
        "--resume": resume or None,
        "--sessions-per-step": sessions_per_step,
        "--lease": lease,
        "--max-sessions": max_sessions,
        "--ui": ui or None,
    }
    if not learn:
        if given := [option for option, value in learning.items() if value is not None]:
            raise ConfigError(
                f"nothing reads {', '.join(given)} without --learn; leave it out, or add --learn"
            )
        apply_assignments(assignments, settings)
        serve_model(model, EngineConfig(**settings["engine"]), name=name, api_key=api_key, address=address)
        return
    if name is not None:
        raise ConfigError(
            "nothing reads --name with --learn: a session may ask for any model name; leave it out"
        )
    settings |= {section: {} for section in LEARNING}
    apply_assignments(assignments, settings)
    if api_key is None:
        api_key = f"rl-{secrets.token_hex(20)}"
        print(f"the API key is {api_key}")
    from raylight.trainer.online_trainer import OnlineTrainer, online_algorithm

    algorithm = online_algorithm(model, settings.pop("algorithm"), sessions_per_step, lease)
    trainer = OnlineTrainer(
        sessions={} if max_sessions is None else {"max_open": max_sessions},
        api_key=api_key,
        algorithm=algorithm,
        output_dir=output_dir,
        address=address,
        ui=ui,
        **settings,
    )
    trainer.serve(resume="auto" if resume else False)
