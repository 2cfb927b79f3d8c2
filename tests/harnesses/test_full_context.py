"""Harnesses with a conversation that is longer than the model's context."""

from collections.abc import Iterator
from typing import Any

import pytest
from harness_helpers import REPAIR, TASK, agent_of, needs
from scripted_repairer import RepairServer

from raylight.traces.reward_spans import find_final_reward

pytestmark = pytest.mark.slow
LONGEST = 10_000
"""Characters of tool results that the model's context holds."""
LONG = f"{REPAIR}; [ -e long ] || {{ touch long; yes 0123456789 | head -c {2 * LONGEST}; }}"
"""Repair with an output that does not fit, the first time."""
MOST_REQUESTS = 6
"""Requests of a harness that tries to shorten its conversation once or twice."""


@pytest.fixture
def server() -> Iterator[RepairServer]:
    server = RepairServer(LONG)
    yield server
    server.close()


def tool_results(messages: list[dict[str, Any]]) -> list[str]:
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


def test_opencode_compacts_its_conversation_and_goes_on(server: RepairServer) -> None:
    needs("opencode")
    server.fits = lambda messages: sum(map(len, tool_results(messages))) < LONGEST
    own, _ = server.roll_out(TASK, agent_of("opencode", scores_failures=True))
    assert find_final_reward(own) == 1.0
    first, full, compaction, *rest = server.requests
    assert not server.fits(full["messages"])
    assert full["tools"] == first["tools"]
    assert not compaction.get("tools")
    assert [server.fits(request["messages"]) for request in rest] == [True, True]


@pytest.mark.parametrize("preset", ["codex", "claude-code", "mini-swe-agent", "qwen-code"])
def test_a_harness_whose_context_stays_full_ends(server: RepairServer, preset: str) -> None:
    needs(preset)
    server.fits = lambda messages: not tool_results(messages)
    own, _ = server.roll_out(TASK, agent_of(preset, scores_failures=True))
    assert own[0].attributes["agentlightning.operation.output.timed_out"] is False
    assert find_final_reward(own) == 1.0  # of what it did before
    assert len(server.requests) <= MOST_REQUESTS
