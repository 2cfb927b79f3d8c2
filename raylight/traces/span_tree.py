"""Tree of an attempt's spans by their parents, and lookups in it.

Any list of spans is accepted: parents may be missing, ids doubled, and parent ids circular."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from raylight.semconv import AGENT_NAME, VIRTUAL
from raylight.traces.attributes import EXECUTOR, agent_of, response_id_of
from raylight.types import Span

VIRTUAL_ROOT = "virtual-root"
"""Span id of the root that is added if there are several roots, or none."""


@dataclass(eq=False, slots=True)
class SpanNode:
    """A span with its children, in the order in which they began."""

    span: Span
    parent: SpanNode | None = None
    children: list[SpanNode] = field(default_factory=list)
    virtual: bool = False
    """True if it is a placeholder for a span that was not recorded."""
    moved: bool = False
    """True if its position follows from its times, not from its parent id."""

    @property
    def agent(self) -> str | None:
        """Name of the nearest agent, from this span upwards.

        An ancestor's agent that runs in a workflow's executor goes by the name of the executor.
        """
        for node in self.ancestors():
            if (name := agent_of(node.span)) is not None:
                return (
                    name if node is self or AGENT_NAME not in node.span.attributes else node._executor or name
                )
        return None

    @property
    def _executor(self) -> str | None:
        """Id of the nearest executor in a workflow of agent-framework, from this span upwards."""
        return next((name for node in self.ancestors() if (name := node.span.attributes.get(EXECUTOR))), None)

    def add_child(self, child: SpanNode) -> None:
        child.parent = self
        self.children.append(child)

    def detach(self) -> None:
        """Remove the node, with its descendants, from its parent."""
        if self.parent is not None:
            self.parent.children.remove(self)
            self.parent = None

    def walk(self) -> Iterator[SpanNode]:
        """Iterate over this node and its descendants, depth first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def ancestors(self) -> Iterator[SpanNode]:
        """Iterate over this node and its ancestors, up to the root."""
        node: SpanNode | None = self
        while node is not None:
            yield node
            node = node.parent


class SpanTree:
    """The spans of one attempt, below one root."""

    def __init__(self, root: SpanNode) -> None:
        self.root = root

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> SpanTree:
        """Build the tree from parent ids.

        A missing parent becomes a virtual node with all its children. With several spans of the same id the
        first one counts. Circles are cut. Several roots, or none, get a virtual root.
        """
        nodes: dict[str, SpanNode] = {}
        for span in sorted(spans, key=start_order):
            nodes.setdefault(span.span_id, SpanNode(span))
        missing: dict[str, SpanNode] = {}
        roots: list[SpanNode] = []
        for node in nodes.values():
            parent_id = node.span.parent_id
            if not parent_id:
                roots.append(node)
            elif parent_id in nodes:
                nodes[parent_id].add_child(node)
            else:
                if parent_id not in missing:
                    missing[parent_id] = _virtual(parent_id, node.span)
                    roots.append(missing[parent_id])
                missing[parent_id].add_child(node)
        roots += _cut_circles(list(nodes.values()), roots)
        if len(roots) == 1:
            return cls(roots[0])
        root = _virtual(VIRTUAL_ROOT, roots[0].span if roots else None)
        for top in roots:
            root.add_child(top)
        return cls(root)

    def walk(self) -> Iterator[SpanNode]:
        """Iterate over all nodes, depth first."""
        return self.root.walk()

    def find(self, span_id: str) -> SpanNode | None:
        """Return the node of a span; None if there is none."""
        return next((node for node in self.walk() if node.span.span_id == span_id), None)

    def repair_hierarchy(self) -> None:
        """Move spans directly below the root under the tightest span that encloses them in time.

        Where several tracing systems meet (an agent framework's, the OpenAI client's, the engine's), calls
        lose their parent and with it their agent. Spans without times stay.
        """
        top = self.root
        while len(top.children) == 1:  # skip a session span around everything
            top = top.children[0]
        candidates = [
            node for node in top.walk() if node is not top and not node.virtual and _timed(node.span)
        ]
        starts = np.array([node.span.start_time for node in candidates], dtype=float)
        ends = np.array([node.span.end_time for node in candidates], dtype=float)
        for node in list(top.children):
            if node.virtual or not _timed(node.span):
                continue
            slack = (node.span.start_time - starts) + (ends - node.span.end_time)
            slack[(starts > node.span.start_time) | (ends < node.span.end_time) | (slack <= 0)] = np.inf
            enclosing = _tightest(node, candidates, slack)
            if enclosing is not None:
                node.detach()
                enclosing.add_child(node)
                enclosing.children.sort(key=lambda child: start_order(child.span))
                node.moved = True

    def agents_of_responses(self) -> dict[str, str | None]:
        """Return the agent of each response id.

        If several spans record a response, the agent comes from a span that names it, else from one placed by
        its parent id, else from one placed by its times.
        """
        answered = [
            (response, node)
            for node in self.walk()
            if (response := response_id_of(node.span.attributes)) is not None
        ]
        agents: dict[str, str | None] = {}
        for response, node in sorted(answered, key=lambda pair: _reliability(pair[1])):
            if agents.get(response) is None:
                agents[response] = node.agent
        return agents

    def render(self) -> str:
        """Return the tree as text for debugging: one line per span, with its agent and its times in
        seconds."""
        starts = [node.span.start_time for node in self.walk() if node.span.start_time is not None]
        first = min(starts, default=0.0)
        lines = []
        stack = [(self.root, 0)]
        while stack:
            node, depth = stack.pop()
            lines.append("  " * depth + _line(node, first))
            stack.extend((child, depth + 1) for child in reversed(node.children))
        return "\n".join(lines)


