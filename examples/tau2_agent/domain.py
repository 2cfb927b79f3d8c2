"""Interface of an environment: tasks, and the cases that are opened from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from raylight.errors import ConfigError

ENVIRONMENTS = ("helpdesk", "airline")


class ToolError(Exception):
    """A tool call was rejected. The message is returned to the assistant."""


@dataclass(frozen=True)
class Person:
    """Person that the simulated user plays; the goal describes one without a name.

    `opening` and `answers` are the script: each answer is a pair of a regular expression, which is searched
    in the assistant's message, and the reply. Without an opening there is no script.
    """

    goal: str
    name: str = ""
    email: str = ""
    opening: str = ""
    answers: tuple[tuple[str, str], ...] = ()


@dataclass
class Transcript:
    """Record of a conversation."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages in OpenAI's format, as the assistant received them: system, user, assistant with its tool
    calls, tool."""
    tool_errors: int = 0
    steps: int = 0
    """Number of the assistant's model calls."""
    ending: str = ""
    """`user`: the user was done.

    `steps`: the assistant had no steps left. `room`: the model's context was full.
    """

    def said(self) -> list[str]:
        """Return the assistant's messages to the user; text of a message with tool calls is not sent to the
        user."""
        return [
            m["content"] or "" for m in self.messages if m["role"] == "assistant" and not m.get("tool_calls")
        ]


class Case(Protocol):
    """One task with its own database."""

    policy: str
    person: Person
    tools: list[dict[str, Any]]
    """Function schemas in OpenAI's format."""

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Execute a tool call; returns its result as text.

        Raises:
            ToolError: the call was rejected, and changed nothing.
        """

    def grade(self, transcript: Transcript) -> dict[str, float]:
        """Return rewards from 0 to 1; the first is the primary one, and the product of the others."""


class Domain(Protocol):
    """An environment with tasks."""

    def tasks(self) -> list[dict[str, Any]]:
        """Return all tasks; each has an `id`."""

    def open(self, task: dict[str, Any]) -> Case:
        """Open a task as a new case, in its initial state."""


def find_domain(name: str) -> Domain:
    """Return the environment with this name.

    Raises:
        ConfigError: the environment is unknown, or its package is not installed.
    """
    if name == "helpdesk":
        from examples.tau2_agent.helpdesk.desk import HelpDesk

        return HelpDesk()
    if name == "airline":
        from examples.tau2_agent.airline import Airline

        return Airline()
    raise ConfigError(f"unknown environment {name!r}; choose one of {', '.join(ENVIRONMENTS)}")
