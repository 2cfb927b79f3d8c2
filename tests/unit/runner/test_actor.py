"""The payload that runners receive."""

import subprocess
import sys
from pathlib import Path

import pytest

from raylight import components
from raylight.errors import ConfigError
from raylight.runner.actor import RunnerPayload
from raylight.trainer.spec.inputs import as_agent

AGENT = """
import raylight as rl
from . import right


@rl.rollout
def solver(task):
    return right.REWARD
"""
READ = """
import sys
from raylight.runner.actor import RunnerPayload
agent = RunnerPayload.unpickle(sys.stdin.buffer.read()).agent
print(agent.rollout({}, {}, None))
"""


def test_the_agent_of_a_file_is_importable_in_a_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components, "CODE_FOLDERS", folders := [])
    monkeypatch.setattr("raylight.runner.actor.CODE_FOLDERS", folders)
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "a folder" / "payload_agents"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "right.py").write_text("REWARD = 0.25\n")
    (package / "solvers.py").write_text(AGENT)
    pickled = RunnerPayload(as_agent(f"{package}/solvers.py:solver")).pickle()
    done = subprocess.run(
        [sys.executable, "-c", READ], input=pickled, capture_output=True, cwd=tmp_path, check=False
    )
    assert done.stdout.split() == [b"0.25"], done.stderr.decode()


def test_what_cannot_be_sent_is_named() -> None:
    import threading

    lock = threading.Lock()

    def locked(task: object) -> float:
        with lock:
            return 0.0

    with pytest.raises(ConfigError, match=r"cannot be sent to the runners: cannot pickle .*lock"):
        RunnerPayload(as_agent(locked)).pickle()
