"""The page of commands lists all of them."""

import re
from pathlib import Path

from typer.main import get_command

from raylight.cli.commands import app

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_each_command_is_listed() -> None:
    listed = re.findall(r"^\| `raylight ([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == list(get_command(app).commands)  # type: ignore[attr-defined]
