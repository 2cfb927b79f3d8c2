"""Support example: the tickets, the service against a scripted server, and three steps."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from example_modules import example_module, run_copy
from ray_cluster import free_port

import raylight as rl
from raylight.experience.demonstrations import Demonstration


def test_the_demonstrations_name_the_team_of_each_ticket() -> None:
    train = example_module("support", "train")
    desk = json.loads((train.HERE / "tickets.json").read_text())
    shown = set()
    for number, messages in zip(range(300), train.demonstrations(0), strict=False):
        Demonstration.parse(messages, str(number))
        system, user, answer = (message["content"] for message in messages)
        assert system == desk["system"]
        assert user.partition(": ")[2] in desk["teams"][answer]
        shown.add(answer)
    assert shown == desk["teams"].keys()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is missing")
def test_the_service_is_a_program_of_node() -> None:
    program = example_module("support", "train").HERE / "agent.mjs"
    done = subprocess.run(["node", "--check", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="node or npm is missing")
def test_three_steps_with_rewards_that_come_later(tmp_path: Path) -> None:
    out, port = tmp_path / "out", str(free_port())
    run_copy("support", tmp_path, "--steps", "3", "--port", port, "--cpu", "--output-dir", str(out))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum("learner/grad_norm" in row for row in rows) == 3
    assert rows[-1]["sessions/late_used"] > 0
    assert {row["ledger/unaccounted"] for row in rows} == {0}
    finished = [item for item in rl.read_rollouts(out / "store.db") if item.reward is not None]
    assert {"order", "problem"} == finished[0].rollout.input.keys()
