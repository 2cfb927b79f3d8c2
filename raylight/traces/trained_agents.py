"""Selection of the agents to train on, by a pattern and by marks of the rollout."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raylight.errors import ConfigError
from raylight.semconv import CALL_ID
from raylight.traces.attributes import response_id_of
from raylight.traces.span_tree import SpanTree
from raylight.types import TRAINABLE_AGENTS, FinishedRollout, Generation, Span


class AgentFilter:
    """Filter of calls by agent: it keeps agents that match a pattern or are marked.

    With neither pattern nor marks, all calls are kept. With either, calls of unnamed agents are dropped.

    Args:
                pattern: regular expression, searched in the name (`LitAgent(trained_agents=...)`, an
                    adapter's `agent_match`).
        marked: names of marked agents (`rollout.mark_agent_as_trainable`).

    Raises:
        ConfigError: the pattern is not a regular expression.
    """

    def __init__(self, pattern: str | None = None, marked: Sequence[str] = ()) -> None:
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"the pattern for trained agents, {pattern!r}, is not a regular expression: {error}"
            ) from error
        self._marked = frozenset(marked)

    @property
    def keeps_all(self) -> bool:
        """True if there is neither a pattern nor a mark."""
        return self._pattern is None and not self._marked

    def keeps(self, agent: str | None) -> bool:
        """Return True if calls of this agent are kept; None is an unnamed agent."""
        if self.keeps_all:
            return True
        if agent is None:
            return False
        return agent in self._marked or (
            self._pattern is not None and self._pattern.search(agent) is not None
        )


def agents_of_generations(generations: Sequence[Generation], spans: Sequence[Span]) -> list[str | None]:
    """Return the agent of each generation: the one that it names, else its response's.

    The id of the response comes from the span that raylight captured. Without such a span, it is the one that
    contains the call id.
    """
    if all(generation.agent is not None for generation in generations):
        return [generation.agent for generation in generations]
    tree = SpanTree.from_spans(spans)
    tree.repair_hierarchy()
    by_response = tree.agents_of_responses()
    # shortest first: "call-1" is part of the ids of the responses of "call-1" and "call-10"
    by_length = sorted(by_response, key=len)
    captured = {
        span.attributes[CALL_ID]: response_id_of(span.attributes)
        for span in spans
        if CALL_ID in span.attributes
    }
    agents: list[str | None] = []
    for generation in generations:
        call_id = generation.key.call_id
        response = captured.get(call_id) or next(
            (response for response in by_length if call_id in response), None
        )
        agents.append(
            generation.agent if generation.agent is not None or response is None else by_response[response]
        )
    return agents


def split_auxiliary(generations: Sequence[Generation]) -> tuple[list[Generation], list[Generation]]:
    """Return the calls that asked for the attempt's own model, and the auxiliary calls."""
    own = [call for call in generations if call.auxiliary_model is None]
    return own, [call for call in generations if call.auxiliary_model is not None]


def filter_generations(finished: FinishedRollout, pattern: str | None = None) -> list[Generation]:
    """Return the generations of a rollout whose agents match the pattern or were marked by the rollout."""
    agents = AgentFilter(pattern, finished.rollout.metadata.get(TRAINABLE_AGENTS, ()))
    if agents.keeps_all:
        return finished.generations
    names = agents_of_generations(finished.generations, finished.spans)
    return [
        generation for generation, name in zip(finished.generations, names, strict=True) if agents.keeps(name)
    ]
