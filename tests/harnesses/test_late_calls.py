"""A program that keeps its key, and calls the model after its rollout."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from engine_server import MODEL
from scripted_repairer import RepairServer

import raylight as rl
from raylight.harnesses.program import CommandResult
from raylight.semconv import PROMPT_SOURCE
from raylight.traces.reward_spans import find_final_reward


@pytest.fixture(scope="module")
def server() -> Iterator[RepairServer]:
    server = RepairServer("true")
    yield server
    server.close()


def ask(address: str, key: str) -> int:
    """Call the model. Return the status of the answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_call_after_the_end_is_refused_and_not_recorded(server: RepairServer) -> None:
    kept: list[str] = []

    def score(task: Any, result: CommandResult) -> float:
        kept.extend(result.stdout.split())
        return float(ask(*kept) == 200)

    agent = rl.CommandAgent(["sh", "-c", 'echo "$OPENAI_BASE_URL $OPENAI_API_KEY"'], reward=score)
    own, finished = server.roll_out("task", agent)
    assert find_final_reward(own) == 1.0
    assert 400 <= ask(*kept) < 500
    (again,) = server.call(server.store.collect([finished.rollout.rollout_id], with_spans=True))
    assert len([span for span in again.spans if PROMPT_SOURCE in span.attributes]) == 1
