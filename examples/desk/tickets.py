"""Tickets of customers, and what each desk should do with them."""

from __future__ import annotations

import random
from typing import Literal

Action = Literal["track", "resend", "refund", "invoice", "replace", "label", "forward"]
PROBLEMS: dict[str, tuple[str, Action]] = {
    "is late": ("shipping", "track"),
    "is lost": ("shipping", "resend"),
    "was paid twice": ("billing", "refund"),
    "has no receipt": ("billing", "invoice"),
    "is broken": ("returns", "replace"),
    "is too small": ("returns", "label"),
}
"""Desk and action for each problem."""
DESKS = ("shipping", "billing", "returns")
ITEMS = ("lamp", "chair", "coat", "clock", "phone", "book", "bag", "shirt")


def make_tickets(count: int, seed: int) -> list[dict[str, str]]:
    """Return tickets with equally many of each problem, in random order."""
    chance, problems = random.Random(seed), list(PROBLEMS)
    tickets = [{"problem": problems[i % len(problems)], "item": chance.choice(ITEMS)} for i in range(count)]
    return chance.sample(tickets, count)


def ticket_text(ticket: dict[str, str]) -> str:
    return f"My {ticket['item']} {ticket['problem']}."


def right_action(ticket: dict[str, str], desk: str) -> Action:
    """Return what a desk should do: a wrong one forwards the ticket."""
    responsible, action = PROBLEMS[ticket["problem"]]
    return action if desk == responsible else "forward"
