"""Which agents of a rollout are trained: one filter, fed from the algorithm or agent (a pattern) and from the
rollout (marks)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raylight.errors import ConfigError
from raylight.semconv import CALL_ID
from raylight.traces.attributes import response_id_of
from raylight.traces.span_tree import SpanTree
from raylight.types import TRAINABLE_AGENTS, FinishedRollout, Generation, Span


class AgentFilter:
    """Keeps the calls of the agents that the pattern matches or that are marked.

    With neither, all calls are kept. With either, calls of agents without a name are left out.

    Args:
        pattern: regular expression, found anywhere in the name (`LitAgent(trained_agents=...)`, an adapter's
            `agent_match`).
        marked: exact names (`rollout.mark_agent_as_trainable`).

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
        return self._pattern is None and not self._marked

    def keeps(self, agent: str | None) -> bool:
        """Whether calls of this agent are trained; None is an agent without a name."""
        if self.keeps_all:
            return True
        if agent is None:
            return False
        return agent in self._marked or (
            self._pattern is not None and self._pattern.search(agent) is not None
        )


def agents_of_generations(generations: Sequence[Generation], spans: Sequence[Span]) -> list[str | None]:
    """The agent of each generation: the one that it names, else that of the spans with its response id.

    That id is told by the span that raylight captured; where there is none, it is the one that contains the
    call id.
    """
    if all(generation.agent is not None for generation in generations):
        return [generation.agent for generation in generations]
    tree = SpanTree.from_spans(spans)
    tree.repair_hierarchy()
    by_response = tree.agents_of_responses()
    by_length = sorted(
        by_response, key=len
    )  # of "call-1" and "call-10", the shorter is the one that call-1 made
    captured = {
        span.attributes[CALL_ID]: response_id_of(span.attributes)
        for span in spans
        if CALL_ID in span.attributes
    }
    named: list[str | None] = []
    for generation in generations:
        call_id = generation.key.call_id
        response = captured.get(call_id) or next(
            (response for response in by_length if call_id in response), None
        )
        named.append(
            generation.agent if generation.agent is not None or response is None else by_response[response]
        )
    return named


def filter_generations(finished: FinishedRollout, pattern: str | None = None) -> list[Generation]:
    """The generations of a rollout that are trained: those of agents that the pattern matches or that the
    rollout marked."""
    agents = AgentFilter(pattern, finished.rollout.metadata.get(TRAINABLE_AGENTS, ()))
    if agents.keeps_all:
        return finished.generations
    names = agents_of_generations(finished.generations, finished.spans)
    return [
        generation for generation, name in zip(finished.generations, names, strict=True) if agents.keeps(name)
    ]
