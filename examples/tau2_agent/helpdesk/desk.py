"""Environment with the help desk of a ferry line."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from examples.tau2_agent.domain import Person, Transcript
from examples.tau2_agent.helpdesk.grading import changes, share_told
from examples.tau2_agent.helpdesk.tools import BookingSystem

FOLDER = Path(__file__).parent


@functools.cache
def read_file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


class DeskCase:
    """A task with its own database."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._before = json.loads(read_file("db.json"))
        self._desk = BookingSystem(copy.deepcopy(self._before))
        self._expected = task["expected"]
        script = task["script"]
        answers = tuple((answer["heard"], answer["say"]) for answer in script["answers"])
        self.person = Person(**task["user"], opening=script["opening"], answers=answers)
        self.policy = read_file("policy.md")
        self.tools = self._desk.schemas()

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        return self._desk.call(name, arguments)

    def changed(self) -> dict[str, Any]:
        """Return the changes of the database."""
        return changes(self._before, self._desk.database)

    def grade(self, transcript: Transcript) -> dict[str, float]:
        """Return the rewards.

        `database` is 1 if exactly the expected changes were made, `facts` the share of the facts that the
        user received. `reward` is their product, or 0 for a conversation that did not end.
        """
        database = float(self.changed() == self._expected["changes"])
        facts = share_told(self._expected["facts"], transcript.said())
        return {
            "reward": database * facts * (transcript.ending == "user"),
            "database": database,
            "facts": facts,
        }


class HelpDesk:
    """Help desk of a ferry line, with 26 tasks.

    A task has `user` (the person), `script` (the lines of a scripted user), `gold` (tool calls that solve it)
    and `expected` (their changes of the database, which always include the customer who was looked up, and
    the facts that the user must receive).
    """

    def tasks(self) -> list[dict[str, Any]]:
        return json.loads(read_file("tasks.json"))

    def open(self, task: dict[str, Any]) -> DeskCase:
        return DeskCase(task)
