"""The repair that harnesses are tested with, and the harnesses of this machine."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripted_repairer import TIMEOUT_S

import raylight as rl
from raylight.harnesses.presets import PRESETS

TASK = {
    "prompt": "total in shop.py returns a - b. It must return a + b.",
    "files": {"shop.py": "def total(a, b):\n    return a - b\n"},
}
TESTS = {"check.py": "from shop import total\n\nassert total(7, 2) == 9\n"}
REPAIR = "sed -i 's|a - b|a + b|' shop.py"


def needs(preset: str) -> None:
    """Skip a test without the program of a preset; with RAYLIGHT_REQUIRE_HARNESSES=1 it fails."""
    program = PRESETS[preset].command[0]
    if shutil.which(program) is None:
        if os.environ.get("RAYLIGHT_REQUIRE_HARNESSES") == "1":
            raise pytest.UsageError(f"RAYLIGHT_REQUIRE_HARNESSES=1, but there is no program {program}")
        pytest.skip(f"{program} is not installed: {PRESETS[preset].install}")


def agent_of(preset: str, **options: Any) -> rl.CommandAgent:
    """Return a harness that is judged by `TESTS`."""
    judge = rl.harnesses.RewardCommand(["python3", "check.py"], files=TESTS)
    settings = {"timeout_s": TIMEOUT_S, "max_output_tokens": 1024, **options}
    return rl.CommandAgent(preset=preset, reward=judge, **settings)


def installation(preset: str) -> tuple[str, list[str]]:
    """Return the folder of a preset's program, and all folders that a sandbox must be able to read for it."""
    found = Path(str(shutil.which(PRESETS[preset].command[0])))
    folders = {found.parent}
    for path in found.resolve().parents:
        if path.name == "node_modules":
            folders.add(path)
        elif (settings := path / "pyvenv.cfg").exists():  # a virtual environment needs its Python too
            home = re.search(r"^home = (.*)$", settings.read_text(), re.MULTILINE)
            folders |= {path, Path(home[1]).parent} if home else {path}
    return str(found.parent), sorted(str(path) for path in folders if not path.is_relative_to("/usr"))
