"""Harbor's tasks run by a command agent: in processes, in bubblewrap and in a container."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raylight.errors import ConfigError
from raylight.harbor.attempt import mean_rewards
from raylight.harbor.tasks import HarborTasks
from raylight.harnesses.command import CommandAgent
from raylight.runner.outcome import Outcome
from raylight.sandboxes.registry import SandboxSpec
from raylight.semconv import OPERATION_NAME
from raylight.traces.reward_spans import find_final_reward

from ..harbor.test_task_folder import make_task
from .test_workspace import failure, run

AGENT = """
test ! -e ../tests/test.sh && test ! -e /tests/test.sh || exit 9
test -e given.txt && test -n "$OPENAI_API_KEY" || exit 9
echo "$0" > prompt.txt
echo "$ANSWER" > answer.txt
"""
TESTS = """#!/bin/sh
test -z "$OPENAI_API_KEY" || exit 9
grep -q 'Write to .*answer.txt' /app/prompt.txt || exit 9
if test "$(cat /app/answer.txt)" = 42; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def make(folder: Path, image: str = "scratch", toml: str = "") -> HarborTasks:
    make_task(folder, toml, instruction="Write to /app/answer.txt", tests=TESTS)
    (folder / "environment" / "given.txt").write_text("given")
    (folder / "environment" / "Dockerfile").write_text(f"FROM {image}\nWORKDIR /app\nCOPY given.txt .\n")
    return HarborTasks(folder)


def agent(sandbox: str | SandboxSpec, answer: str = "42", **options: Any) -> CommandAgent:
    return CommandAgent(["sh", "-c", AGENT, "{prompt}"], sandbox=sandbox, env={"ANSWER": answer}, **options)


