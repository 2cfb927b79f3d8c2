"""Rewards of finished rollouts: final and turn rewards, rewards of single agents, penalties, and the greedy
baselines of ReMax."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from raylight.errors import GreedyError, RewardError
from raylight.experience.trajectories.trajectory import Trajectories
from raylight.semconv import GRADE_SPAN_ID, GRADE_TURNS, REWARD_AGENT
from raylight.traces.reward_spans import get_any_rewards, get_reward_value
from raylight.traces.trained_agents import agents_of_generations
from raylight.types import GREEDY, GREEDY_BELOW, FinishedRollout, Generation, Span


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A reward of a call: one emitted before the final one, assigned to the last call before it, or the grade
    of a turn."""

    value: float
    rollout: int
    """Index of the rollout in the batch."""
    row: int | None
    """Index of the call's row in the batch (in the rollout, before a batch is built); None if it was left
    out."""
    token: int
    """Index of the call's last token in the row."""


def count_sampled(calls: Iterable[Generation]) -> int:
    """Return the number of sampled tokens of calls."""
    return sum(len(call.output_ids) for call in calls)


def effective_reward(item: FinishedRollout, failure_reward: float | None) -> float | None:
    """Return a rollout's own reward, `failure_reward` if its agent failed, or None to leave it out.

    It is left out if it has no reward, or if the infrastructure failed.
    """
    if item.rollout.status == "succeeded":
        return item.reward
    failure = item.rollout.failure
    return None if failure is None or failure.kind in ("infrastructure", "cancelled") else failure_reward


def turn_reward_spans(item: FinishedRollout) -> list[tuple[Span, float]]:
    """Return the rewards that a rollout emitted before the final one, with their spans.

    A rollout that did not succeed has no final reward, so all of its rewards are returned. A grade replaces
    the final reward.
    """
    emitted = [
        (span, value)
        for span in item.spans
        if span.span_id != GRADE_SPAN_ID and (value := get_reward_value(span)) is not None
    ]
    return emitted[:-1] if item.rollout.status == "succeeded" else emitted


def graded_turns(item: FinishedRollout) -> dict[str, float]:
    """Return the rewards of single calls that a group reward gave (`rl.rewards.each_turn`), by call id."""
    for span in item.spans:
        if span.span_id == GRADE_SPAN_ID and GRADE_TURNS in span.attributes:
            return json.loads(str(span.attributes[GRADE_TURNS]))
    return {}


def assign_turn_rewards(item: FinishedRollout, trajectories: Trajectories) -> list[TurnReward]:
    """Assign each turn reward to the call that earned it (`_earned`), or to the last call before it in a row
    that has trained tokens, or to the first of such calls. Without such a row, each keeps its reward.

    Args:
        trajectories: rows of its trained calls; at least one.
    """
    trained = [bool(row.mask.any()) for row in trajectories.rows]
    positions = [one for one in trajectories.positions if trained[one.row]] or trajectories.positions
    chosen = {position.call_id: position for position in positions}
    by_end = _by_end(call for call in trajectories.calls if call.key.call_id in chosen)
    rewards = []
    for call, value in _earned(item, trajectories.calls):
        own = call if call.key.call_id in chosen else _last_before(call.end_time, by_end)
        position = chosen[own.key.call_id]
        rewards.append(TurnReward(value, 0, position.row, position.last_token))
    return rewards


def _earned(item: FinishedRollout, calls: Sequence[Generation]) -> list[tuple[Generation, float]]:
    """Return the turn rewards of a rollout, each with the call that earned it.

    A reward emitted before the final one belongs to the last call that had ended by then, and one emitted
    before the end of any call to the first call. The grades of turns name their calls; grades of calls that
    are not given are left out.

    Args:
        calls: the trained ones; at least one.
    """
    by_end = _by_end(calls)
    earned = [(_last_before(span.start_time, by_end), value) for span, value in turn_reward_spans(item)]
    by_id = {call.key.call_id: call for call in calls}
    graded = graded_turns(item).items()
    return earned + [(by_id[call_id], value) for call_id, value in graded if call_id in by_id]


