"""Make a starter model, from the repository's root: python -m examples.starter_models --task add"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from examples.starter_models.make import make_starter
from examples.starter_models.model import SIZES
from examples.starter_models.tasks.registry import KNOWN
from raylight.errors import RaylightError


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.starter_models",
        description="Make a small model that answers about half of a task's questions.",
    )
    parser.add_argument("--task", help=f"name of a task; {KNOWN}, a function that yields demonstrations")
    parser.add_argument("--messages", type=Path, help="demonstrations in place of a task: a .jsonl file")
    parser.add_argument("--output", type=Path, default=Path("outputs/starter"), help="folder for the model")
    parser.add_argument("--size", choices=SIZES, help="by default what the task needs")
    parser.add_argument(
        "--accuracy", type=float, help="part of the conversations whose answers are all right; at most 1"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of demonstrations, weights and batches")
    parser.add_argument("--steps", type=int, help="training steps at most; by default what the task needs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the task"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = vars(parse(arguments))
    settings = (text.partition("=") for text in args.pop("set"))
    try:
        make_starter(**args, options={name: yaml.safe_load(value) for name, _, value in settings})
    except RaylightError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
