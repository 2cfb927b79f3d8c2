"""Attempts at Harbor tasks in a sandbox of processes: environment, tests, rewards, artifacts."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sandbox_helpers import starting

from raylight.errors import ConfigError, RewardError, SandboxError
from raylight.harbor.attempt import HarborAttempt, leads_to_files
from raylight.harbor.task_folder import HarborTask, read_task
from raylight.sandboxes.process import ProcessSandbox
from raylight.sandboxes.sandbox import Sandbox, SandboxLimits

from .test_task_folder import make_task

TESTS = """#!/bin/bash
source "/tests/helper"
if [ "$(cat /app/answer.txt)" = "$EXPECTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
DOCKERFILE = "FROM x\nWORKDIR /app\nCOPY given.txt ./\n"


@pytest.fixture
async def make_sandbox() -> AsyncIterator[Callable]:
    """Start sandboxes, and stop them at the end."""
    async with starting(lambda: ProcessSandbox(None, SandboxLimits())) as start:
        yield start


def make(folder: Path, toml: str = "", *, tests: str = TESTS, dockerfile: str = DOCKERFILE) -> HarborTask:
    """Write a task whose answer has to be 42."""
    toml = toml or '[verifier]\nenv = {EXPECTED = "42"}\n'
    make_task(folder, toml, instruction="Write 42 to /app/answer.txt (not x/app/y).", tests=tests)
    (folder / "tests" / "helper").write_text("true")
    (folder / "environment" / "given.txt").write_text("given")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    return read_task(folder)


async def attempt(
    task: HarborTask, sandbox: Sandbox, script: str, **more: object
) -> float | dict[str, float]:
    """Prepare a task, run a script in place of an agent, and judge it."""
    trial = HarborAttempt(task, **more)  # type: ignore[arg-type]
    workdir = await trial.prepare(sandbox)
    ended = await sandbox.exec(["/bin/sh", "-ec", script], cwd=workdir)
    assert ended.status == 0, ended.stderr
    return await trial.judge(sandbox)


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("41", 0.0)])
async def test_the_tests_give_the_reward(
    tmp_path: Path, make_sandbox: Callable, answer: str, reward: float
) -> None:
    script = f"test -e given.txt; test ! -e ../tests; printf {answer} > answer.txt"
    assert await attempt(make(tmp_path / "task"), await make_sandbox(), script) == reward


async def test_the_instruction_names_the_paths_of_the_sandbox(tmp_path: Path, make_sandbox: Callable) -> None:
    sandbox = await make_sandbox()
    prompt = HarborAttempt(make(tmp_path / "task")).prompt(sandbox)
    assert prompt == f"Write 42 to {sandbox.workspace}/app/answer.txt (not x/app/y)."


async def test_a_reward_that_the_agent_planted_does_not_count(tmp_path: Path, make_sandbox: Callable) -> None:
    plant = "echo 1 > ../logs/verifier/reward.txt"
    script = f"mkdir ../tests; echo 'exit 0' > ../tests/helper; {plant}; echo 2 > answer.txt"
    assert await attempt(make(tmp_path / "task"), await make_sandbox(), script) == 0.0
    silent = make(tmp_path / "silent", tests="#!/bin/sh\necho nothing\nexit 3\n")
    with pytest.raises(RewardError, match=r"status 3 and wrote no .* output ends: nothing"):
        await attempt(silent, await make_sandbox(), plant)


async def test_named_rewards_begin_with_the_primary_one(tmp_path: Path, make_sandbox: Callable) -> None:
    tests = '#!/bin/sh\necho \'{"style": 0.5, "reward": 1}\' > /logs/verifier/reward.json\n'
    rewards = await attempt(make(tmp_path / "task", tests=tests), await make_sandbox(), "true")
    assert list(rewards.items()) == [("reward", 1.0), ("style", 0.5)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("reward.json", "{", "not JSON"),
        ("reward.json", "{}", "is empty"),
        ("reward.json", '{"reward": "1"}', "write a finite number"),
        ("reward.json", "NaN", "write a finite number"),
        ("reward.txt", "one", "write a number"),
        ("reward.txt", "", "write a number"),
        ("reward.txt", "inf", "write a finite number"),
    ],
)
async def test_a_reward_that_is_no_number_is_an_error(
    tmp_path: Path, make_sandbox: Callable, name: str, content: str, message: str
) -> None:
    tests = f"#!/bin/sh\nprintf %s '{content}' > /logs/verifier/{name}\n"
    with pytest.raises(RewardError, match=message):
        await attempt(make(tmp_path / "task", tests=tests), await make_sandbox(), "true")


async def test_tests_that_take_too_long_are_an_error(tmp_path: Path, make_sandbox: Callable) -> None:
    tests = "#!/bin/sh\necho 0 > /logs/verifier/reward.txt\nsleep 600\n"
    task = make(tmp_path / "task", "[verifier]\ntimeout_sec = 0.2", tests=tests)
    with pytest.raises(RewardError, match=r"ended after 0.2 s"):
        await attempt(task, await make_sandbox(), "true")


async def test_separate_tests_see_only_the_artifacts(tmp_path: Path, make_sandbox: Callable) -> None:
    toml = 'artifacts = ["/app/out", "/app/missing"]\n[verifier]\nenvironment_mode = "separate"\n'
    tests = "#!/bin/sh\ncat /app/out/kept > /logs/verifier/reward.txt\ntest ! -e /app/hidden\n"
    task = make(tmp_path / "task", toml, tests=tests)
    trial, sandbox, other = HarborAttempt(task), await make_sandbox(), await make_sandbox()
    workdir = await trial.prepare(sandbox)
    await sandbox.exec(["/bin/sh", "-c", "mkdir out; echo 0.25 > out/kept; echo > hidden"], cwd=workdir)
    assert await trial.judge(sandbox, other) == 0.25
    assert (await other.exec(["ls", "app"])).stdout.split() == ["given.txt", "out"]