def split_by_agent(item: FinishedRollout, calls: Sequence[Generation]) -> list[FinishedRollout]:
    """Divide a rollout into one part for each agent that called the model, each with its own group.

    A part is then treated as a rollout: its baseline is the same agent's in the other rollouts of the
    group, as in https://arxiv.org/abs/2506.24119. An agent that was given a reward
    (`emit_reward(..., agent=...)`) has its own rewards. The others have the rollout's final reward, and its
    turn rewards where the last call before them is theirs. Calls of unnamed agents form a part of the
    rollout's own group.

    Args:
        item: rollout with spans.
        calls: its calls to be divided; at least one.
    """
    by_agent: dict[str | None, list[Generation]] = {}
    for call, name in zip(calls, agents_of_generations(calls, item.spans), strict=True):
        by_agent.setdefault(name, []).append(replace(call, agent=name))
    by_end, turns = _by_end(calls), turn_reward_spans(item)
    earners = {span.span_id: _last_before(span.start_time, by_end).key.call_id for span, _ in turns}
    return [_part_of(item, agent, own, earners) for agent, own in by_agent.items()]


def split_by_model(item: FinishedRollout, models: Collection[str]) -> list[FinishedRollout]:
    """Divide a rollout into one part for each of these models that it called, each with its own group, so
    that a model is compared with itself in the other rollouts of the group. The parts share its rewards."""
    by_model: dict[str, list[Generation]] = {}
    for call in item.generations:
        if call.model in models:
            by_model.setdefault(call.model, []).append(call)
    return [
        replace(
            item,
            rollout=item.rollout.model_copy(update={"group_id": f"{item.group}/{model}"}),
            generations=calls,
        )
        for model, calls in by_model.items()
    ]


def _by_end(calls: Iterable[Generation]) -> list[Generation]:
    return sorted(calls, key=lambda call: call.end_time)


def _last_before(time_s: float | None, by_end: Sequence[Generation]) -> Generation:
    """Return the last call that had ended by a time, or the first call; without a time the last one.

    Args:
        by_end: calls in the order of their ends.
    """
    ended = [call for call in by_end if time_s is None or call.end_time <= time_s]
    return ended[-1] if ended else by_end[0]


def _part_of(
    item: FinishedRollout, agent: str | None, calls: list[Generation], earners: Mapping[str, str]
) -> FinishedRollout:
    """Return an agent's part of a rollout.

    Args:
        earners: call that earned each turn reward of the rollout, by span id.
    """
    if agent is not None:
        item = replace(item, rollout=item.rollout.model_copy(update={"group_id": f"{item.group}/{agent}"}))
    own = [
        span.model_copy(
            update={"attributes": {k: v for k, v in span.attributes.items() if k != REWARD_AGENT}}
        )
        for span in item.spans
        if agent is not None and span.attributes.get(REWARD_AGENT) == agent and get_any_rewards(span)
    ]
    if own:
        others = [span for span in item.spans if span.span_id == GRADE_SPAN_ID or not get_any_rewards(span)]
        final = {reward.name: reward.value for reward in get_any_rewards(own[-1])}
        reward = next(iter(final.values()))
        return FinishedRollout(item.rollout, reward, calls, [*others, *own], final)
    called = {call.key.call_id for call in calls}
    kept = [
        span
        for span in item.spans
        if REWARD_AGENT not in span.attributes and earners.get(span.span_id, "") in {"", *called}
    ]
    return replace(item, generations=calls, spans=kept)


@dataclass(frozen=True)
class LengthPenalty:
    """Penalty of a rollout that samples too much, https://arxiv.org/abs/2503.14476.

    Args:
        max_tokens: sampled tokens of all calls at which the penalty reaches `factor`.
        buffer: tokens below `max_tokens` over which it rises from 0.
    """

    max_tokens: int
    buffer: int
    factor: float

    def __call__(self, tokens: int) -> float:
        excess = tokens - (self.max_tokens - self.buffer)
        return self.factor * min(max(excess / self.buffer, 0.0), 1.0)


