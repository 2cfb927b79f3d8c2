"""Conversations of both agents, from which the tiny model learns to be half right."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, get_args

from agent import SOLVER, TRIAGE
from tickets import DESKS, PROBLEMS, Action, make_tickets, right_action, ticket_text

ACT = {
    "name": "final_result",
    "description": "Take an action.",
    "parameters": {
        "type": "object",
        "properties": {"action": {"type": "string", "enum": list(get_args(Action))}},
        "required": ["action"],
    },
}
"""The tool by which pydantic-ai asks for the solver's output."""


def demonstrate(seed: int) -> Iterator[dict[str, Any]]:
    """Yield a triage of each ticket, and a solution at a desk that is the right one half of the time."""
    chance = random.Random(seed)
    for ticket in make_tickets(256, seed):
        responsible = PROBLEMS[ticket["problem"]][0]
        yield {"messages": [*asked(TRIAGE, ticket), {"role": "assistant", "content": responsible}]}
        desk = chance.choice([responsible, chance.choice(DESKS)])
        arguments = json.dumps({"action": right_action(ticket, desk)})
        call = {"type": "function", "function": {"name": ACT["name"], "arguments": arguments}}
        answer = {"role": "assistant", "tool_calls": [{"id": "call_1", **call}]}
        tools = [{"type": "function", "function": ACT}]
        yield {"messages": [*asked(SOLVER.format(desk=desk), ticket), answer], "tools": tools}


def asked(instructions: str, ticket: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages that pydantic-ai sends."""
    return [{"role": "system", "content": instructions}, {"role": "user", "content": ticket_text(ticket)}]
