"""Environment with the airline domain of tau2-bench (https://arxiv.org/abs/2506.07982): database, tools,
policy and tasks."""

from __future__ import annotations

import functools
import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from examples.tau2_agent.domain import Person, ToolError, Transcript
from raylight.errors import ConfigError

VARIABLE = "TAU2_DATA_DIR"
LAYOUTS = ("tau2/domains/airline", "data/tau2/domains/airline", "domains/airline", "airline", ".")
"""Possible locations of its files below `TAU2_DATA_DIR`: as in tau2's `data` folder, in its repository, or
flat."""
FILES = ("db.json", "policy.md", "tasks.json")
PARTS = {
    "loguru": ("logger",),
    "tau2.data_model.message": ("AssistantMessage", "ToolCall"),
    "tau2.data_model.tasks": ("RewardType", "Task"),
    "tau2.domains.airline.data_model": ("FlightDB",),
    "tau2.domains.airline.tools": ("AirlineTools",),
    "tau2.environment.environment": ("Environment",),
    "tau2.evaluator.evaluator_communicate": ("CommunicateEvaluator",),
    "tau2.evaluator.evaluator_env": ("EnvironmentEvaluator",),
}
"""Names that are imported from tau2 and from its logging library, by module."""


def find_data() -> Path:
    """Return the folder with the domain's files.

    Raises:
        ConfigError: `TAU2_DATA_DIR` is not set, or the files are not there.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        raise ConfigError(
            f"{VARIABLE} is not set; set it to the `data` folder of a copy of the tau2-bench repository"
        )
    for layout in LAYOUTS:
        folder = Path(root).expanduser() / layout
        if all((folder / name).is_file() for name in FILES):
            return folder
    places = ", ".join(layout if layout != "." else "that folder itself" for layout in LAYOUTS)
    raise ConfigError(
        f"the airline's {', '.join(FILES)} were not found below {VARIABLE}={root} (in {places}). Set it to "
        "the `data` folder of a copy of the tau2-bench repository"
    )


@functools.cache
def tau2() -> SimpleNamespace:
    """Return the imported names of tau2.

    Raises:
        ConfigError: tau2 is not installed, or another package has its name.
    """
    found = SimpleNamespace()
    for module, names in PARTS.items():
        try:
            loaded = importlib.import_module(module)
            for name in names:
                setattr(found, name, getattr(loaded, name))
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the airline needs tau2-bench, and {module} cannot be loaded ({error}); install it from a "
                "copy of its repository, `pip install -e path/to/tau2-bench` (the package `tau2` on PyPI is "
                "another project)"
            ) from error
    found.logger.disable("tau2")  # it logs every message of every task
    return found


@functools.cache
def _database() -> Any:
    return tau2().FlightDB.load(find_data() / "db.json")


def new_environment(**_: Any) -> Any:
    """Create tau2's airline with its initial database. tau2's evaluator passes arguments that are not needed
    here."""
    policy = (find_data() / "policy.md").read_text(encoding="utf-8")
    return tau2().Environment(
        domain_name="airline", policy=policy, tools=tau2().AirlineTools(_database().model_copy(deep=True))
    )


class AirlineCase:
    """One of tau2's tasks, with tau2's rewards: the state of the database, times the communication of all
    facts."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = tau2().Task.model_validate(task)
        self._environment = new_environment()
        self._history: list[Any] = []
        """Tool calls and their results, as messages of tau2."""
        if (start := self._task.initial_state) is not None:
            self._history = list(start.message_history or ())
            self._environment.set_state(
                start.initialization_data, start.initialization_actions, self._history
            )
        self.person = Person(goal=str(self._task.user_scenario))
        self.policy = self._environment.get_policy()
        self.tools = [tool.openai_schema for tool in self._environment.get_tools()]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        call = tau2().ToolCall(id=f"call-{len(self._history)}", name=name, arguments=arguments)
        answer = self._environment.get_response(call)
        self._history += [tau2().AssistantMessage(role="assistant", tool_calls=[call]), answer]
        if answer.error:
            raise ToolError((answer.content or "").removeprefix("Error: "))
        return answer.content or ""

    def grade(self, transcript: Transcript) -> dict[str, float]:
        """Return the rewards.

        `database` and `facts` come from tau2's evaluators; each is 1 if the task does not use it. `reward` is
        their product, or 0 for a conversation that did not end.
        """
        criteria, kind = self._task.evaluation_criteria, tau2().RewardType
        counted = set(criteria.reward_basis) if criteria else set()
        database = facts = 1.0
        if counted & {kind.DB, kind.ENV_ASSERTION}:
            evaluator = tau2().EnvironmentEvaluator
            database = evaluator.calculate_reward(new_environment, self._task, self._history).reward
        if kind.COMMUNICATE in counted:
            messages = [tau2().AssistantMessage(role="assistant", content=text) for text in transcript.said()]
            facts = tau2().CommunicateEvaluator.calculate_reward(self._task, messages).reward
        return {
            "reward": database * facts * (transcript.ending == "user"),
            "database": database,
            "facts": facts,
        }


class Airline:
    """tau2-bench's airline, with the tasks of its `tasks.json`.

    A model has to play the user: there are no scripts.
    """

    def tasks(self) -> list[dict[str, Any]]:
        folder = find_data()
        tau2()
        return json.loads((folder / "tasks.json").read_text(encoding="utf-8"))

    def open(self, task: dict[str, Any]) -> AirlineCase:
        return AirlineCase(task)
