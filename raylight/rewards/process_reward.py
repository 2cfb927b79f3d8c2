"""Process rewards: a group reward that scores every turn of a rollout."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from raylight._utils.aio import task_group
from raylight.errors import ConfigError, GroupRewardError
from raylight.rewards.group import GroupReward, GroupRollout, call_group_reward, identify, record_turns
from raylight.rewards.scoring_model import ScoringModel, find_reward_models
from raylight.traces.messages import OpenAIMessages, TraceToMessages


@dataclass(frozen=True, eq=False)
class RolloutTurn(GroupRollout):
    """A turn of a rollout, as a process reward reads it: a rollout that ends with the answer of one call.

    `messages`, `answer`, `tools` and `sampled_tokens` belong to the call.
    """

    number: int
    """Index of the call in its rollout."""
    call_id: str
    call: OpenAIMessages

    @cached_property
    def _calls(self) -> list[OpenAIMessages]:
        return [self.call]

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens of the call."""
        calls = self.finished.generations
        return sum(len(call.output_ids) for call in calls if call.key.call_id == self.call_id)


class ProcessReward:
    """Group reward by `rl.rewards.each_turn`: it keeps the final rewards, and adds a reward for each turn.

    The mean over the turns of a rollout is a named reward, for the metrics.
    """

    def __init__(self, reward: GroupReward, final: GroupReward | None, name: str) -> None:
        self._reward, self._final, self.name = reward, final, name
        self.identity = [identify(reward), None if final is None else identify(final), name]

    @property
    def reward_models(self) -> list[ScoringModel]:
        """The reward models that it calls."""
        return [*find_reward_models(self._reward), *find_reward_models(self._final)]

    async def __call__(self, group: list[GroupRollout]) -> list[dict[str, float] | None]:
        if self._final is None:
            finals = [dict(rollout.rewards) for rollout in group]
        else:
            finals = await call_group_reward(self._final, group)
        scores = await self._score(group)
        return [
            self._combine(rollout, final, scores.get(rollout.finished.rollout.rollout_id, {}))
            for rollout, final in zip(group, finals, strict=True)
        ]

    async def _score(self, group: list[GroupRollout]) -> dict[str, dict[str, float]]:
        """Return the scores of the turns of each rollout, by rollout id and call id."""
        turns = [turn for rollout in group for turn in turns_of(rollout)]
        numbers = sorted({turn.number for turn in turns})
        compared: list[list[GroupRollout]] = [
            [turn for turn in turns if turn.number == number] for number in numbers
        ]
        async with task_group() as tasks:
            calls = [tasks.create_task(call_group_reward(self._reward, one)) for one in compared]
        scores: dict[str, dict[str, float]] = {}
        for scored, call in zip(compared, calls, strict=True):
            for turn, reward in zip(scored, call.result(), strict=True):
                if reward and isinstance(turn, RolloutTurn):
                    of_rollout = scores.setdefault(turn.finished.rollout.rollout_id, {})
                    of_rollout[turn.call_id] = next(iter(reward.values()))
        return scores

    def _combine(
        self, rollout: GroupRollout, final: dict[str, float], turns: dict[str, float]
    ) -> dict[str, float] | None:
        """Record the rewards of a rollout's turns; return its final ones with their mean."""
        if not final:
            return None
        if self.name in final:
            raise GroupRewardError(
                f"each_turn and the final rewards both have a reward {self.name!r}; give each_turn another "
                "name="
            )
        record_turns(rollout.finished.rollout.rollout_id, turns)
        return final | ({self.name: statistics.fmean(turns.values())} if turns else {})


def turns_of(rollout: GroupRollout) -> list[RolloutTurn]:
    """Return the turns of a rollout: its captured calls whose messages are recorded."""
    calls = TraceToMessages().adapt_calls(rollout.finished.spans)
    captured = [(call_id, call) for call_id, call in calls if call_id is not None]
    return [
        RolloutTurn(rollout.finished, number, call_id, call)
        for number, (call_id, call) in enumerate(captured)
    ]


def each_turn(reward: GroupReward, *, final: GroupReward | None = None, name: str = "turn") -> ProcessReward:
    """Return a group reward that scores each turn of a rollout by another group reward, with
    `turn_rewards=True` of the algorithm.

    Args:
        reward: group reward, such as a judge, a reward model or `each_rollout(function)`. It is called with
            the n-th turns of the rollouts of a group, for each n; a turn is a rollout that ends there
            (`RolloutTurn`). None leaves a turn without a reward.
        final: group reward of whole rollouts; None for the agent's own rewards.
        name: name of the mean reward of a rollout's turns, for the metrics.

    Raises:
        ConfigError: an argument is not callable, or the name is empty.
    """
    if not callable(reward) or not (final is None or callable(final)) or not name:
        raise ConfigError(
            f"each_turn({reward!r:.60}, final={final!r:.60}, name={name!r}) takes group rewards and a name; "
            "to score a turn by a function of it, give each_rollout(function)"
        )
    return ProcessReward(reward, final, name)
