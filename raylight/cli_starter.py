"""The command `raylight starter`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from raylight.cli_options import Assignments, import_from_here


def starter(
    task: Annotated[
        str | None,
        typer.Option(
            help="add, calculator, reasoning_gym:NAME, gymnasium:ID, textarena:ID, harness:FORMAT, or the "
            "dotted name of a function that yields demonstrations, package.module:function."
        ),
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(help="Demonstrations in place of a task: a .jsonl file, each line with messages."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the model.")] = Path("outputs/starter"),
    size: Annotated[
        str | None, typer.Option(help="small, medium or large; by default what the task needs.")
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Part of the conversations whose answers are all right; by default what the task needs.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of demonstrations, weights and batches.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps at most; by default what the task needs.")
    ] = None,
    assignments: Assignments = None,
) -> None:
    """Make a small model that answers about half of a task's questions, so that training shows on a CPU.

    --set takes a setting of the task: max_terms=2 for reasoning_gym:chain_sum.
    """
    from raylight.starter.make import make_starter
    from raylight.trainer.spec.assignments import apply_assignment

    import_from_here()
    settings: dict[str, Any] = {"task": {}}
    for text in assignments or ():
        apply_assignment(settings, f"task.{text}", sections=["task"])
    make_starter(
        task,
        output,
        messages=messages,
        options=settings["task"],
        size=size,
        accuracy=accuracy,
        seed=seed,
        steps=steps,
    )
