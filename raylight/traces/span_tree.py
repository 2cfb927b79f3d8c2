"""The tree of an attempt's spans. Any list of spans makes one: parents may be missing, ids double, links
circular."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from raylight.semconv import AGENT_NAME, VIRTUAL
from raylight.traces.attributes import EXECUTOR, agent_of, response_id_of
from raylight.types import Span

VIRTUAL_ROOT = "virtual-root"
"""Span id of the root above several roots, or above none."""


@dataclass(eq=False, slots=True)
class SpanNode:
    """A span and those below it, in the order in which they began."""

    span: Span
    parent: SpanNode | None = None
    children: list[SpanNode] = field(default_factory=list)
    virtual: bool = False
    """Whether it stands for a span that was not recorded."""
    moved: bool = False
    """Whether it was put where it is by its times, not by its parent id."""

    @property
    def agent(self) -> str | None:
        """The nearest agent, from this span upwards; an agent above it that runs in a workflow's executor
        counts as that one."""
        for node in self.upwards():
            if (name := agent_of(node.span)) is not None:
                return (
                    name if node is self or AGENT_NAME not in node.span.attributes else node._executor or name
                )
        return None

    @property
    def _executor(self) -> str | None:
        """The nearest executor of agent-framework's workflows, from this span upwards."""
        return next((name for node in self.upwards() if (name := node.span.attributes.get(EXECUTOR))), None)

    def adopt(self, child: SpanNode) -> None:
        child.parent = self
        self.children.append(child)

    def leave(self) -> None:
        """Take it, with those below it, out of the tree."""
        if self.parent is not None:
            self.parent.children.remove(self)
            self.parent = None

    def walk(self) -> Iterator[SpanNode]:
        """This node and all below it, depth first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def upwards(self) -> Iterator[SpanNode]:
        """This node, its parent, and so on to the root."""
        node: SpanNode | None = self
        while node is not None:
            yield node
            node = node.parent


class SpanTree:
    """Spans of one attempt below one root."""

    def __init__(self, root: SpanNode) -> None:
        self.root = root

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> SpanTree:
        """The tree by parent ids.

        A missing parent is a virtual node, with all its children. Of spans with the same id the first one
        counts. A circle is cut open. Several roots, or none, get a virtual root.
        """
        nodes: dict[str, SpanNode] = {}
        for span in sorted(spans, key=order):
            nodes.setdefault(span.span_id, SpanNode(span))
        missing: dict[str, SpanNode] = {}
        tops: list[SpanNode] = []
        for node in nodes.values():
            parent_id = node.span.parent_id
            if not parent_id:
                tops.append(node)
            elif parent_id in nodes:
                nodes[parent_id].adopt(node)
            else:
                if parent_id not in missing:
                    missing[parent_id] = _virtual(parent_id, node.span)
                    tops.append(missing[parent_id])
                missing[parent_id].adopt(node)
        tops += _cut_circles(list(nodes.values()), tops)
        if len(tops) == 1:
            return cls(tops[0])
        root = _virtual(VIRTUAL_ROOT, tops[0].span if tops else None)
        for top in tops:
            root.adopt(top)
        return cls(root)

    def walk(self) -> Iterator[SpanNode]:
        return self.root.walk()

    def find(self, span_id: str) -> SpanNode | None:
        return next((node for node in self.walk() if node.span.span_id == span_id), None)

    def repair_hierarchy(self) -> None:
        """Move spans that float right below the root under the tightest span that encloses them in time.

        Where several tracing systems meet (an agent framework's, the OpenAI client's, the engine's), calls
        lose their parent and with it their agent. Spans without times stay.
        """
        top = self.root
        while len(top.children) == 1:  # a session around the root is not where things float
            top = top.children[0]
        hosts = [node for node in top.walk() if node is not top and not node.virtual and _timed(node.span)]
        starts = np.array([node.span.start_time for node in hosts], dtype=float)
        ends = np.array([node.span.end_time for node in hosts], dtype=float)
        for node in list(top.children):
            if node.virtual or not _timed(node.span):
                continue
            slack = (node.span.start_time - starts) + (ends - node.span.end_time)
            slack[(starts > node.span.start_time) | (ends < node.span.end_time) | (slack <= 0)] = np.inf
            host = _tightest(node, hosts, slack)
            if host is not None:
                node.leave()
                host.adopt(node)
                host.children.sort(key=lambda child: order(child.span))
                node.moved = True

    def agents_of_responses(self) -> dict[str, str | None]:
        """The agent of each response id.

        Where several spans tell of a response, one that names the agent itself comes first, then one that
        says where it belongs, last one that was found by its times.
        """
        answered = [
            (response, node)
            for node in self.walk()
            if (response := response_id_of(node.span.attributes)) is not None
        ]
        found: dict[str, str | None] = {}
        for response, node in sorted(answered, key=lambda pair: _doubt(pair[1])):
            if found.get(response) is None:
                found[response] = node.agent
        return found

    def render(self) -> str:
        """The tree as text, for debugging: one span a line, with its agent and its time in seconds since the
        first span."""
        starts = [node.span.start_time for node in self.walk() if node.span.start_time is not None]
        first = min(starts, default=0.0)
        lines = []
        stack = [(self.root, 0)]
        while stack:
            node, depth = stack.pop()
            lines.append("  " * depth + _line(node, first))
            stack.extend((child, depth + 1) for child in reversed(node.children))
        return "\n".join(lines)


def order(span: Span) -> tuple[float, int]:
    """Spans in the order in which they began; those without time first, by sequence id."""
    return span.start_time or 0.0, span.sequence_id


def _timed(span: Span) -> bool:
    return span.start_time is not None and span.end_time is not None


def _virtual(span_id: str, below: Span | None) -> SpanNode:
    """A node for a span that was not recorded; it began when the first span below it began."""
    span = Span(
        trace_id=below.trace_id if below else "",
        span_id=span_id,
        name=VIRTUAL,
        rollout_id=below.rollout_id if below else "",
        attempt_id=below.attempt_id if below else "",
        sequence_id=below.sequence_id if below else 0,
        start_time=below.start_time if below else None,
    )
    return SpanNode(span, virtual=True)


def _cut_circles(nodes: list[SpanNode], tops: list[SpanNode]) -> list[SpanNode]:
    """Cut every circle of parents once; returns the nodes that are tops by that."""
    reached = {id(below) for top in tops for below in top.walk()}
    cut: list[SpanNode] = []
    for start in nodes:
        if id(start) in reached:
            continue
        seen: set[int] = set()
        node = start
        while id(node) not in seen and node.parent is not None:
            seen.add(id(node))
            node = node.parent
        node.leave()
        cut.append(node)
        reached |= {id(below) for below in node.walk()}
    return cut


def _tightest(node: SpanNode, hosts: list[SpanNode], slack: np.ndarray) -> SpanNode | None:
    """The host with the least slack that is not below the node itself."""
    while len(slack) and np.isfinite(slack[best := int(slack.argmin())]):
        if all(above is not node for above in hosts[best].upwards()):
            return hosts[best]
        slack[best] = np.inf
    return None


def _doubt(node: SpanNode) -> tuple[bool, bool]:
    """How much the agent of a node is in doubt, for sorting."""
    return agent_of(node.span) is None, any(above.moved for above in node.upwards())


def _line(node: SpanNode, first: float) -> str:
    span = node.span
    agent = agent_of(span)
    parts = [span.name, f"[{agent}]" if agent else "", f"({span.span_id[-8:]})"]
    if span.start_time is not None and span.end_time is not None:
        parts.append(f"{span.start_time - first:.3f}-{span.end_time - first:.3f}s")
    return " ".join(part for part in parts if part)
