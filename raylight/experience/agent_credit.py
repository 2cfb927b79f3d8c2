"""Credit per agent: a rollout of several agents, divided into one part for each.

A part has the calls of one agent and the rewards of that agent. It is then treated as a rollout: it forms a
group with the parts of the same agent in the other rollouts of its group, and has an advantage of its own.
Such baselines for each role are those of SPIRAL, https://arxiv.org/abs/2506.24119.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raylight.semconv import REWARD_AGENT
from raylight.traces.rewards import get_rewards_from_span, has_reward
from raylight.traces.trained_agents import agents_of_generations
from raylight.types import FinishedRollout, Generation, Span


def split_by_agent(item: FinishedRollout, calls: Sequence[Generation]) -> list[FinishedRollout]:
    """Divide a rollout by the agents that called the model.

    An agent without a reward (`emit_reward(..., agent=...)`) has the rollout's. Calls of unnamed agents form
    a part of the rollout's own group.

    Args:
        item: rollout with spans.
        calls: its calls to be divided, in order.
    """
    by_agent: dict[str | None, list[Generation]] = {}
    for call, name in zip(calls, agents_of_generations(calls, item.spans), strict=True):
        by_agent.setdefault(name, []).append(replace(call, agent=name))
    return [_part(item, agent, own) for agent, own in by_agent.items()]


def _part(item: FinishedRollout, agent: str | None, calls: list[Generation]) -> FinishedRollout:
    own = [span for span in item.spans if agent is not None and span.attributes.get(REWARD_AGENT) == agent]
    if not own:
        kept = [span for span in item.spans if REWARD_AGENT not in span.attributes]
        part = replace(item, generations=calls, spans=kept)
    else:
        rewards = [_without_agent(span) for span in own]
        others = [span for span in item.spans if REWARD_AGENT not in span.attributes and not has_reward(span)]
        final = {reward.name: reward.value for reward in get_rewards_from_span(rewards[-1])}
        part = FinishedRollout(
            item.rollout, next(iter(final.values()), None), calls, [*others, *rewards], final, item.graded
        )
    if agent is None:
        return part
    return replace(part, rollout=item.rollout.model_copy(update={"group_id": f"{item.group}/{agent}"}))


def _without_agent(span: Span) -> Span:
    attributes = {name: value for name, value in span.attributes.items() if name != REWARD_AGENT}
    return span.model_copy(update={"attributes": attributes})
