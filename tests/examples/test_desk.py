"""Recipe `desk`: each agent is rewarded for its own work, and three steps train both."""

from pathlib import Path
from typing import Any

import pytest
from example_modules import example_module, train_three_steps
from math_helpers import ScriptedModel, calling

import raylight as rl

pytestmark = pytest.mark.framework("pydantic_ai")
TICKET = {"problem": "was paid twice", "item": "coat"}


@pytest.mark.parametrize(
    ("desk", "action", "rewards", "settled"),
    [
        ("billing", "refund", {"triage": 1, "solver": 1}, 1),
        ("billing", "track", {"triage": 1, "solver": 0}, 0),
        ("shipping", "forward", {"triage": 0, "solver": 1}, 0),
        ("shipping", "refund", {"triage": 0, "solver": 0}, 0),
        (" Billing.\n", "refund", {"triage": 1, "solver": 1}, 1),
        ("bills", "", {"triage": 0}, 0),
    ],
)
async def test_each_agent_is_rewarded_for_its_own_work(
    monkeypatch: pytest.MonkeyPatch, desk: str, action: str, rewards: dict[str, int], settled: float
) -> None:
    emitted: dict[str, float] = {}
    monkeypatch.setattr(rl, "emit_reward", lambda value, agent: emitted.update({agent: value}))

    def script(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        return calling("", arguments=f'{{"action": "{action}"}}')(tools) if tools else {"content": desk}

    with ScriptedModel(script) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        assert await example_module("desk", "agent").answer_ticket(TICKET, llm) == settled
    assert emitted == rewards


async def test_demonstrations_are_what_the_agents_send() -> None:
    triage, solver, *_ = example_module("desk", "demonstrations").demonstrate(0)
    tickets = example_module("desk", "tickets")
    ticket = tickets.make_tickets(256, 0)[0]
    tool = solver["tools"][0]["function"]
    answers = (
        {"content": tickets.PROBLEMS[ticket["problem"]][0]},
        calling("", arguments='{"action": "track"}'),
    )
    with ScriptedModel(lambda messages, tools: answers[1](tools) if tools else answers[0]) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        await example_module("desk", "agent").answer_ticket(ticket, llm)
    asked, ordered = model.requests
    assert asked["messages"] == triage["messages"][:-1]
    assert ordered["messages"][1] == solver["messages"][1]
    sent = ordered["tools"][0]["function"]
    assert {key: sent[key] for key in ("name", "description")} == {
        key: tool[key] for key in ("name", "description")
    }
    assert sent["parameters"]["properties"] == tool["parameters"]["properties"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_train_both_agents(tmp_path: Path) -> None:
    steps = train_three_steps("desk", tmp_path)
    assert all({"agent/triage/reward", "agent/solver/reward"} <= step.keys() for step in steps)
