"""An agent that is a separate program: its input, its environment, its reward, its failures and its end."""

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from opentelemetry.util.re import parse_env_headers
from sandbox_helpers import alive
from unit_helpers import DEADLINE_S, make_context, make_rollout, until, within

from raylight.agent.emit import emit_message
from raylight.agent.resources import LLM, ProxyLLM
from raylight.errors import AgentSignatureError
from raylight.harnesses.command import CommandAgent, CommandResult
from raylight.runner.execute import execute
from raylight.runner.outcome import Outcome
from raylight.sandboxes.sandbox import MAX_STDERR, MAX_STDOUT
from raylight.traces.reward_spans import find_final_reward, get_rewards_from_span
from raylight.types import Span

POLICY = LLM(endpoint="http://host:8000/v1", model="policy", traced=True, sampling_parameters={"top_k": 3})
DUMP = "tr '\\0' '\\n' < /proc/self/environ; cat"
"""Shell command that prints its environment and its input."""


async def run(
    agent: CommandAgent, task: Any = None, *, resources: dict[str, Any] | None = None, timeout: float = 30
) -> tuple[Outcome, list[Span]]:
    rollout = make_rollout(task=task, mode="train", timeout=timeout)
    context = make_context(agent)
    async with within(60):
        with context.tracer.attempt(rollout) as trace:
            outcome = await execute(
                context, rollout, {"llm": POLICY} if resources is None else resources, trace
            )
    return outcome, trace.spans


def shell(script: str, **options: Any) -> CommandAgent:
    return CommandAgent(["/bin/sh", "-c", script], **options)


async def printed(script: str, task: Any = None, **options: Any) -> str:
    """Run a script and return its standard output."""
    outputs: list[str] = []
    resources = options.pop("resources", None)
    agent = shell(script, reward=lambda task, result: outputs.append(result.stdout), **options)
    outcome, _ = await run(agent, task, resources=resources)
    assert outcome == Outcome("succeeded")
    return outputs[0]


async def environment(**options: Any) -> dict[str, str]:
    lines = (await printed(DUMP, **options)).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


async def failure(agent: CommandAgent, task: Any = None, **options: Any) -> tuple[str, str]:
    """Return kind and message of the failure of a rollout."""
    outcome, _ = await run(agent, task, **options)
    return outcome.failure.kind, outcome.failure.error


# input and environment


@dataclass
class Question:
    text: str
    path: Path


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"a": 1, "b": "é"}, {"a": 1, "b": "é"}),
        ("text", "text"),
        (None, None),
        (Question("why", Path("/tmp")), {"text": "why", "path": "/tmp"}),
    ],
)
async def test_the_task_arrives_as_json_on_the_standard_input(task: Any, expected: Any) -> None:
    assert json.loads(await printed("cat", task)) == expected


async def test_a_task_that_is_not_json_is_named() -> None:
    kind, error = await failure(shell("cat"), object())
    assert kind == "agent"
    assert "<object object" in error
    assert "use dicts" in error


async def test_the_model_is_in_the_environment_and_not_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    monkeypatch.setenv("PYTHONPATH", "/of/the/runner")
    monkeypatch.setenv("KEPT", "1")
    variables = await environment()
    endpoint = "http://host:8000/rollout/ro-1/attempt/at-1/v1"
    key = variables["OPENAI_API_KEY"]
    assert key not in ("unused", "the user's own")
    assert {name: variables.get(name) for name in (*variables, "PYTHONPATH")} == variables | {
        "OPENAI_BASE_URL": endpoint,
        "OPENAI_API_BASE": endpoint,
        "OPENAI_MODEL": "policy",
        "ANTHROPIC_BASE_URL": endpoint.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": "policy",
        "RAYLIGHT_SAMPLING_PARAMETERS": '{"top_k": 3}',
        "RAYLIGHT_ROLLOUT_ID": "ro-1",
        "RAYLIGHT_ATTEMPT_ID": "at-1",
        "RAYLIGHT_MODE": "train",
        "KEPT": "1",
        "PYTHONPATH": None,
    }
    assert key not in await printed("tr '\\0' ' ' < /proc/$$/cmdline")


