"""The help desk as an environment."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from examples.tau2_agent.domain import Person, Transcript
from examples.tau2_agent.helpdesk.grading import changes, share_told
from examples.tau2_agent.helpdesk.tools import Rendezvous

FOLDER = Path(__file__).parent


@functools.cache
def read_file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


class DeskCase:
    """A customer with a wish, and a database of their own."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._before = json.loads(read_file("db.json"))
        self._desk = Rendezvous(copy.deepcopy(self._before))
        self._expected = task["expected"]
        script = task["script"]
        answers = tuple((answer["heard"], answer["say"]) for answer in script["answers"])
        self.person = Person(**task["user"], opening=script["opening"], answers=answers)
        self.policy = read_file("policy.md")
        self.tools = self._desk.schemas()

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        return self._desk.call(name, arguments)

    def changed(self) -> dict[str, Any]:
        """What is different in the database."""
        return changes(self._before, self._desk.database)

    def grade(self, transcript: Transcript) -> dict[str, float]:
        """`database`: 1 if exactly the expected changes were made. `facts`: the share of the facts that were told. `reward`: their
        product, and 0 for a conversation that did not come to its end."""
        database = float(self.changed() == self._expected["changes"])
        facts = share_told(self._expected["facts"], transcript.said())
        return {
            "reward": database * facts * (transcript.ending == "user"),
            "database": database,
            "facts": facts,
        }


class HelpDesk:
    """26 customers of a ferry line. A task has `user` (who is played), `script` (a scripted user's lines), `gold` (tool calls that
    solve it) and `expected` (the changes they make in the database, one of which is always who was looked up, and the facts that
    the user is to be told)."""

    def tasks(self) -> list[dict[str, Any]]:
        return json.loads(read_file("tasks.json"))

    def open(self, task: dict[str, Any]) -> DeskCase:
        return DeskCase(task)
