"""Environment classes as agents, such as TRL's `environment_factory` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raylight.agent.decorators import FunctionalLitAgent
from raylight.agent.resources import LLM, check_sampling
from raylight.environments.live_environment import (
    Factory,
    LiveEnvironment,
    check_positive,
    instance_type,
    tool_schemas,
)
from raylight.environments.tool_loop import MAX_RESULT, run_tool_loop
from raylight.errors import AgentSignatureError, DatasetError
from raylight.types import JsonObject

Messages = list[JsonObject]


def environment(
    factory: Factory | Mapping[str, Factory],
    *,
    max_turns: int = 10,
    reward: Callable[[Any, Messages], object] | None = None,
    sampling: Mapping[str, object] | None = None,
    tool_timeout_s: float = 300.0,
    max_result: int = MAX_RESULT,
    trained_agents: str | None = None,
) -> FunctionalLitAgent:
    """Make an agent from an environment class, as TRL's `environment_factory` takes it.

    Each rollout creates an environment and calls `reset(**row)` with the columns of its task. The text that
    this returns is appended to the last message of the row's `prompt`. The model may call the public methods
    of the class as tools, which are described by their type hints and docstrings. The reward is read when the
    model answers without a tool call: the result of `get_reward()`, or the attribute, property or method
    `reward`. Then `close()` is called, if the class has it.

    All methods may be asynchronous. The others run in one thread for each rollout, one after
    another. The model reads the error of a tool that raises.

    Args:
        factory: a class, a function that returns an environment, or a dict of these by name. With a dict the
            column `environment` of a task names the one to use, and `reset` does not receive this column.
        max_turns: model calls of a rollout at most.
        reward: receives the environment and the whole conversation at the end and returns the reward, in
            place of the class's own.
        sampling: sampling parameters of model calls. Default: temperature 1 and 512 tokens at most.
        tool_timeout_s: seconds that a call of an environment's method may take.
        max_result: characters of a tool's result that the model receives.
        trained_agents: as in `LitAgent`.

    Raises:
        AgentSignatureError: a class has no `reset`, or one of its tools has no docstring or type hint.
        ConfigError: an argument is out of range.
    """
    factories = dict(factory) if isinstance(factory, Mapping) else {None: factory}
    if not factories:
        raise AgentSignatureError(
            "rl.environments.environment got an empty dict; give at least one environment class"
        )
    check_positive("environment(max_turns)", max_turns)
    check_positive("environment(tool_timeout_s)", tool_timeout_s, float)
    check_positive("environment(max_result)", max_result)
    rollouts = EnvironmentRollouts(
        factories=factories,
        schemas={name: tool_schemas(instance_type(make)) for name, make in factories.items()},
        max_turns=max_turns,
        reward=reward,
        sampling=check_sampling(dict(sampling or {})),
        tool_timeout_s=tool_timeout_s,
        max_result=max_result,
    )
    return FunctionalLitAgent(rollouts, trained_agents=trained_agents)


@dataclass(frozen=True, eq=False)
class EnvironmentRollouts:
    """Rollout function of `environment`, which has the arguments' meaning."""

    factories: dict[Any, Factory]
    schemas: dict[object, list[JsonObject]]
    max_turns: int
    reward: Callable[[Any, Messages], object] | None
    sampling: JsonObject
    tool_timeout_s: float
    max_result: int

    @property
    def __name__(self) -> str:
        names = [getattr(factory, "__name__", repr(factory)) for factory in self.factories.values()]
        return f"environment({', '.join(names)})"

    async def __call__(self, task: Any, llm: LLM) -> dict[str, float]:
        """Run one rollout; return its rewards by name."""
        name, row = self._choose(task)
        live = LiveEnvironment(self.schemas[name], self.tool_timeout_s, self.max_result)
        try:
            await live.start(self.factories[name])
            observation = await live.call("reset", row)
            messages = first_messages(row, observation)
            end = await run_tool_loop(llm, messages, live, max_turns=self.max_turns, sampling=self.sampling)
            return await live.read_reward(self.reward, end.messages)
        finally:
            await live.close()

    def _choose(self, task: object) -> tuple[object, JsonObject]:
        """Return the name of a task's environment, and the columns for its `reset`."""
        if not isinstance(task, Mapping) or not all(isinstance(key, str) for key in task):
            raise DatasetError(
                f"rl.environments.environment got the task {task!r:.80}; its tasks are dicts, whose items "
                "reset receives as keyword arguments"
            )
        row = dict(task)
        if None in self.factories:
            return None, row
        name = row.pop("environment", None)
        if name not in self.factories:
            known = ", ".join(map(repr, self.factories))
            raise DatasetError(
                f"the column 'environment' of a task is {name!r:.80}; rl.environments.environment has {known}"
            )
        return name, row


def first_messages(row: Mapping[str, object], observation: object) -> Messages:
    """Return the messages before the first model call.

    Args:
        row: the task, whose `prompt` is a text or a list of messages; without it an empty user message.
        observation: result of `reset`: a text or a list of content parts, which is appended to the content of
            the last message, or None.

    Raises:
        DatasetError: the prompt is neither a text nor a list of messages.
        AgentSignatureError: the observation has another type.
    """
    prompt = row.get("prompt", "")
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(given, list) or not given or not all(isinstance(part, Mapping) for part in given):
        raise DatasetError(
            f"the column 'prompt' of a task is {prompt!r:.80}; rl.environments.environment takes "
            "a text or a list of messages"
        )
    messages = [dict(message) for message in given]
    if observation is None:
        return messages
    if not isinstance(observation, str | list):
        raise AgentSignatureError(
            f"reset returned {observation!r:.80} of type {type(observation).__name__}; it returns the first "
            "observation as text, or None"
        )
    content = messages[-1].get("content") or ""
    if isinstance(content, str) and isinstance(observation, str):
        messages[-1]["content"] = content + observation
    else:
        messages[-1]["content"] = [*content_parts(content), *content_parts(observation)]
    return messages


def content_parts(content: str | list[object]) -> list[object]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content