async def test_exporters_of_opentelemetry_find_the_endpoint_if_the_program_sends_spans() -> None:
    prefix = "OTEL_EXPORTER_OTLP_TRACES_"
    assert not [name for name in await environment() if name.startswith(prefix)]
    variables = await environment(sends_spans=True)
    endpoint = "http://host:8000/rollout/ro-1/attempt/at-1/v1/traces"
    assert variables[f"{prefix}ENDPOINT"] == endpoint
    headers = parse_env_headers(variables[f"{prefix}HEADERS"], liberal=True)
    assert headers["authorization"].startswith("Bearer rl-")
    assert headers != {"authorization": f"Bearer {variables['OPENAI_API_KEY']}"}


async def test_further_variables_are_added_and_removed() -> None:
    variables = await environment(env={"MORE": "x", "OPENAI_API_BASE": None})
    assert variables["MORE"] == "x"
    assert "OPENAI_API_BASE" not in variables


@pytest.mark.parametrize("place", ["runner", "agent"])
async def test_the_model_is_called_without_a_proxy(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str | None] = {"HTTP_PROXY": "http://proxy", "NO_PROXY": "intranet", "no_proxy": None}
    for name in given if place == "runner" else ():
        monkeypatch.setenv(name, given[name] or "")
    variables = (await printed(DUMP, env=given if place == "agent" else None)).splitlines()
    direct = "intranet,127.0.0.1,localhost,::1,host"
    assert {"HTTP_PROXY=http://proxy", f"NO_PROXY={direct}", f"no_proxy={direct}"} <= set(variables)


async def test_a_fixed_model_without_a_key_leaves_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    fixed = LLM(endpoint="https://judge/v1", model="large", api_key=None)
    variables = await environment(resources={"judge": fixed})
    assert (variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]) == (
        "https://judge/v1",
        "the user's own",
    )
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" not in variables


async def test_the_model_is_chosen_by_name_or_by_type() -> None:
    models = {
        "tokenizer": LLM(model="words", tokenizer_only=True),
        "first": LLM(endpoint="http://a/v1", model="a"),
        "proxy": ProxyLLM(endpoint="http://b/v1", model="b"),
    }
    assert (await environment(resources=models))["OPENAI_MODEL"] == "a"
    chosen = await environment(resources=models, llm="proxy")
    assert chosen["OPENAI_BASE_URL"] == "http://b/rollout/ro-1/attempt/at-1/v1"
    with pytest.raises(AgentSignatureError, match=r"no model other; the models of this run are first, proxy"):
        shell("", llm="other").check(models)
    with pytest.raises(AgentSignatureError, match=r"no model at all; the models of this run are none"):
        shell("").check({})
    shell("").check(["llm"])


async def test_a_command_made_from_the_task_runs_in_its_folder(tmp_path: Path) -> None:
    agent = CommandAgent(lambda task: ["/bin/sh", "-c", 'pwd; echo "$0"', task["name"]], cwd=tmp_path)
    outcome, _ = await run(agent, {"name": "3"})
    assert outcome.status == "succeeded"
    assert agent.display_name == "CommandAgent"
    assert await printed("pwd", cwd=tmp_path) == f"{tmp_path}\n"


# rewards


@pytest.mark.parametrize(
    ("output", "rewards"),
    [
        ("0.5", {"primary": 0.5}),
        ("working\n1\n\n", {"primary": 1.0}),
        ("true", {"primary": 1.0}),
        ('{"right": 1, "short": 0.25}', {"right": 1.0, "short": 0.25}),
        ("null", None),
    ],
)
async def test_the_last_line_is_the_reward(output: str, rewards: dict[str, float] | None) -> None:
    outcome, spans = await run(shell(f"printf '%s' '{output}'"))
    assert outcome == Outcome("succeeded")
    found = [{r.name: r.value for r in given} for span in spans if (given := get_rewards_from_span(span))]
    assert found == ([] if rewards is None else [rewards])


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("true", "missing, because it printed nothing"),
        ("echo good", "is 'good'"),
        ("echo '[1]'", "is '[1]'"),
        ("echo '\"1\"'", "is '\"1\"'"),
        ("echo NaN", "nan"),
    ],
)
async def test_an_output_without_a_reward_is_a_failure(script: str, named: str) -> None:
    kind, error = await failure(shell(script))
    assert kind == "reward"
    assert named in error


