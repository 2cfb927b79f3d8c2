"""A command in its sandbox: its files, its folders, its reward after its end, and bad input."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sandbox_helpers import alive
from unit_helpers import make_context, make_rollout, until, within

from raylight.agent.resources import LLM
from raylight.errors import AgentSignatureError, CommandError, ConfigError
from raylight.harnesses.command import CommandAgent, CommandResult
from raylight.harnesses.reward_command import RewardCommand
from raylight.runner.execute import execute
from raylight.runner.outcome import Outcome
from raylight.sandboxes.file_bundle import FileBundle, bundle_files
from raylight.sandboxes.process import ProcessSandbox
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import SandboxLimits
from raylight.traces.reward_spans import find_final_reward
from raylight.types import Span

POLICY = LLM(endpoint="http://host:8000/v1", model="policy", traced=True)


async def run(agent: CommandAgent, task: Any = None, timeout: float = 30) -> tuple[Outcome, list[Span]]:
    rollout = make_rollout(task=task, mode="train", timeout=timeout)
    context = make_context(agent)
    async with within(60):
        with context.tracer.attempt(rollout) as trace:
            outcome = await execute(context, rollout, {"llm": POLICY}, trace)
    return outcome, trace.spans


def shell(script: str, **options: Any) -> CommandAgent:
    return CommandAgent(["/bin/sh", "-c", script], **{"sandbox": "process", **options})


async def printed(script: str, task: Any = None, **options: Any) -> str:
    outputs: list[str] = []
    outcome, _ = await run(
        shell(script, reward=lambda task, result: outputs.append(result.stdout), **options), task
    )
    assert outcome == Outcome("succeeded"), outcome
    return outputs[0]


async def failure(agent: CommandAgent, task: Any = None) -> tuple[str, str]:
    outcome, _ = await run(agent, task)
    return outcome.failure.kind, outcome.failure.error


# the workspace


async def test_each_rollout_has_a_folder_and_a_home_that_are_removed() -> None:
    lines = (
        await printed('pwd; ls -a; echo "$HOME"; echo "$XDG_CONFIG_HOME"; touch "$HOME/left" left')
    ).splitlines()
    folder, home = Path(lines[0]), Path(lines[3])
    assert lines[1:3] == [".", ".."]
    assert (folder.name, home.name, home.parent) == ("work", "home", folder.parent)
    assert lines[4] == f"{home}/.config"
    assert not folder.parent.exists()
    other = (await printed("pwd; printenv PWD")).split()
    assert other[0] == other[1] != str(folder)


async def test_files_come_from_a_folder_a_function_and_the_task(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "code.py").write_text("old")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("pkg/code.py")
    task = {"files": {"pkg/code.py": "new", "data.bin": "x"}}
    script = "cat pkg/code.py link data.bin; ./run.sh"
    assert await printed(script, task, files=tmp_path) == "newnewxran\n"
    assert await printed(script, task, files=lambda task: tmp_path) == "newnewxran\n"
    assert await printed("cat a", {"n": 3}, files=lambda task: {"a": f"{task['n']}"}) == "3"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"../out": "x"}, "leaves the workspace"),
        ({"/etc/x": "x"}, "relative to the workspace"),
        ({"a": 3}, "type int"),
        ("/no/such/folder", "is not there"),
        (3, "give a folder"),
    ],
)
async def test_files_that_cannot_be_written_are_named(files: Any, named: str) -> None:
    kind, error = await failure(shell("true", files=files))
    assert kind == "agent"
    assert "CommandError" in error
    assert named in error


async def test_too_many_bytes_of_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.sandboxes.file_bundle.MAX_FILES_BYTES", 4096)
    with pytest.raises(CommandError, match="sandbox's image"):
        await bundle_files([("", {"a": "x" * 10_000})])


async def test_files_of_a_full_disk_are_an_error() -> None:
    sandbox = ProcessSandbox(None, SandboxLimits(file_mb=1))
    await sandbox.start()
    try:
        bundle = FileBundle()
        bundle.add({"a": b"\0" * (2 << 20)}, "")
        with pytest.raises(CommandError, match="cannot be written"):
            await bundle.extract(sandbox, sandbox.workspace)
    finally:
        await sandbox.stop()


async def test_placeholders_are_filled_in_and_other_braces_are_kept() -> None:
    task = {"prompt": "do {model} {this}"}
    agent = CommandAgent(
        ["printf", "%s|", "{prompt}", "{model}", "{workspace}", "{base_url}", "{other}"],
        sandbox="process",
        reward=lambda task, result: parts.extend(result.stdout.split("|")),
    )
    parts: list[str] = []
    await run(agent, task)
    endpoint = "http://host:8000/rollout/ro-1/attempt/at-1/v1"
    assert [parts[0], parts[1], parts[3], parts[4]] == ["do {model} {this}", "policy", endpoint, "{other}"]
    assert parts[2].endswith("/work")


@pytest.mark.parametrize(
    ("task", "options", "expected"),
    [
        ("a text", {}, "a text"),
        ({"question": "why"}, {"prompt": "question"}, "why"),
        ({"a": 1}, {"prompt": lambda task: f"{task['a']}?"}, "1?"),
    ],
)
async def test_the_prompt_of_a_task(task: Any, options: dict[str, Any], expected: str) -> None:
    outputs: list[str] = []
    agent = CommandAgent(
        ["echo", "{prompt}"], reward=lambda _, result: outputs.append(result.stdout), **options
    )
    assert (await run(agent, task))[0].status == "succeeded"
    assert outputs == [f"{expected}\n"]


async def test_a_missing_prompt_is_named() -> None:
    _, error = await failure(CommandAgent(["echo", "{prompt}"]), {"text": "x"})
    assert "the task has no prompt" in error
    assert "of type int" in (await failure(CommandAgent(["echo", "{prompt}"]), {"prompt": 3}))[1]


# rewards


async def test_tests_enter_after_the_agent_has_ended_and_replace_its_own() -> None:
    tests = {"check.sh": 'test "$(cat answer)" = 42'}
    judge = RewardCommand(["sh", "check.sh"], files=tests)
    for answer, reward in (("42", 1.0), ("7", 0.0)):
        seen = f"test ! -e check.sh; echo true > check.sh; echo {answer} > answer"
        outcome, spans = await run(shell(seen, reward=judge))
        assert outcome == Outcome("succeeded")
        assert find_final_reward(spans) == reward
    _, spans = await run(shell("touch done", reward=["test", "-e", "done"]))
    assert find_final_reward(spans) == 1.0


async def test_a_reward_command_never_sees_the_keys_of_the_model() -> None:
    judge = RewardCommand(["sh", "-c", 'echo "${OPENAI_API_KEY:-0}"'], reads="stdout")
    _, spans = await run(shell("true", reward=judge))
    assert find_final_reward(spans) == 0.0


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("reward.txt", "0.25\n", 0.25),
        ("out/reward.json", '{"passed": 0.5, "short": 1}', 0.5),
        ("reward.json", "1", 1.0),
    ],
)
async def test_a_reward_file(name: str, text: str, reward: float) -> None:
    script = f"mkdir -p out; printf '%s' '{text}' > {name}"
    _, spans = await run(shell(script, reward=name))
    assert find_final_reward(spans) == reward
    _, spans = await run(shell("true", reward=RewardCommand(["sh", "-c", script], reads=name)))
    assert find_final_reward(spans) == reward


@pytest.mark.parametrize(
    ("script", "name", "named"),
    [
        ("true", "reward.json", "there is no reward file"),
        ("echo good > reward.txt", "reward.txt", "holds 'good"),
        ("echo '[1]' > reward.json", "reward.json", "holds '[1]"),
        ("head -c 9999999 /dev/zero > reward.json", "reward.json", "holds"),
    ],
)
async def test_a_reward_file_without_a_reward_is_a_failure(script: str, name: str, named: str) -> None:
    kind, error = await failure(shell(script, reward=name))
    assert kind == "reward"
    assert named in error


async def test_a_reward_command_that_cannot_run_is_a_failure_and_one_that_hangs_is_zero() -> None:
    kind, error = await failure(shell("true", reward=["sh", "-c", "exit 127"]))
    assert (kind, "status 127" in error) == ("reward", True)
    _, spans = await run(shell("true", reward=RewardCommand(["sleep", "600"], timeout_s=0.1)))
    assert find_final_reward(spans) == 0.0


async def test_a_function_sees_the_workspace() -> None:
    async def score(task: Any, result: CommandResult) -> float:
        return float(await result.sandbox.read(f"{result.workspace}/answer"))

    _, spans = await run(shell("echo 0.75 > answer", reward=score))
    assert find_final_reward(spans) == 0.75


async def test_failures_are_scored_only_if_asked() -> None:
    _, error = await failure(shell("exit 3", reward=["true"]))
    assert "exit status 3" in error
    _, spans = await run(shell("exit 3", reward=["true"], scores_failures=True))
    assert find_final_reward(spans) == 1.0
    _, error = await failure(shell("sleep 600", reward=["true"], timeout_s=0.1))
    assert "scores_failures=True" in error
    _, spans = await run(shell("sleep 600", reward=["true"], timeout_s=0.1, scores_failures=True))
    assert find_final_reward(spans) == 1.0


@pytest.mark.parametrize("reward", ["exitcode", 3, [], RewardCommand])
def test_an_unknown_reward_is_refused(reward: Any) -> None:
    if reward is RewardCommand:
        with pytest.raises(AgentSignatureError, match="reads"):
            RewardCommand(["true"], reads="nothing")
    else:
        with pytest.raises(AgentSignatureError, match=r"reward|RewardCommand"):
            CommandAgent(["true"], reward=reward)


# spans


async def test_status_seconds_and_outputs_are_recorded_without_keys() -> None:
    script = 'echo said; echo "$OPENAI_API_KEY" >&2; head -c 100000 /dev/zero | tr "\\0" x; exit 0'
    _, spans = await run(shell(script, reward=["true"]))
    recorded = [
        span.attributes for span in spans if span.attributes.get("agentlightning.operation.name") == "command"
    ]
    assert len(recorded) == 1
    text = json.dumps(recorded[0])
    assert "***" in text
    assert "exit_code" in text
    assert "rl-" not in text
    assert len(text) < 20_000


# bad input


@pytest.mark.slow
async def test_a_gigabyte_of_output_is_not_kept() -> None:
    _, spans = await run(shell("head -c 1000000000 /dev/zero; echo >&2 end", reward=["true"]))
    assert find_final_reward(spans) == 1.0
    assert max(len(str(span.attributes)) for span in spans) < 100_000


async def test_a_program_that_fills_the_disk_is_ended_by_its_limit() -> None:
    limited = SandboxSpec("process", limits=SandboxLimits(file_mb=1))
    script = "head -c 10000000 /dev/zero > big && echo full"
    kind, error = await failure(shell(script, sandbox=limited, reward=["true"]))
    assert kind == "agent"
    assert "ended with" in error


async def test_children_that_made_themselves_daemons_end_with_the_program(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"setsid sh -c 'echo $$ >> {pids}; exec sleep 600' & while [ ! -s {pids} ]; do :; done"
    _, spans = await run(shell(script, reward=["true"]))
    assert find_final_reward(spans) == 1.0
    pid = int(pids.read_text())
    await until(lambda: not alive(pid))


async def test_a_program_that_is_not_there_is_named() -> None:
    _, error = await failure(CommandAgent(["no-such-program"], sandbox="process", reward=["true"]))
    assert "CommandError" in error
    assert "no-such-program cannot be started" in error


async def test_an_unknown_sandbox_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="unknown"):
        CommandAgent(["true"], sandbox="nowhere")


async def test_a_sandbox_that_does_not_start_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = CommandAgent(["true"], sandbox="bubblewrap", reward=["true"])
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/no/such/folder")
        kind, error = await failure(agent)
    assert kind == "agent"
    assert error.startswith("SandboxError: bubblewrap")
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    kind, error = await failure(agent)
    assert kind == "infrastructure"  # the rollout is retried
    assert "no folder for a sandbox can be made" in error


async def test_nothing_is_left_after_a_failed_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for agent in (shell("exit 3"), shell("sleep 600", timeout_s=0.1), shell("true", files="/no/such")):
        await failure(agent)
    assert os.listdir(tmp_path) == []
