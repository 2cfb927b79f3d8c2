"""Group rewards: functions of all finished rollouts of a group, and the grades that they give.

A group reward is called once all rollouts of a group are decided, with those that succeeded. It returns a
reward for each, in their order: a number, a dict of named rewards of which the first one counts, or None for
a rollout that is not scored. It may be a coroutine function. The agent's own rewards keep their names.
"""

from __future__ import annotations

import contextvars
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from raylight._utils.agent_threads import AgentThreads
from raylight.errors import GroupRewardError, RewardError
from raylight.traces.messages import Message, OpenAIMessages, TraceToMessages
from raylight.traces.reward_spans import named_rewards
from raylight.types import FinishedRollout, JsonObject, SpanCoreFields


@dataclass
class GradeRecords:
    """Records of a call of a group reward, in addition to the rewards that it returns."""

    spans: list[SpanCoreFields] = field(default_factory=list)
    turns: dict[str, dict[str, float]] = field(default_factory=dict)
    """Rewards of turns by call id, of each rollout by id."""


_RECORDED: contextvars.ContextVar[GradeRecords | None] = contextvars.ContextVar(
    "raylight_group_reward", default=None
)
"""Records of the current call of a group reward."""


@dataclass(frozen=True, eq=False)
class GroupRollout:
    """A succeeded rollout, as a group reward reads it."""

    finished: FinishedRollout
    """The rollout with its spans."""

    @property
    def task(self) -> Any:
        """The task, as the agent received it."""
        return self.finished.rollout.input

    @property
    def reward(self) -> float | None:
        """The agent's own reward; None if it returned none."""
        return self.finished.reward

    @property
    def rewards(self) -> dict[str, float]:
        """All rewards that the agent returned, by name."""
        return self.finished.rewards

    @cached_property
    def _calls(self) -> list[OpenAIMessages]:
        return TraceToMessages().adapt(self.finished.spans)

    @cached_property
    def conversations(self) -> list[list[Message]]:
        """The conversations with the model, each with its last answer: those that no later call continues."""
        calls = [call["messages"] for call in self._calls]
        return [
            messages
            for number, messages in enumerate(calls)
            if not any(later[: len(messages)] == messages for later in calls[number + 1 :])
        ]

    @property
    def messages(self) -> list[Message]:
        """The last conversation; empty if the agent called no model."""
        return self.conversations[-1] if self.conversations else []

    @property
    def tools(self) -> list[JsonObject] | None:
        """The tools of the last call, in OpenAI's shape; None if the agent offered none."""
        return self._calls[-1]["tools"] if self._calls else None

    @property
    def answer(self) -> str:
        """Text of the last answer; empty if there is none."""
        return message_text(self.messages[-1]) if self.messages else ""

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens of all calls."""
        return sum(len(call.output_ids) for call in self.finished.generations)


RolloutReward: TypeAlias = float | Mapping[str, float] | None
GroupReward: TypeAlias = Callable[
    [list[GroupRollout]], Sequence[RolloutReward] | Awaitable[Sequence[RolloutReward]]
]
"""Function from the rollouts of a group to their rewards."""


def identify(function: Callable[..., object]) -> object:
    """Return what a resumed run compares of a group reward, as JSON: "module:name" of the function, or of the
    class, with the attribute `identity` if it has one."""
    named = function if hasattr(function, "__qualname__") else type(function)
    name, arguments = f"{named.__module__}:{named.__qualname__}", getattr(function, "identity", None)
    return name if arguments is None else {name: json.loads(json.dumps(arguments, default=repr))}


async def call_group_reward(function: GroupReward, group: list[GroupRollout]) -> list[dict[str, float]]:
    """Return the named rewards of each rollout of a group, empty for one that is not scored.

    A plain function runs in a daemon thread. If the caller is cancelled, the thread is abandoned.

    Raises:
        GroupRewardError: the result is not one reward for each rollout.
        Exception: the error of the function.
    """
    result: Any
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        result = function(group)
    else:
        result = await run_plain(function, group)
    if inspect.isawaitable(result):
        result = await result
    title = getattr(function, "__name__", type(function).__name__)
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
        raise GroupRewardError(
            f"the group reward {title} returned a {type(result).__name__}; return a list with a reward for "
            "each rollout of the group"
        )
    if len(result) != len(group):
        raise GroupRewardError(
            f"the group reward {title} returned {len(result)} rewards for {len(group)} rollouts; return "
            "one for each, in their order"
        )
    try:
        return [{} if reward is None else named_rewards(reward) for reward in result]
    except RewardError as error:
        raise GroupRewardError(f"the group reward {title} returned a wrong reward: {error}") from None


async def run_plain(function: Callable[..., object], *args: object) -> Any:
    """Return the result of a plain function, which a daemon thread calls."""
    result, error = await AgentThreads().run(function, *args)
    if error is not None:
        raise error
    return result


@contextmanager
def recording() -> Iterator[GradeRecords]:
    """Collect what `record` and `record_turns` receive within the block, also from its threads and tasks."""
    records = GradeRecords()
    token = _RECORDED.set(records)
    try:
        yield records
    finally:
        _RECORDED.reset(token)


def record(span: SpanCoreFields) -> None:
    """Record a span of the current call of a group reward; without one, drop it."""
    records = _RECORDED.get()
    if records is not None:
        records.spans.append(span)


def record_turns(rollout_id: str, rewards: Mapping[str, float]) -> None:
    """Record the rewards of a rollout's turns, by call id, for the current call of a group reward; without
    one, drop them."""
    records = _RECORDED.get()
    if records is not None:
        records.turns[rollout_id] = dict(rewards)


def message_text(message: Message) -> str:
    """Return the text of a message, the texts of its parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""