@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (1, 0.0)])
async def test_the_exit_status_as_reward(status: int, reward: float) -> None:
    _, spans = await run(shell(f"exit {status}", reward="exit_status"))
    assert find_final_reward(spans) == reward


async def test_another_exit_status_is_a_failure() -> None:
    assert "exit status 2" in (await failure(shell("exit 2", reward="exit_status")))[1]


async def test_the_exit_status_of_a_program_out_of_time_is_no_reward() -> None:
    script = "trap 'exit 0' TERM; echo started; sleep 60 & wait"
    kind, error = await failure(shell(script, reward="exit_status", timeout_s=0.5))
    assert kind == "agent"
    assert "was ended after" in error
    _, spans = await run(shell(script, reward="exit_status", timeout_s=0.5, scores_failures=True))
    assert find_final_reward(spans) == 0.0


async def test_a_function_scores_the_output() -> None:
    def score(task: dict[str, Any], result: CommandResult) -> float:
        emit_message(result.stderr.strip())
        return float(task["expected"] == result.stdout.strip())

    async def score_later(task: dict[str, Any], result: CommandResult) -> float:
        return await asyncio.to_thread(score, task, result)

    for function in (score, score_later):
        outcome, spans = await run(shell("echo 42; echo a note >&2", reward=function), {"expected": "42"})
        assert outcome == Outcome("succeeded")
        assert find_final_reward(spans) == 1.0
        assert spans[1].attributes["agentlightning.message.body"] == "a note"


# failures


async def test_the_end_of_the_standard_error_explains_a_failure() -> None:
    script = "for i in 1 2 3 4 5; do echo line $i >&2; done; echo $OPENAI_API_KEY >&2; exit 3"
    outcome, _ = await run(shell(script))
    assert outcome.failure.kind == "agent"
    assert outcome.failure.error == (
        "CommandError: the agent's command /bin/sh ended with exit status 3. "
        "Its standard error ends: line 4 line 5 ***"
    )
    assert "line 1\nline 2" in outcome.failure.trace


async def test_a_silent_failure_and_a_signal() -> None:
    assert "exit status 1. It wrote nothing" in (await failure(shell("exit 1")))[1]
    assert "ended with signal SIGKILL" in (await failure(shell("kill -9 $$")))[1]


async def test_status_75_is_a_failure_of_the_infrastructure() -> None:
    kind, error = await failure(shell("echo the engine is gone >&2; exit 75"))
    assert kind == "infrastructure"
    assert error.startswith("CommandUnavailableError")


async def test_a_missing_program_or_folder_is_named(tmp_path: Path) -> None:
    assert "no-such-program cannot be started" in (await failure(CommandAgent(["no-such-program"])))[1]
    (tmp_path / "text").write_text("no program")
    assert "Permission denied" in (await failure(CommandAgent([tmp_path / "text"])))[1]
    error = (await failure(shell("true", cwd=tmp_path / "gone")))[1]
    assert f"{tmp_path}/gone" in error
    assert "CommandAgent(cwd=...)" in error


@pytest.mark.parametrize("command", ["node agent.mjs", [], ["node", 3], None])
async def test_a_command_of_another_type_is_refused(command: Any) -> None:
    with pytest.raises(AgentSignatureError, match="CommandAgent"):
        CommandAgent(command)
    assert "AgentSignatureError" in (await failure(CommandAgent(lambda task: command)))[1]
    with pytest.raises(AgentSignatureError, match="exit_status"):
        CommandAgent(["true"], reward="exitcode")  # type: ignore[arg-type]


# large outputs and inputs


async def test_of_a_large_output_the_end_is_kept() -> None:
    size = 3 * MAX_STDOUT
    script = f"head -c {size} /dev/zero | tr '\\0' a; head -c {size} /dev/zero | tr '\\0' b >&2; echo; echo 1"
    lengths = []

    def score(task: Any, result: CommandResult) -> float:
        lengths.extend([len(result.stdout), len(result.stderr)])
        return float(result.stdout.rpartition("a\n")[2])

    _, spans = await run(shell(script, reward=score))
    assert (find_final_reward(spans), lengths) == (1.0, [MAX_STDOUT, MAX_STDERR])


