"""What an environment is to the conversation: tasks, and cases that are opened from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from raylight.errors import ConfigError

ENVIRONMENTS = ("helpdesk", "airline")


class ToolError(Exception):
    """A tool call that was refused. Its text is what the assistant is told."""


@dataclass(frozen=True)
class Person:
    """Whom the simulated user plays; without a name, the goal tells that too.

    `opening` and `answers` are the lines of a scripted user: pairs of a regular expression, looked for in what the assistant says,
    and the answer to it. Without an opening there is no script.
    """

    goal: str
    name: str = ""
    email: str = ""
    opening: str = ""
    answers: tuple[tuple[str, str], ...] = ()


@dataclass
class Transcript:
    """A conversation as it was."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """In OpenAI's shape, as the assistant saw them: system, user, assistant with its tool calls, tool."""
    tool_errors: int = 0
    steps: int = 0
    """Calls of the assistant's model."""
    ending: str = ""
    """`user`: the user was done. `steps`: the assistant had no steps left. `room`: the model's context was full."""

    def said(self) -> list[str]:
        """What the assistant told the user; words beside a tool call do not reach them."""
        return [
            m["content"] or "" for m in self.messages if m["role"] == "assistant" and not m.get("tool_calls")
        ]


class Case(Protocol):
    """One task with a database of its own."""

    policy: str
    person: Person
    tools: list[dict[str, Any]]
    """Function schemas in OpenAI's shape."""

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Carry a tool call out; returns what the assistant is told.

        Raises:
            ToolError: it was refused, and changed nothing.
        """

    def grade(self, transcript: Transcript) -> dict[str, float]:
        """Rewards, each from 0 to 1; the first one counts, and is the product of the others."""


class Domain(Protocol):
    """An environment: its tasks, and how one is opened."""

    def tasks(self) -> list[dict[str, Any]]:
        """All tasks; each has an `id`."""

    def open(self, task: dict[str, Any]) -> Case:
        """A case that nobody has touched."""


def find_domain(name: str) -> Domain:
    """The environment of this name.

    Raises:
        ConfigError: there is none, or what it needs is not installed.
    """
    if name == "helpdesk":
        from examples.tau2_agent.helpdesk.desk import HelpDesk

        return HelpDesk()
    if name == "airline":
        from examples.tau2_agent.airline import Airline

        return Airline()
    raise ConfigError(f"there is no environment {name!r}; there are {', '.join(ENVIRONMENTS)}")