def has_bubblewrap() -> bool:
    trial = ["bwrap", "--unshare-user", "--ro-bind", "/", "/", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(trial, check=False).returncode == 0


SANDBOXES = [
    "process",
    pytest.param("bubblewrap", marks=pytest.mark.skipif(not has_bubblewrap(), reason="needs bubblewrap")),
]


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_any_command_in_a_sandbox_without_images(tmp_path: Path, sandbox: str) -> None:
    (task,) = make(tmp_path / "task")
    assert json.loads(json.dumps(task)) == task
    for answer, reward in (("42", 1.0), ("41", 0.0)):
        outcome, spans = await run(agent(sandbox, answer), task)
        assert (outcome, find_final_reward(spans)) == (Outcome("succeeded"), reward)


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_variables_of_the_dockerfile_yield_to_all_others(tmp_path: Path, sandbox: str) -> None:
    make(tmp_path / "task", toml='[environment]\nenv = {TASK = "task"}\n')
    with (tmp_path / "task" / "environment" / "Dockerfile").open("a") as file:
        file.write('ENV FILE=image TASK=image AGENT=image OPENAI_BASE_URL=image PATH="/x/bin:$PATH"\n')
    (task,) = HarborTasks(tmp_path / "task")
    script = """
    echo "$0" > prompt.txt
    test "$FILE $TASK $AGENT" = "image task agent" && test "$OPENAI_BASE_URL" != image || exit 9
    case $PATH in /x/bin:/*) echo 42 > answer.txt;; esac
    """
    env = {"AGENT": "agent", "TASK": "agent"}
    command = CommandAgent(["sh", "-c", script, "{prompt}"], sandbox=sandbox, env=env)
    outcome, spans = await run(command, task)
    assert (outcome, find_final_reward(spans)) == (Outcome("succeeded"), 1.0)


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_a_container_is_built_from_the_tasks_dockerfile(tmp_path: Path, podman_image: str) -> None:
    (task,) = make(tmp_path / "task", podman_image)
    outcome, spans = await run(agent("podman"), task)
    assert (outcome, find_final_reward(spans)) == (Outcome("succeeded"), 1.0)


async def test_tests_of_their_own_environment_see_the_artifacts(tmp_path: Path) -> None:
    toml = 'artifacts = ["/app/answer.txt", "/app/prompt.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
    (task,) = make(tmp_path / "task", toml=toml)
    outcome, spans = await run(agent("process"), task)
    assert (outcome, find_final_reward(spans)) == (Outcome("succeeded"), 1.0)


STEPS = """
[[steps]]
name = "first"
min_reward = 1
[[steps]]
name = "second"
"""
STEP_TESTS = """#!/bin/sh
if grep -q "$(cat /tests/wanted)" /app/answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
STEP_AGENT = """
test ! -e ../tests/test.sh && test ! -e /tests/test.sh || exit 9
cat given.txt >> seen.txt
echo "$0" >> answer.txt
"""


def make_steps(folder: Path, image: str, instruction: str) -> dict[str, Any]:
    """Write a task of two steps with shared tests; the second step adds a file by its setup."""
    make_task(folder, STEPS, tests=STEP_TESTS)
    (folder / "environment" / "Dockerfile").write_text(f"FROM {image}\nWORKDIR /app\nCOPY given.txt .\n")
    (folder / "environment" / "given.txt").write_text("first ")
    for name, asked in (("first", instruction), ("second", "Write two to /app/answer.txt")):
        step = folder / "steps" / name
        (step / "tests").mkdir(parents=True)
        (step / "instruction.md").write_text(asked)
        (step / "tests" / "wanted").write_text({"first": "one", "second": "two"}[name])
    (folder / "steps" / "second" / "workdir").mkdir()
    setup = "grep -q 'first ' seen.txt && echo second > given.txt\n"
    (folder / "steps" / "second" / "workdir" / "setup.sh").write_text(setup)
    (task,) = HarborTasks(folder)
    return task


def commands(spans: list[Any]) -> int:
    return sum(span.attributes.get(OPERATION_NAME) == "command" for span in spans)


@pytest.mark.parametrize(
    "sandbox",
    [*SANDBOXES, pytest.param("podman", marks=pytest.mark.slow("other sandboxes show the steps"))],
)
async def test_steps_follow_in_one_sandbox(
    tmp_path: Path, sandbox: str, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue("podman_image") if sandbox == "podman" else "scratch"
    agent = CommandAgent(["sh", "-c", STEP_AGENT, "{prompt}"], sandbox=sandbox)
    both = make_steps(tmp_path / "both", image, "Write one to /app/answer.txt")
    outcome, spans = await run(agent, both, timeout=55)
    assert (outcome, find_final_reward(spans)) == (Outcome("succeeded"), 1.0)
    assert commands(spans) == 2
    first = make_steps(tmp_path / "first", image, "Write zero to /app/answer.txt")
    outcome, spans = await run(agent, first, timeout=55)
    assert (outcome, find_final_reward(spans)) == (Outcome("succeeded"), 0.0)
    assert commands(spans) == 1, "the first step missed its min_reward"


def test_the_reward_of_steps_is_the_mean_by_name() -> None:
    assert mean_rewards([1.0, 0.0]) == 0.5
    assert mean_rewards([1.0, {"style": 1.0, "reward": 0.5}]) == {"reward": 0.75, "style": 0.5}


async def test_what_an_agent_left_at_its_limit_is_judged(tmp_path: Path) -> None:
    (task,) = make(tmp_path / "task", toml="[agent]\ntimeout_sec = 0.5")
    slow = CommandAgent(
        ["sh", "-c", AGENT + "sleep 600", "{prompt}"], sandbox="process", env={"ANSWER": "42"}
    )
    outcome, spans = await run(slow, task)
    assert (outcome, find_final_reward(spans)) == (Outcome("succeeded"), 1.0)


async def test_failures_are_counted_and_named(tmp_path: Path) -> None:
    (task,) = make(tmp_path / "task")
    assert (
        "exit status 3" in (await failure(CommandAgent(["sh", "-c", "exit 3"], sandbox="process"), task))[1]
    )
    kind, error = await failure(CommandAgent(["true"], sandbox="process"), task)
    assert (kind, "wrote no /logs/verifier/reward.json" in error) == ("reward", True)
    shutil.rmtree(tmp_path / "task")
    assert "has no task.toml" in (await failure(agent("process"), task))[1]


async def test_a_task_without_a_network_needs_a_sandbox_that_can(tmp_path: Path) -> None:
    (task,) = make(tmp_path / "task", toml='[environment]\nnetwork_mode = "no-network"')
    assert "cannot limit network" in (await failure(agent("process"), task))[1]


def test_an_image_may_come_from_the_task() -> None:
    assert SandboxSpec.parse("podman").image is None
    with pytest.raises(ConfigError, match="podman:python"):
        SandboxSpec.parse("podman").create()
    with pytest.raises(ConfigError, match="has no HAS_IMAGE, workspace"):
        SandboxSpec.parse("raylight.errors.ConfigError")
