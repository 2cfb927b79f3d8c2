"""Agents of verifiers: what is missing is named, and the program runs with a small stand-in."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from shared_services import close_shared_services
from unit_helpers import make_context, make_rollout, until, within

import raylight as rl
from raylight.environments.verifiers import verifiers_agent
from raylight.errors import ConfigError
from raylight.runner.execute import execute
from raylight.runner.outcome import Outcome
from raylight.traces.reward_spans import find_final_reward

STAND_IN = """
import asyncio, os, pathlib
class Record:
    def __init__(self, **fields):
        self.__dict__.update(fields)
def config_type(name):
    return Record
taskset_config_type = harness_config_type = config_type
AgentConfig = SubprocessConfig = EvalClientConfig = SamplingConfig = Record
class Tasks(list):
    def include(self, idx):
        return [self[i] for i in idx if i < len(self)]
def load_taskset(config):
    assert (config.id, config.size) == ("sums", 2)
    print("what a taskset prints is not an answer")
    return Tasks(["fails", "right", "pid", "waits", "dies", "raises"])
class Agent:
    def __init__(self, config):
        self.config = config
    async def run(self, task):
        config = self.config
        assert (config.harness.id, config.model, config.max_turns) == ("null", "policy", 3)
        assert config.client.base_url.startswith("http://host:8000/v1"), config.client.base_url
        assert os.environ[config.client.api_key_var] == "key-of-the-attempt"
        assert (config.sampling.temperature, config.sampling.max_tokens) == (0.5, 8)
        if task == "fails":
            return Record(ok=False, errors=[Record(type=os.environ["ERROR"], message="it failed")])
        if task == "waits":
            pathlib.Path("begun").touch()
            try:
                await asyncio.Event().wait()
            finally:
                pathlib.Path("cancelled").touch()
        if task == "dies":
            print("the taskset gives up")
            os._exit(3)
        if task == "raises":
            raise KeyError("column")
        return Record(ok=True, reward=float(os.getpid()) if task == "pid" else 0.75)
make_agent = Agent
"""
FAILS, RIGHT, PID, WAITS, DIES, RAISES = ({"idx": position} for position in range(6))
PYTHON = {"python": sys.executable, "config": {"size": 2}, "max_turns": 3, "sampling": {"max_tokens": 8}}


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    package = tmp_path / "verifiers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "v1.py").write_text(STAND_IN)
    yield tmp_path
    await close_shared_services()


async def run(task: Any, **options: Any) -> tuple[Outcome, Any]:
    agent = verifiers_agent("sums", **{**PYTHON, **options})
    llm = rl.LLM(
        endpoint="http://host:8000/v1",
        model="policy",
        api_key="key-of-the-attempt",
        sampling_parameters={"temperature": 0.5},
    )
    rollout = make_rollout(task=task, mode="train", timeout=30)
    context = make_context(agent)
    async with within(60):
        with context.tracer.attempt(rollout) as trace:
            outcome = await execute(context, rollout, {"llm": llm}, trace)
    return outcome, find_final_reward(trace.spans)


async def test_the_reward_of_the_trace_is_that_of_the_rollout(folder: Path) -> None:
    outcome, reward = await run(RIGHT, cwd=folder)
    assert outcome == Outcome("succeeded"), outcome
    assert reward == 0.75


async def test_rollouts_share_a_process_that_ends_with_them(folder: Path) -> None:
    ended = await asyncio.gather(*(run(PID, cwd=folder) for _ in range(3)))
    (process,) = {int(reward) for _, reward in ended}
    assert psutil.pid_exists(process)
    await close_shared_services()
    assert not psutil.pid_exists(process)


async def test_a_cancelled_rollout_is_cancelled_in_its_process(folder: Path) -> None:
    waiting = asyncio.create_task(run(WAITS, cwd=folder))
    await until((folder / "begun").exists)
    waiting.cancel()
    await asyncio.wait([waiting])
    await until((folder / "cancelled").exists)
    assert (await run(RIGHT, cwd=folder))[1] == 0.75


async def test_a_process_that_dies_is_replaced(folder: Path) -> None:
    outcome, _ = await run(DIES, cwd=folder)
    assert outcome.failure.kind == "infrastructure"
    assert "ended with status 3" in outcome.failure.error
    assert "the taskset gives up" in outcome.failure.error
    assert (await run(RIGHT, cwd=folder))[1] == 0.75


@pytest.mark.parametrize(("error", "kind"), [("ProviderError", "infrastructure"), ("TaskError", "agent")])
async def test_a_failed_trace_fails_the_rollout(folder: Path, error: str, kind: str) -> None:
    outcome, reward = await run(FAILS, cwd=folder, env={"ERROR": error})
    assert outcome.failure.kind == kind
    assert f"{error}: it failed" in outcome.failure.error
    assert reward is None


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"idx": 9}, "the taskset sums has no task 9"),
        ("first", "is not {"),
        ({"idx": "1"}, "the position of a task"),
        (RAISES, "KeyError: 'column'"),
    ],
)
async def test_a_task_that_fails_is_named(folder: Path, task: Any, message: str) -> None:
    outcome, _ = await run(task, cwd=folder)
    assert outcome.failure.kind == "agent"
    assert message in outcome.failure.error


async def test_an_interpreter_without_verifiers_is_named(tmp_path: Path) -> None:
    outcome, _ = await run(RIGHT, cwd=tmp_path)
    assert outcome.failure.kind == "agent"
    assert "has no verifiers 0.4" in outcome.failure.error


async def test_an_interpreter_that_is_not_there_is_named() -> None:
    outcome, _ = await run(RIGHT, python="/nonexistent/python")
    assert outcome.failure.kind == "agent"
    assert "/nonexistent/python cannot be started" in outcome.failure.error


def test_settings_that_are_no_json_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be JSON"):
        verifiers_agent("sums", python=sys.executable, config={"x": {1}})


def test_the_program_imports_only_the_standard_library() -> None:
    program = Path(rl.__file__).parent / "environments" / "verifiers_program.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", program], input="{}", text=True, capture_output=True, env={}
    )
    assert "KeyError: 'RAYLIGHT_VERIFIERS'" in done.stderr
