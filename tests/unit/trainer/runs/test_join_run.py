"""Roles of a process, and what of them is refused before anything starts."""

import asyncio
import json
from typing import Any

import pytest
from ray.exceptions import RayActorError
from rich.console import Console

import raylight as rl
from raylight.config import RunnerConfig
from raylight.errors import ConfigError, RunnerLostError
from raylight.quickstart.agent import adder
from raylight.runner.actor import RunnerPayload
from raylight.trainer.output.displays.lines import SilentDisplay
from raylight.trainer.runs import join_run
from raylight.trainer.runs.join_run import RemoteRunnerProcess, check_joinable
from raylight.trainer.spec.arguments import TrainerArguments


def test_the_role_is_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (rl.Trainer().role, rl.Trainer().run_name, rl.Trainer().runner.external) == ("both", None, False)
    monkeypatch.setenv("RAYLIGHT_RUN", "a")
    assert rl.Trainer().run_name is None, "a run of one process does not need it"
    monkeypatch.setenv("RAYLIGHT_ROLE", "algorithm")
    trainer = rl.Trainer(n_runners=3)
    assert (trainer.role, trainer.run_name, trainer.runner.external, trainer.runner.n) == (
        "algorithm",
        "a",
        True,
        3,
    )
    trainer = rl.Trainer(role="runner", run_name="b")
    assert (trainer.role, trainer.run_name, trainer.runner.external) == ("runner", "b", False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": "driver"}, "both, algorithm, runner"),
        ({"run_name": "x"}, "give a role"),
        ({"role": "both", "run_name": "x"}, "role"),
    ],
)
def test_wrong_roles(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.Trainer(**arguments)


def test_a_runner_needs_a_name_and_an_agent() -> None:
    with pytest.raises(ConfigError, match="RAYLIGHT_RUN"):
        rl.Trainer(role="runner").fit("raylight.quickstart.agent:adder")
    with pytest.raises(ConfigError, match="agent is None; give a function"):
        rl.Trainer(role="runner", run_name="x").fit([1, 2, 3])


def test_a_cluster_of_its_own_cannot_be_joined() -> None:
    with pytest.raises(ConfigError, match="ray start --head"):
        check_joinable("x", owns_cluster=True)


def test_the_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    from command_runner import CliRunner

    from raylight.cli import app

    shown = CliRunner().invoke(app, ["runner", "--help"]).output
    assert "--run" in shown
    assert json.dumps("AGENT")[1:-1] in shown


class EndingRun:
    """Rendezvous and pool of a run whose runners cannot start, because it is ending or for another reason."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.failed = asyncio.Event()
        self.wait_for_end = self

    async def remote(self) -> None:
        await self.ended.wait()
        raise RayActorError

    async def start(self) -> None:
        self.failed.set()
        raise RunnerLostError("the runners did not start")


async def test_runners_that_cannot_start_because_the_run_ends_end_with_it() -> None:
    process = RemoteRunnerProcess("a", RunnerPayload(adder), RunnerConfig(), TrainerArguments())
    run = EndingRun()
    working = asyncio.create_task(process._work_until_end(run, run, SilentDisplay(Console())))
    await run.failed.wait()
    run.ended.set()
    assert await working


async def test_runners_that_cannot_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_run, "END_TIMEOUT_S", 0.01)
    process = RemoteRunnerProcess("a", RunnerPayload(adder), RunnerConfig(), TrainerArguments())
    run = EndingRun()
    with pytest.raises(RunnerLostError, match="did not start"):
        await process._work_until_end(run, run, SilentDisplay(Console()))