async def test_run_lines_are_an_error_until_they_are_allowed(tmp_path: Path, make_sandbox: Callable) -> None:
    task = make(tmp_path / "task", dockerfile=DOCKERFILE + "RUN echo built > /app/built\n")
    with pytest.raises(ConfigError, match="run_steps"):
        await attempt(task, await make_sandbox(), "true")
    assert (
        await attempt(task, await make_sandbox(), "test ! -e built; echo 42 > answer.txt", run_steps="skip")
        == 1
    )
    assert await attempt(task, await make_sandbox(), "cat built; echo 42 > answer.txt", run_steps="run") == 1
    broken = make(tmp_path / "broken", dockerfile="FROM x\nRUN echo no >&2; exit 4\n")
    with pytest.raises(SandboxError, match=r"status 4.*no"):
        await attempt(broken, await make_sandbox(), "true", run_steps="run")


async def test_the_variables_of_a_dockerfile_are_those_of_its_steps_and_tests(
    tmp_path: Path, make_sandbox: Callable
) -> None:
    tests = "#!/bin/sh\ntool && [ $MODE$LEVEL$STAGE = task2 ] && echo 1 > /logs/verifier/reward.txt\n"
    toml = '[verifier]\nenv = {MODE = "task"}\n'
    env = 'ARG STAGE=build\nENV MODE=image LEVEL=2 HOME=/app PATH="/app/bin:$PATH"\n'
    steps = "RUN mkdir bin && cp $(which true) bin/tool && tool && test $STAGE = build\n"
    task = make(tmp_path / "task", toml, tests=tests, dockerfile=DOCKERFILE + env + steps)
    sandbox = await make_sandbox()
    assert await attempt(task, sandbox, "true", run_steps="run") == 1.0
    path = f"{sandbox.root}/app/bin:{os.environ['PATH']}"
    variables = {"MODE": "image", "LEVEL": "2", "HOME": f"{sandbox.root}/app", "PATH": path}
    assert await HarborAttempt(task).image_variables(sandbox) == variables


async def test_a_path_of_an_image_hides_no_program_of_the_sandbox_from_tests(
    tmp_path: Path, make_sandbox: Callable
) -> None:
    env = 'ENV PATH="/app/bin:$PATH" PYTHONPATH=modules LD_PRELOAD=/app/x.so DATA=/app/data TZ=Asia/Tokyo\n'
    tests = "#!/bin/sh\n[ -z $PYTHONPATH$LD_PRELOAD$DATA ] && echo $TZ && python3 -c 'exit(1)' && "
    task = make(
        tmp_path / "task", tests=f"{tests}echo 1 > /logs/verifier/reward.txt\n", dockerfile=DOCKERFILE + env
    )
    forge = "mkdir bin && printf '#!/bin/sh\nexit 0' > bin/python3 && chmod 755 bin/python3"
    with pytest.raises(RewardError, match=r"ended with status 1 .* ends: Asia/Tokyo"):
        await attempt(task, await make_sandbox(), forge)


@pytest.mark.parametrize(
    ("name", "value", "leads"),
    [
        ("TZ", "America/Argentina/Buenos_Aires", False),
        ("TZ", "Etc/GMT+8", False),
        ("TZ", "../app/zone", True),
        ("TZ", ":/app/zone", True),
        ("ZONE", "Europe/Berlin", True),
        ("PIP_INDEX_URL", "https://user:key@host:80/simple?a=b", False),
        ("DATABASE_URL", "postgresql://host/db", False),
        ("DATABASE_URL", "sqlite:///app/db", True),
        ("URL", "file:///app/x", True),
        ("URL", "https://host/ /app/x", True),
        ("URL", "https://host/:/app/x", True),
        ("JAVA_HOME", "/usr/lib/jvm/java-17-openjdk-amd64", False),
        ("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt", False),
        ("XDG_DATA_DIRS", "/usr/local/share:/usr/share/", False),
        ("XDG_DATA_DIRS", "/usr/share:/app", True),
        ("JAVA_HOME", "/usr/../app", True),
        ("LIBRARIES", "/lib32/x", True),  # a folder that the machine may lack
        ("JAVA_HOME", "/usrapp/jvm", True),
        ("MODEL", "Qwen/Qwen3-0.6B", True),
        ("PYTHONPATH", "/usr/lib/python3", True),
        ("PYTHONPATH", "modules", True),
        ("PYTHONUNBUFFERED", "1", False),
        ("NODE_ENV", "test", False),
        ("NODE_OPTIONS", "--require x", True),
        ("LD_PRELOAD", "x.so", True),
        ("MODE", "test", False),
    ],
)
def test_variables_that_may_lead_to_files_of_an_agent(name: str, value: str, leads: bool) -> None:
    assert leads_to_files(name, value) is leads


async def test_an_image_needs_a_sandbox_with_images(tmp_path: Path, make_sandbox: Callable) -> None:
    task = make(tmp_path / "task", '[environment]\ndocker_image = "python:3.12"')
    with pytest.raises(ConfigError, match="starts from the image python"):
        await HarborAttempt(task).prepare(await make_sandbox())


async def test_a_link_out_of_the_tests_is_an_error(tmp_path: Path, make_sandbox: Callable) -> None:
    task = make(tmp_path / "task")
    (tmp_path / "secret").write_text("x")
    (task.tests_folders[0] / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(SandboxError, match="leads out of"):
        await attempt(task, await make_sandbox(), "true")