def start_order(span: Span) -> tuple[float, int]:
    """Sort key of spans by start time, then sequence id; spans without a time come first."""
    return span.start_time or 0.0, span.sequence_id


def _timed(span: Span) -> bool:
    return span.start_time is not None and span.end_time is not None


def _virtual(span_id: str, child: Span | None) -> SpanNode:
    """Create a node for a span that was not recorded, with the ids and the start time of its first child."""
    span = Span(
        trace_id=child.trace_id if child else "",
        span_id=span_id,
        name=VIRTUAL,
        rollout_id=child.rollout_id if child else "",
        attempt_id=child.attempt_id if child else "",
        sequence_id=child.sequence_id if child else 0,
        start_time=child.start_time if child else None,
    )
    return SpanNode(span, virtual=True)


def _cut_circles(nodes: list[SpanNode], roots: list[SpanNode]) -> list[SpanNode]:
    """Cut every circle of parents once. Return the nodes that become roots."""
    reached = {id(descendant) for top in roots for descendant in top.walk()}
    cut: list[SpanNode] = []
    for start in nodes:
        if id(start) in reached:
            continue
        seen: set[int] = set()
        node = start
        while id(node) not in seen and node.parent is not None:
            seen.add(id(node))
            node = node.parent
        node.detach()
        cut.append(node)
        reached |= {id(descendant) for descendant in node.walk()}
    return cut


def _tightest(node: SpanNode, candidates: list[SpanNode], slack: np.ndarray) -> SpanNode | None:
    """Return the candidate with the least slack that is not a descendant of the node."""
    while len(slack) and np.isfinite(slack[best := int(slack.argmin())]):
        if all(ancestor is not node for ancestor in candidates[best].ancestors()):
            return candidates[best]
        slack[best] = np.inf
    return None


def _reliability(node: SpanNode) -> tuple[bool, bool]:
    """Sort key of nodes by the reliability of their agent, the most reliable first."""
    return agent_of(node.span) is None, any(ancestor.moved for ancestor in node.ancestors())


def _line(node: SpanNode, first: float) -> str:
    span = node.span
    agent = agent_of(span)
    parts = [span.name, f"[{agent}]" if agent else "", f"({span.span_id[-8:]})"]
    if span.start_time is not None and span.end_time is not None:
        parts.append(f"{span.start_time - first:.3f}-{span.end_time - first:.3f}s")
    return " ".join(part for part in parts if part)
