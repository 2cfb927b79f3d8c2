"""The command `raylight`, also as `python -m raylight.cli`."""

from raylight.cli.commands import app, main

__all__ = ["app", "main"]
