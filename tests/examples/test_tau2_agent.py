"""The multi-agent example on real Ray: scripted models behind raylight's proxies, and training on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import Cluster
from run_output import metric_rows
from tau2_helpers import (
    TASK_BY_OPENING,
    TASKS,
    BadRequest,
    ScriptedServer,
    facts_sentence,
    scripted_assistant,
    scripted_user,
    tool_calls,
)

import raylight as rl
from examples.tau2_agent.agent import ASSISTANT, USER, CustomerService
from examples.tau2_agent.tasks import as_row
from raylight.traces.trained_agents import filter_generations
from raylight.types import TRAINABLE_AGENTS, FinishedRollout

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "tau2_agent" / "train.py"
MAX_STEPS = 8
KEY = "upstream-key"


def calls_of(spans: Sequence[rl.Span]) -> list[rl.Triplet]:
    """Return the recorded calls of all agents in order, including calls without tokens."""
    return rl.TracerTraceToTriplet().adapt(spans)


def clumsy(task: dict[str, Any], done: int) -> dict[str, Any]:
    """Make every possible mistake with tools, and still solve the task."""
    steps = [
        tool_calls(("open_hatch", {"deck": 2})),
        tool_calls(("find_user", '{"email": chiara')),
        tool_calls(("find_user", '["chiara"]'), ("find_user", "")),
        tool_calls(("cancel_booking", {"booking_id": "B2003"})),
        tool_calls(
            ("find_user", {"email": "chiara.l@post.example"}), ("cancel_booking", {"booking_id": "B2003"})
        ),
    ]
    return steps[[0, 1, 2, 4, 5].index(done)] if done < 7 else {"content": facts_sentence(task)}


def endless(task: dict[str, Any], done: int) -> dict[str, Any]:
    return tool_calls(("list_sailings", {"route": "Harwick-Lund", "date": "2025-06-13"}))


def overlong(task: dict[str, Any], done: int) -> dict[str, Any]:
    if done:
        raise BadRequest("This model's maximum context length is 10 tokens.")
    return endless(task, done)


def refusing(task: dict[str, Any], done: int) -> dict[str, Any]:
    raise BadRequest("this model knows no tools")


SPECIAL = {"desk-03": clumsy, "desk-09": endless, "desk-22": overlong, "desk-23": refusing}


def assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    task = TASK_BY_OPENING[messages[1]["content"]]
    if task["id"] in SPECIAL:
        return SPECIAL[task["id"]](task, sum(message["role"] == "tool" for message in messages))
    return scripted_assistant(messages)


class RunTasks(rl.FastAlgorithm):
    """Algorithm that rolls out every task once and keeps the results."""

    results: dict[str, FinishedRollout]

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        requests = [rl.EnqueueRolloutRequest(input=row, mode="train") for row in train_dataset]
        ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
        await store.wait_until_decided(rollout_ids=ids, timeout=120)
        self.results = {item.rollout.input["id"]: item for item in await store.collect(ids, with_spans=True)}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(clerk=assistant, customer=scripted_user) as server:
        yield server


@pytest.fixture(scope="module")
def rollouts(
    server: ScriptedServer, shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, FinishedRollout]:
    """Rollouts of all tasks. Assistant and user are two models of one endpoint, each behind its own proxy."""
    resources = {
        "llm": rl.LLM(endpoint=server.url, model="clerk", api_key=KEY, traced=True),
        "user": rl.LLM(endpoint=server.url, model="customer", api_key=KEY, traced=True),
    }
    algorithm = RunTasks()
    with shared_cluster.connected(import_path=ROOT):  # the runners import the agent
        trainer = rl.Trainer(
            algorithm=algorithm,
            output_dir=tmp_path_factory.mktemp("run"),
            progress=False,
            initial_resources=resources,
        )
        rows = [as_row("helpdesk", task) for task in TASKS.values()]
        trainer.fit(CustomerService(user="model", max_steps=MAX_STEPS), rows)
    return algorithm.results


def summary_of(item: FinishedRollout) -> dict[str, Any]:
    """Return the attributes of the span in which the agent summarises the conversation."""
    return next(span.attributes for span in item.spans if "ending" in span.attributes)


def test_a_correct_assistant_is_rewarded(rollouts: dict[str, FinishedRollout]) -> None:
    right = {name: item for name, item in rollouts.items() if name not in SPECIAL}
    assert len(right) == 22
    assert {name: item.rewards for name, item in right.items()} == {
        name: {"reward": 1.0, "database": 1.0, "facts": 1.0} for name in right
    }
    for name, item in right.items():
        assert summary_of(item)["ending"] == "user"
        assert summary_of(item)["steps"] == len(TASKS[name]["gold"]) + 1
        assert summary_of(item)["tool_errors"] == 0


def test_both_agents_are_traced_and_only_the_assistant_is_trained(
    rollouts: dict[str, FinishedRollout], server: ScriptedServer
) -> None:
    for name, item in rollouts.items():
        if name in SPECIAL:
            continue
        steps = len(TASKS[name]["gold"]) + 1
        by_agent = [call.metadata["agent_name"] for call in calls_of(item.spans)]
        assert by_agent == [USER, *[ASSISTANT] * steps, USER]
        assert item.rollout.metadata[TRAINABLE_AGENTS] == [ASSISTANT]
        trained = rl.TracerTraceToTriplet(agent_match=f"^{ASSISTANT}$").adapt(item.spans)
        assert [call.metadata["agent_name"] for call in trained] == [ASSISTANT] * steps
        assert [call.reward for call in trained] == [None] * (steps - 1) + [1.0]
        assert (
            filter_generations(item) == item.generations == []
        )  # the tokens of an external model are unknown
    assert server.keys == {f"Bearer {KEY}"}  # the agent never had the key


def test_every_bad_tool_call_is_an_answer_to_the_assistant(
    rollouts: dict[str, FinishedRollout], server: ScriptedServer
) -> None:
    item = rollouts["desk-03"]
    assert item.rollout.status == "succeeded"
    assert item.reward == 1.0
    assert summary_of(item)["tool_errors"] == 6
    last = [
        body
        for body in server.requests_to("clerk")
        if body["messages"][1]["content"] == TASKS["desk-03"]["script"]["opening"]
    ][-1]
    answers = [message["content"] for message in last["messages"] if message["role"] == "tool"]
    expected = [
        "Error: there is no tool open_hatch; there are find_user",
        "Error: the arguments of find_user must be a JSON object; yours are no JSON (",
        "Error: the arguments of find_user must be a JSON object; yours are a JSON list",
        "Error: the arguments of find_user do not fit: email: Field required",
        "Error: look the customer up first",
        '{"id": "u03"',
        "Error: a saver fare cannot be cancelled later than 48 hours",
    ]
    assert len(answers) == len(expected)
    assert all(answer.startswith(beginning) for answer, beginning in zip(answers, expected, strict=True)), (
        answers
    )


def test_an_endless_conversation_is_stopped_with_reward_0(rollouts: dict[str, FinishedRollout]) -> None:
    item = rollouts["desk-09"]
    assert item.rollout.status == "succeeded"
    assert (summary_of(item)["ending"], summary_of(item)["steps"]) == ("steps", MAX_STEPS)
    assert item.reward == 0.0
    assert (summary_of(rollouts["desk-22"])["ending"], rollouts["desk-22"].reward) == ("room", 0.0)


def test_a_model_that_cannot_be_called_at_all_is_a_failure(rollouts: dict[str, FinishedRollout]) -> None:
    attempt = rollouts["desk-23"].rollout.attempt
    assert "this model knows no tools" in attempt.failure.error


def run(*arguments: str) -> str:
    """Run train.py, and return its output."""
    environment = {**os.environ, "RAY_ADDRESS": "local", "OPENAI_API_KEY": KEY}
    command = [sys.executable, str(TRAIN), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_debug_prints_all_messages_of_both_agents(server: ScriptedServer, tmp_path: Path) -> None:
    shown = run(
        "--model",
        "clerk",
        "--endpoint",
        server.url,
        "--user",
        "model",
        "--user-endpoint",
        server.url,
        "--user-model",
        "customer",
        "--debug",
        "--task",
        "desk-02",
        "--output-dir",
        str(tmp_path),
    )
    calls = [
        line.partition(" (")[0].rpartition(" of ")[2]
        for line in shown.splitlines()
        if "tokens unknown" in line
    ]
    assert calls == ["user", *["assistant"] * 4, "user"]
    assert shown.count("tokens unknown, not trained)") == 2  # the user's
    assert "calls cancel_booking({" in shown
    assert (
        shown.count(TASKS["desk-02"]["script"]["opening"]) == 3
    )  # in the task, in the user's message, and in the assistant's prompt
    assert '[tool] {"booking_id": "B2002", "status": "cancelled", "refund": 16}' in shown
    assert ">>> [assistant] [[END]]" in shown
    assert shown.rstrip().endswith("reward: reward 1, database 1, facts 1")


def test_the_assistant_is_trained_beside_a_fixed_user(server: ScriptedServer, tmp_path: Path) -> None:
    """Three steps of VERL on a model that cannot call tools. The user is on another endpoint."""
    shown = run(
        "--steps",
        "3",
        "--cpu",
        "--user",
        "model",
        "--user-endpoint",
        server.url,
        "--user-model",
        "customer",
        "--output-dir",
        str(tmp_path),
    )
    assert "step 3/3" in shown
    rows = metric_rows(tmp_path)
    steps = [row for row in rows if row["step"]]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["train/trained"] == 4 and row["train/other_agents"] == 0 for row in steps)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["rollouts_lost"]) == (3, 0)

    found = [item for item in rl.read_rollouts(tmp_path) if item.rollout.mode == "train"]
    assert len(found) == 12
    for item in found:
        assert item.rollout.status == "succeeded"
        calls = calls_of(item.spans)
        assert {call.metadata["agent_name"] for call in calls} == {ASSISTANT, USER}
        with_tokens = [call for call in calls if call.response["token_ids"]]
        assert {call.metadata["agent_name"] for call in with_tokens} == {ASSISTANT}
        generations = filter_generations(item)
        assert [generation.agent for generation in generations] == [ASSISTANT] * len(with_tokens)
        assert [generation.output_ids.tolist() for generation in generations] == [
            call.response["token_ids"] for call in with_tokens
        ]
