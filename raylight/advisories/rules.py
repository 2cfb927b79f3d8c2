"""Rules of the advisories, from `rules.yaml`: each with its condition, its text and its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from raylight._utils.files import read_table
from raylight.advisories import conditions
from raylight.advisories.conditions import Find
from raylight.types import JsonObject

Level = Literal["alarm", "warning", "hint"]


class Rule(NamedTuple):
    """A condition on the history of a run, and its meaning."""

    kind: str
    level: Level
    find: Find
    text: str
    remedy: str


def _rule(kind: str, entry: JsonObject) -> Rule:
    find = entry.get("find", kind)
    if isinstance(find, dict):
        ((maker, arguments),) = find.items()
        condition = getattr(conditions, maker)(*arguments)
    else:
        condition = getattr(conditions, find)
    return Rule(kind, entry["level"], condition, entry["text"], entry["remedy"])


RULES = [_rule(kind, entry) for kind, entry in read_table(Path(__file__).with_name("rules.yaml")).items()]
"""All rules, alarms first."""