@dataclass(frozen=True)
class RewardRules:
    """Rules that give a finished rollout the reward that it is trained with.

    Args:
        failure_reward: reward of rollouts whose agent failed; None leaves them out.
        unscored_reward: reward of rollouts that succeeded without one; None leaves them out.
        weights: weights of named rewards that are normalised separately; None: only the final reward counts.
        turn_rewards: also train on rewards of single calls.
        turn_gamma: discount from one call to the next of an estimator that credits turns, for which rollouts
            also differ if their rewards come earlier or later; None for other estimators.
        length_penalty: subtracted from the reward; it says nothing about the task.
    """

    failure_reward: float | None = None
    unscored_reward: float | None = None
    weights: Mapping[str, float] | None = None
    turn_rewards: bool = False
    length_penalty: LengthPenalty | None = None
    turn_gamma: float | None = None

    def reward(self, item: FinishedRollout) -> float | None:
        """Return the reward that a whole rollout is trained with; None leaves it out."""
        signal = self.signal(item)
        return None if signal is None else signal - self.penalty(count_sampled(item.generations))

    def penalty(self, tokens: int) -> float:
        """Return the penalty of a rollout that sampled so many tokens in all its calls."""
        return 0.0 if self.length_penalty is None else self.length_penalty(tokens)

    def signal(self, item: FinishedRollout) -> float | None:
        """Return the reward by which the rollouts of a group are compared; None leaves the rollout out."""
        if (parts := self.parts(item)) is not None and self.weights is not None:
            return math.fsum(w * part for w, part in zip(self.weights.values(), parts, strict=True))
        return self.final_reward(item)

    def final_reward(self, item: FinishedRollout) -> float | None:
        """Return the final reward of a rollout, whatever its named rewards are; None leaves it out."""
        reward = effective_reward(item, self.failure_reward)
        if reward is None and item.rollout.status == "succeeded":
            return self.unscored_reward
        return reward

    def parts(self, item: FinishedRollout) -> tuple[float, ...] | None:
        """Return the named rewards of a rollout; None if only the final reward counts, or to leave it out.

        A rollout whose agent failed has `failure_reward` for each.

        Raises:
            RewardError: the rollout has rewards, and lacks one of the names.
        """
        reward = effective_reward(item, self.failure_reward)
        if self.weights is None or reward is None:
            return None
        if item.rollout.status != "succeeded":
            return (reward,) * len(self.weights)
        if missing := [name for name in self.weights if name not in item.rewards]:
            raise RewardError(
                f"rollout {item.rollout.rollout_id} has the rewards {', '.join(item.rewards)}, and lacks "
                f"{', '.join(missing)}, which reward_weights names; return all of them, as in "
                f"{{{', '.join(f'{name!r}: 1.0' for name in self.weights)}}}"
            )
        return tuple(item.rewards[name] for name in self.weights)

    def compared(
        self, item: FinishedRollout, calls: Sequence[Generation], signal: float
    ) -> tuple[float, ...]:
        """Return the values of a rollout that differ in a group from which something can be learned.

        Args:
            calls: its trained calls; at least one.
            signal: the reward by which it is compared.
        """
        if (parts := self.parts(item)) is not None:
            return parts
        rewards = self.rewards_of_calls(item, calls, signal)
        total = math.fsum(value for values in rewards for value in values)
        if self.turn_gamma is None:
            return (total,)
        gamma = self.turn_gamma
        return total, math.fsum(gamma**n * value for n, values in enumerate(rewards) for value in values)

    def rewards_of_calls(
        self, item: FinishedRollout, calls: Sequence[Generation], reward: float
    ) -> list[list[float]]:
        """Return a list of rewards for each call: its turn's, and for the last call the final one.

        Args:
            calls: at least one, in the order in which they began.
            reward: the final reward.
        """
        earned = {call.key.call_id: list[float]() for call in calls}
        for call, value in _earned(item, calls) if self.turn_rewards else ():
            earned[call.key.call_id].append(value)
        earned[calls[-1].key.call_id].append(reward)
        return list(earned.values())

    def greedy_baselines(
        self,
        finished: list[FinishedRollout],
        trained_calls: Callable[[FinishedRollout], Sequence[Generation]],
    ) -> dict[str, float]:
        """Return the reward of each group's greedy rollout, the baseline of ReMax.

        See https://arxiv.org/abs/2310.10505. Groups without a greedy rollout are missing in the result.

        Args:
            trained_calls: returns the calls of a rollout that would be trained, whose grades count.

        Raises:
            GreedyError: a rollout that should have been greedy was sampled.
        """
        baselines: dict[str, float] = {}
        for item in finished:
            if item.rollout.metadata.get(GREEDY):
                _check_greedy(item)
                if (reward := self.reward(item)) is not None:
                    turns = _turn_values(item, trained_calls(item)) if self.turn_rewards else []
                    baselines[item.group] = math.fsum([reward, *turns])
        return baselines


def _turn_values(item: FinishedRollout, calls: Sequence[Generation]) -> list[float]:
    kept = {call.key.call_id for call in calls if call.finish_reason != "aborted"}
    graded = (value for call_id, value in graded_turns(item).items() if call_id in kept)
    return [*(value for _, value in turn_reward_spans(item)), *graded]


def _check_greedy(item: FinishedRollout) -> None:
    for call in item.generations:
        temperature = call.sampling.get("temperature", 1.0)
        if temperature >= GREEDY_BELOW:
            raise GreedyError(
                f"the greedy rollout {item.rollout.rollout_id}, which ReMax uses as a baseline, called the "
                f"model at temperature {temperature:g}; pass the sampling parameters of the LLM in the "
                "agent, as in create(..., **llm.sampling_parameters), and set no other temperature"
            )
