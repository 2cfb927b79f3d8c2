"""Reward of a design, computed from the spans of the tools and from numbers, not from words in a text.

0.4 x completion + 0.3 x efficiency + 0.3 x quality, each from 0 to 1:

- completion: the share of the task's specifications that the design meets, by the numbers that get_result
  returned. The design is the simulation that the answer names, or else the last that converged; it must keep
  the task's feeds and property package.
- efficiency: 1 within the task's budget of tool calls, then budget / calls; a failed call counts twice. 0
  without such a design.
- quality: closeness of the reported numbers to the reference: 1 within 1%, 0 from 10%, linear in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from examples.process_agent.flowsheet_tools import KIND, read_flowsheet
from raylight.semconv import OPERATION_INPUT, OPERATION_NAME, OPERATION_OUTPUT
from raylight.traces.reward_spans import SpanLike

ANSWER = "answer"
"""Name and kind of the operation whose output is the agent's last message."""
COMPLETION, EFFICIENCY, QUALITY = 0.4, 0.3, 0.3
SPEC_TOLERANCE = 0.005
FULL, NONE = 0.01, 0.10
"""Relative errors of a reported number that score 1 and 0."""
T_SCALE_K = 50.0
"""Scale of a temperature error, in K."""
LEAST_SCALE = 0.05
"""Smallest scale of the error of any other number, such as a vapour fraction near 0."""
HUGE = 1e30
"""Magnitude from which a number is not accepted as an answer."""


@dataclass(frozen=True)
class Grade:
    """Grade of a design, and the figures behind it."""

    completion: float
    efficiency: float
    quality: float
    calls: int
    failed: int

    @property
    def reward(self) -> float:
        return COMPLETION * self.completion + EFFICIENCY * self.efficiency + QUALITY * self.quality

    def named(self) -> dict[str, float]:
        """Rewards of the rollout, the primary one first."""
        parts = {"completion": self.completion, "efficiency": self.efficiency, "quality": self.quality}
        return {"reward": self.reward, **parts}


@dataclass(frozen=True)
class ToolCall:
    """A tool call, read from its span.

    `output` is an object; so are the arguments, unless the model wrote none.
    """

    name: str
    arguments: dict[str, Any]
    output: dict[str, Any]

    @property
    def failed(self) -> bool:
        return "error" in self.output


def grade(task: dict[str, Any], spans: Iterable[SpanLike]) -> Grade:
    """Grade a rollout of a task.

    Args:
        task: see `design_tasks.make_task`.
        spans: spans of the attempt, in order; only tool calls and the answer are read.
    """
    spans = list(spans)
    calls = tool_calls(spans)
    failed = sum(call.failed for call in calls)
    answer = read_answer(answer_text(spans))
    converged = {
        call.output["run_id"]: call.arguments for call in calls if call.output.get("status") == "converged"
    }
    design = answer.get("run_id")
    if not isinstance(design, str) or design not in converged:
        design = next(reversed(converged), None)
    fits = design is not None and keeps_feeds(task, read_flowsheet(converged[design]))
    charged = max(len(calls) + failed, 1)
    return Grade(
        completion=_completion(task, design, calls) if fits else 0.0,
        efficiency=min(1.0, task["budget"] / charged) if fits else 0.0,
        quality=_quality(task["asked"], answer.get("values")),
        calls=len(calls),
        failed=failed,
    )


def tool_calls(spans: Iterable[SpanLike]) -> list[ToolCall]:
    """Return the tool calls among spans."""
    found = []
    for span in spans:
        attributes = span.attributes or {}
        if attributes.get("kind") == KIND:
            arguments = str(attributes.get(f"{OPERATION_INPUT}.arguments", ""))
            output = str(attributes.get(OPERATION_OUTPUT, ""))
            found.append(ToolCall(str(attributes[OPERATION_NAME]), _object(arguments), _object(output)))
    return found


def _completion(task: dict[str, Any], design: str | None, calls: list[ToolCall]) -> float:
    numbers: dict[str, Any] = {}
    for call in calls:
        if call.name == "get_result" and call.arguments.get("run_id") == design and not call.failed:
            numbers |= flat(call.output)
    met = [is_near(path, numbers.get(path), target, SPEC_TOLERANCE) for path, target in task["specs"].items()]
    return sum(met) / len(met)


def _quality(asked: dict[str, float], values: Any) -> float:
    given = values if isinstance(values, dict) else {}
    scores = []
    for name, target in asked.items():
        error = relative_error(name, given.get(name), target)
        scores.append(0.0 if error is None else min(max((NONE - error) / (NONE - FULL), 0.0), 1.0))
    return sum(scores) / len(scores)


def keeps_feeds(task: dict[str, Any], flowsheet: Any) -> bool:
    """True if a converged flowsheet has exactly the task's property package and feeds."""
    if (
        flowsheet.get("package", "peng_robinson") != task["package"]
        or flowsheet["feeds"].keys() != task["feeds"].keys()
    ):
        return False
    for name, wanted in task["feeds"].items():
        feed = flowsheet["feeds"][name]
        for key in ("flow_kmol_h", "T_K", "P_bar"):
            if abs(float(feed[key]) - wanted[key]) > 1e-3 * wanted[key]:
                return False
        if any(abs(a - b) > 1e-3 for a, b in _shares(feed["composition"], wanted["composition"])):
            return False
    return True


def _shares(given: dict[str, float], wanted: dict[str, float]) -> list[tuple[float, float]]:
    """Pairs of mole fractions, for every component of either composition."""
    totals = sum(map(float, given.values())), sum(wanted.values())
    return [
        (float(given.get(name, 0.0)) / totals[0], wanted.get(name, 0.0) / totals[1])
        for name in given.keys() | wanted.keys()
    ]


def is_near(path: str, value: Any, target: float, tolerance: float) -> bool:
    """True if a number is within a relative tolerance of its target."""
    error = relative_error(path, value, target)
    return error is not None and error <= tolerance


def relative_error(name: str, value: Any, target: float) -> float | None:
    """Error of a number relative to its target; of a temperature (by its name) relative to 50 K.

    None without a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < HUGE:
        return None
    scale = T_SCALE_K if name.endswith("T_K") else max(abs(target), LEAST_SCALE)
    return abs(value - target) / scale


def read_answer(text: str) -> dict[str, Any]:
    """Return the last JSON object in a message; empty if there is none."""
    found: dict[str, Any] = {}
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            found = value
        start = text.find("{", end)
    return found


def flat(results: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return results by their full paths."""
    found: dict[str, Any] = {}
    for name, value in results.items():
        path = f"{prefix}.{name}" if prefix else name
        found |= flat(value, path) if isinstance(value, dict) else {path: value}
    return found


def answer_text(spans: Iterable[SpanLike]) -> str:
    """Return the agent's last message; empty without one."""
    texts = [
        str((span.attributes or {}).get(OPERATION_OUTPUT, ""))
        for span in spans
        if (span.attributes or {}).get("kind") == ANSWER
    ]
    return texts[-1] if texts else ""


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object; empty for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
