"""Checks and defaults of a server that learns."""

from pathlib import Path
from typing import Any

import pytest
from command_runner import CliRunner

import raylight as rl
from raylight.cli import app
from raylight.errors import ConfigError
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.online_trainer import OnlineTrainer, online_algorithm

KEY = "a-long-enough-key-0123456789"


def trainer(folder: Path, settings: dict[str, Any] | None = None, **arguments: Any) -> OnlineTrainer:
    algorithm = online_algorithm(STARTER_MODEL, settings or {})
    return OnlineTrainer(**{"api_key": KEY, "algorithm": algorithm, "output_dir": folder} | arguments)


def test_the_run_of_a_server(tmp_path: Path) -> None:
    online = trainer(tmp_path, {"rollout": {"max_turns": 4}, "lr": 1e-4}, sessions={"max_open": 5})
    settings = online.plan_sessions().settings
    assert (settings.secret, settings.agents.max_open) == (KEY, 5)
    assert (settings.serving.route, settings.serving.session_rules.group_size) == ("/", 1)
    algorithm = settings.training.algorithm
    assert isinstance(algorithm, rl.algorithms.ReinforcePlusPlus)
    assert (algorithm.lr, algorithm.max_staleness, algorithm.stale) == (1e-4, 2, "mask")
    assert (algorithm.rollout.max_turns, algorithm.rollout.unresponsive_seconds) == (4, 60.0)
    assert algorithm.rollout.timeout_seconds is None
    assert online.plan_sessions().total_steps == 0  # the displays count down no endless training
    assert trainer(tmp_path, {"n_steps": 3}).plan_sessions().total_steps == 3
    patient = trainer(tmp_path, engine={"start_timeout_s": 900.0}).plan_sessions().settings
    assert patient.runner.start_timeout_s == 900.0, "the start of Ray waits as long, too"


def test_groups_of_sessions(tmp_path: Path) -> None:
    given = {"name": "GRPO", "group_size": 4}
    algorithm = online_algorithm(STARTER_MODEL, given, sessions_per_step=32, lease_s=5)
    assert (algorithm.tasks_per_step, algorithm.rollout.unresponsive_seconds) == (8, 5)
    online = trainer(tmp_path, given)
    assert online.plan_sessions().settings.serving.session_rules.group_size == 4
    with pytest.raises(ConfigError, match="30 is not a multiple of the group size 4"):
        online_algorithm(STARTER_MODEL, given, sessions_per_step=30)


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({}, {"api_key": "short"}, "5 characters"),
        ({}, {"learner": {"kind": "local"}}, "local learner"),
        ({"max_staleness": 0, "stale": "wait"}, {}, "algorithm.max_staleness to 1 or more"),
        ({"stale": "wait"}, {}, "algorithm.stale to drop or mask"),
        ({"name": "ReMax"}, {}, "greedy rollout"),
        ({"name": "Baseline"}, {}, ""),
        ({"rollout": {"max_turns": 1, "truncated": "fail"}}, {}, "truncated to score or mask"),
        ({"name": "Nope"}, {}, "there is no 'Nope'"),
        ({}, {"sessions": {"max_opne": 3}}, "max_open"),
        ({}, {"group_reward": len}, "group_reward would replace the rewards"),
        ({"best": "val/reward", "val_every": 5, "patience": 2}, {}, "nothing reads patience"),
        ({}, {"adapter": rl.TraceToTriplet()}, "nothing reads adapter"),
    ],
)
def test_wrong_settings(
    settings: dict[str, Any], arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, settings, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lease", "5"], "nothing reads --lease without --learn"),
        (["--resume", "--output-dir", "x"], "nothing reads --output-dir, --resume without --learn"),
        (["--learn", "--name", "x"], "nothing reads --name with --learn"),
        (["--learn", "--api-key", "short"], "at least 16"),
        (["--learn", "--set", "runner.n=1"], "there is no section 'runner'"),
        (["--learn", "--set", "algorithm.rollout=5"], "rollout"),
        (
            ["--learn", "--sessions-per-step", "8", "--set", "algorithm.tasks_per_step=4"],
            "--sessions-per-step sets algorithm.tasks_per_step, which is given too",
        ),
        (
            ["--learn", "--lease", "5", "--set", "algorithm.rollout.unresponsive_seconds=9"],
            "--lease sets algorithm.rollout.unresponsive_seconds, which is given too",
        ),
        (["--learn", "--resume"], "give its output_dir"),
        (["--set", "algorithm.lr=1"], "there is no section 'algorithm'"),
    ],
)
def test_wrong_options(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", STARTER_MODEL, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
