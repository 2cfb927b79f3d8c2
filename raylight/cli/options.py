"""Options that several commands of the command line share."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from raylight.types import JsonObject

Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16"])
"""Values of `--dtype`."""
TASKS = "a .jsonl, .json or .parquet file, or the dotted name of a list or of a function that returns one."
ENGINE = typer.Option(
    help="Inference engine: auto (by what is installed), transformers, vllm, upstream, or the dotted name of "
    "an engine class, package.module:Engine."
)
RUNNERS = typer.Option(min=1, help="Number of runner actors, which execute the agent.")
MODEL = typer.Option(help="Model folder, name in the local cache, or the upstream's name.")
DATA = typer.Option(help=f"Tasks: {TASKS}")

AgentName = Annotated[
    str, typer.Argument(help="package.module:agent, or path/to/file.py:agent.", metavar="AGENT")
]
ModelName = Annotated[str, MODEL]
Engine = Annotated[str, ENGINE]
Replicas = Annotated[int, typer.Option(min=1, help="Number of engine replicas.")]
ReplicaCpus = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="CPUs of a replica, which computes with as many threads; by default a model above ten million "
        "parameters has all cores.",
    ),
]
ReplicaGpus = Annotated[
    float | None,
    typer.Option(min=0, help="GPUs of a replica; by default one, or a part, if the cluster has some."),
]
Precision = Annotated[
    Dtype | None, typer.Option(help="Precision of the model; by default bfloat16 on a GPU, else float32.")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="Maximum length of prompt and response together, in tokens; by default the model's on a GPU, at "
        "most 16384, else 2048.",
    ),
]
StartTimeout = Annotated[float, typer.Option(min=1, help="Deadline for starting, in seconds.")]
Runners = Annotated[int, RUNNERS]
Port = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="HTTP port of the model; by default 8000, or any free port."),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Address of the Ray cluster, host:port; `local` starts one that ends with the command. By "
        "default RAY_ADDRESS, then this machine's cluster, then a new local one."
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting by its dotted name; may be repeated."),
]
Ui = Annotated[bool, typer.Option("--ui", help="Show the run in the browser while it goes on.")]


def given_options(**options: object) -> JsonObject:
    """Return the options that were given; settings have defaults for the others, which follow the cluster."""
    return {name: value for name, value in options.items() if value is not None}


def import_from_here() -> None:
    """Make agents importable that are files of the current directory."""
    sys.path.insert(0, "")


def apply_assignments(assignments: list[str] | None, settings: JsonObject) -> None:
    """Apply `--set` options to settings whose top-level keys are the sections that the command has."""
    from raylight.trainer.spec.assignments import apply_assignment

    for text in assignments or ():
        apply_assignment(settings, text, sections=list(settings))
