"""What a conversation is worth: the state of the database, times the facts that the user was told."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Database = dict[str, Any]
Changes = dict[str, Any]
"""New values by their place, such as `bookings.B2001.status`."""


def changes(before: Database, after: Database) -> Changes:
    """What differs between two states of a database of the same shape."""
    found: Changes = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= {f"{key}.{place}": value for place, value in changes(old, new).items()}
        elif old != new:
            found[key] = new
    return found


def share_told(facts: Iterable[str], said: Iterable[str]) -> float:
    """The share of facts that are in what was said; 1 where there are none.

    Args:
        facts: `€16` is an amount in any spelling; anything else stands for itself, with other wordings after a `|`.
    """
    facts, text = list(facts), "\n".join(said)
    return sum(is_told(fact, text) for fact in facts) / len(facts) if facts else 1.0


def is_told(fact: str, text: str) -> bool:
    return any(re.search(_pattern(wording), text, re.IGNORECASE) for wording in fact.split("|"))


def _pattern(wording: str) -> str:
    """A wording as a whole: no part of a longer number, word or time."""
    if not wording.startswith("€"):
        return rf"(?<![\w:.,])(?<!\d-){re.escape(wording)}(?![\w:]|[.,-]\d)"
    amount = rf"(?<![\d.,]){wording[1:]}(?:[.,]00?)?(?![\w:]|[.,]\d)"
    return rf"(?:€|\beuros?|\bEUR)\s?{amount}|{amount}[ -]?(?:€|euros?\b|EUR\b)"
