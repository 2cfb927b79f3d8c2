"""Grading of a conversation: the state of the database, times the share of facts that the user received."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Database = dict[str, Any]
Changes = dict[str, Any]
"""New values by dotted path, such as `bookings.B2001.status`."""


def changes(before: Database, after: Database) -> Changes:
    """Return the differences between two states of a database."""
    found: Changes = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= {f"{key}.{place}": value for place, value in changes(old, new).items()}
        elif old != new:
            found[key] = new
    return found


def share_told(facts: Iterable[str], said: Iterable[str]) -> float:
    """Return the share of facts that the messages contain; 1 if there are no facts.

    Args:
        facts: `€16` matches an amount in any spelling; other facts match literally, with alternatives after a
            `|`.
    """
    facts, text = list(facts), "\n".join(said)
    return sum(is_told(fact, text) for fact in facts) / len(facts) if facts else 1.0


def is_told(fact: str, text: str) -> bool:
    return any(re.search(_pattern(wording), text, re.IGNORECASE) for wording in fact.split("|"))


def _pattern(wording: str) -> str:
    """Pattern that matches a wording, but not as a part of a longer number, word or time."""
    if not wording.startswith("€"):
        return rf"(?<![\w:.,])(?<!\d-){re.escape(wording)}(?![\w:]|[.,-]\d)"
    amount = rf"(?<![\d.,]){wording[1:]}(?:[.,]00?)?(?![\w:]|[.,]\d)"
    return rf"(?:€|\beuros?|\bEUR)\s?{amount}|{amount}[ -]?(?:€|euros?\b|EUR\b)"
