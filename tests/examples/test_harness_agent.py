"""The example that trains mini-swe-agent on a toy repository."""

import math
import re
import shutil
from pathlib import Path

import pytest
import yaml
from example_modules import example_module
from jinja2 import Template
from programs import run_python
from run_output import metric_rows

from examples.starter_models.tasks.repairs import harness

ROOT = Path(__file__).parents[2]
agent = example_module("harness_agent", "agent")


def test_the_starter_reads_what_the_harness_sends() -> None:
    settings = yaml.safe_load((agent.FOLDER / "mini.yaml").read_text())
    demonstration = next(harness("bash", 0))
    system, user, answer = (message["content"] for message in demonstration["messages"])
    assert settings["agent"]["system_template"] == system
    assert Template(settings["agent"]["instance_template"]).render(task=user) == user
    (command,) = re.findall(settings["model"]["action_regex"], answer, re.DOTALL)
    assert command.startswith("sed -i")


def test_the_agent_is_the_preset_with_a_shorter_prompt() -> None:
    assert agent.make_agent().display_name == "CommandAgent mini-swe-agent"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_harness_learns_to_pass_the_tests(tmp_path: Path) -> None:
    if shutil.which("mini") is None:
        pytest.skip("mini is not installed: pip install mini-swe-agent mcp")
    program = ROOT / "examples" / "harness_agent" / "train.py"
    run_python(program, "--cpu", "--output-dir", tmp_path, cwd=ROOT, timeout_s=3500, PYTHONPATH=str(ROOT))
    rows = metric_rows(tmp_path)
    before, *_, after = [row for row in rows if "val/reward" in row]
    error = math.hypot(before["val/reward_error"], after["val/reward_error"])
    assert after["val/reward"] - before["val/reward"] > 3 * error, (before, after)
    trained = [row for row in rows if "train/failed" in row]
    assert len(trained) == after["step"]
    assert sum(row["train/failed"] for row in trained) == 0
