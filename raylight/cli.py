"""The command line: `raylight quickstart` and `raylight doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from raylight.errors import RaylightError

app = typer.Typer(
    help="Train existing AI agents with reinforcement learning on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option(help="Where the run's files go.")] = Path("outputs/quickstart"),
    steps: Annotated[int, typer.Option(min=0, help="Training steps of 16 tasks with 8 rollouts each.")] = 25,
    seed: Annotated[int, typer.Option(help="Of task order and sampling.")] = 0,
    learners: Annotated[int, typer.Option(min=1, help="Learner ranks (FSDP2).")] = 1,
    runners: Annotated[int, typer.Option(min=1, help="Runner actors that execute the agent.")] = 2,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="HTTP port of the model; a free one by default.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model folder than the starter model.")] = None,
) -> None:
    """Watch a small model learn to add: offline, on a CPU, in about a minute."""
    import raylight as rl
    from raylight.quickstart import STARTER_MODEL
    from raylight.quickstart.additions import additions
    from raylight.quickstart.agent import adder

    train, val = additions(seed)
    algorithm = rl.GRPO(
        model=model or STARTER_MODEL, n_steps=steps, lr=2e-4, kl_coef=1e-3, val_every=5, val_samples=2
    )  # fmt: skip
    trainer = rl.Trainer(
        algorithm=algorithm, n_runners=runners, n_learners=learners, port=port, output_dir=output_dir, seed=seed
    )  # fmt: skip
    trainer.fit(adder, train, val_dataset=val)


@app.command()
def doctor() -> None:
    """Print what this machine and the cluster offer, and what is missing."""
    from raylight.doctor import examine

    examine()


def main() -> None:
    """Run the command line; a typed error becomes one message and exit code 1."""
    try:
        app()
    except RaylightError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
