"""Support example: the tickets, the service against a scripted server, and three steps."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example_modules import example_module, run_copy
from ray_cluster import free_port
from run_output import metric_rows

import raylight as rl
from raylight.cli.examples import example_folders
from raylight.experience.batches.demonstrations import Demonstration


def test_the_demonstrations_name_the_team_of_each_ticket() -> None:
    demonstrations = example_module("support", "demonstrations").demonstrations
    desk = json.loads((example_folders()["support"] / "tickets.json").read_text())
    shown = set()
    for number, messages in zip(range(300), demonstrations(0), strict=False):
        Demonstration.parse(messages, str(number))
        system, user, answer = (message["content"] for message in messages)
        assert system == desk["system"]
        assert user.partition(": ")[2] in desk["teams"][answer]
        shown.add(answer)
    assert shown == desk["teams"].keys()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is missing")
def test_the_service_is_a_program_of_node() -> None:
    program = example_folders()["support"] / "agent.mjs"
    done = subprocess.run(["node", "--check", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_run_ends_with_the_service() -> None:
    run_service = example_module("support", "service").run_service
    command = [sys.executable, "-S", "-c"]
    ends = pytest.raises(SystemExit, match="ended with code 3; its message is above")
    with ends, run_service([*command, "raise SystemExit(3)"], {}):
        time.sleep(60)
    with run_service([*command, "import time; time.sleep(60)"], {}):
        pass


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("npm") is None, reason="node or npm is missing")
def test_three_steps_with_rewards_that_come_later(tmp_path: Path) -> None:
    out, port = tmp_path / "out", str(free_port())
    run_copy("support", tmp_path, "--steps", "3", "--port", port, "--cpu", "--output-dir", str(out))
    rows = metric_rows(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum("learner/grad_norm" in row for row in rows) == 3
    assert rows[-1]["sessions/late_used"] > 0
    assert {row["ledger/unaccounted"] for row in rows} == {0}
    finished = [item for item in rl.read_rollouts(out / "store.db") if item.reward is not None]
    assert {"order", "problem"} == finished[0].rollout.input.keys()
