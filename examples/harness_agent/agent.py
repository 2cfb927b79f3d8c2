"""The agent: mini-swe-agent with a shorter prompt, judged by the tests of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import raylight as rl

FOLDER = Path(__file__).resolve().parent
COMMAND = ["mini", "-c", str(FOLDER / "mini.yaml"), "-c", "{home}/mini.yaml", "-o", "{home}/trajectory.json"]
"""The preset's command with a shorter prompt."""
CLIENT = {"PYTHONPATH": str(FOLDER / "client")}
"""Variables of the harness, with which it finds the class of its model."""


def tests_of(task: dict[str, Any]) -> dict[str, str]:
    return task["tests"]


def make_agent() -> rl.CommandAgent:
    """Return the harness, judged by the tests of a task."""
    return rl.CommandAgent(
        COMMAND,
        preset="mini-swe-agent",
        reward=rl.harnesses.RewardCommand(["python3", "check.py"], files=tests_of, timeout_s=30),
        timeout_s=300,
        scores_failures=True,
        max_output_tokens=64,
        env=CLIENT,
    )