async def test_a_program_need_not_read_its_input() -> None:
    outcome, _ = await run(shell("echo 1"), "x" * 1_000_000)
    assert outcome == Outcome("succeeded")
    assert json.loads(await printed("cat", "x" * 1_000_000)) == "x" * 1_000_000


# the end


async def started(pids: Path, count: int) -> list[int]:
    def read() -> list[int]:
        return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []

    await until(lambda: len(read()) == count)
    return read()


@contextlib.contextmanager
def all_killed(pids: Path) -> Any:
    """Kill what a failed test leaves behind."""
    try:
        yield
    finally:
        for pid in pids.read_text().split() if pids.exists() else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


async def test_a_timeout_ends_the_process_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $$ $! >> {pids}; wait"
    with all_killed(pids):
        outcome, _ = await run(shell(script), timeout=0.5)
        assert outcome.status == "timeout"
        one, other = await started(pids, 2)
        await until(lambda: not alive(one) and not alive(other))


@pytest.mark.parametrize(("trap", "grace_s"), [("echo bye > $0; exit", DEADLINE_S), ("", 0.05)])
async def test_a_cancelled_program_may_clean_up_and_is_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str, grace_s: float
) -> None:
    monkeypatch.setattr("raylight.sandboxes.local_program.TERMINATE_GRACE_S", grace_s)
    pids, said = tmp_path / "pids", tmp_path / "said"
    script = f"trap '{trap}' TERM; echo $$ >> {pids}; while :; do sleep 0.01; done"
    with all_killed(pids):
        work = asyncio.create_task(run(CommandAgent(["/bin/sh", "-c", script, said])))
        (pid,) = await started(pids, 1)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await until(lambda: not alive(pid))
    assert said.exists() == bool(trap)


async def test_processes_left_behind_are_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with all_killed(pids):
        outcome, _ = await run(shell(f"sleep 600 & echo $! >> {pids}; echo 1"))
        assert outcome == Outcome("succeeded")
        (pid,) = await started(pids, 1)
        await until(lambda: not alive(pid))


async def test_a_daemon_that_holds_the_pipes_delays_no_rollout(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"setsid sh -c 'echo $$ >> {pids}; exec sleep 600' & while [ ! -s {pids} ]; do :; done; echo 1"
    with all_killed(pids):
        _, spans = await run(shell(script))
        assert find_final_reward(spans) == 1.0
        (pid,) = await started(pids, 1)
        await until(lambda: not alive(pid))


# in a run


@pytest.mark.parametrize("script", ["sleep 600 & cat >&2; echo 1", "echo 1", "exec sleep 600"])
def test_commands_run_on_the_event_loop_of_ray(script: str) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome, spans = runner.run(
            run(shell(script), "x" * 1_000_000, timeout=1 if "exec" in script else 30)
        )
    assert (outcome.status, find_final_reward(spans)) in [("succeeded", 1.0), ("timeout", None)]


async def test_an_agent_travels_to_the_runners() -> None:
    agent = cloudpickle.loads(cloudpickle.dumps(shell("echo 1", trained_agents="solver")))
    assert (agent.trained_agents, agent.is_async) == ("solver", True)
    assert (await run(agent))[0] == Outcome("succeeded")


async def test_no_more_sandboxes_exist_than_allowed(tmp_path: Path) -> None:
    script = f"cd {tmp_path}; mkdir busy || exit 7; sleep 0.1; rmdir busy; echo 1"
    agent = cloudpickle.loads(cloudpickle.dumps(shell(script, sandbox="process", max_sandboxes=1)))
    async with within(60):
        outcomes = await asyncio.gather(*(run(agent) for _ in range(4)))
    assert {outcome.status for outcome, _ in outcomes} == {"succeeded"}
    assert [find_final_reward(spans) for _, spans in outcomes] == [1.0] * 4
