"""The advisor of a run: it applies the rules to each row of metrics.

A rule looks at the last rows of metrics. Its advisory is active while the rule finds something.

Laws:
- A run that learns as it should has no warning and no alarm: a rule needs several steps, unless one is proof.
- While an alarm is active there are no hints: tuning does not help a run that does not work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from raylight.advisories.conditions import MetricHistory
from raylight.advisories.rules import RULES, Level
from raylight.types import JsonObject

REPEAT_STEPS = 10
"""Steps without a finding after which the same advisory is announced again."""


@dataclass(frozen=True)
class Advisory:
    """A finding in the metrics of a run."""

    kind: str
    """Name of the rule."""
    level: Level
    text: str
    remedy: str
    first_step: int
    """First step at which the rule found it."""
    last_step: int
    """Last step at which the rule found it."""
    is_active: bool = True
    """True if the rule found it in the newest row."""
    detail: str = ""
    """Sentence about the first case, which only the run itself has."""

    def to_json(self) -> JsonObject:
        """Return the fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return ". ".join(part for part in (self.text, self.detail, self.remedy) if part)


class Advisor:
    """Applies the rules to a run's rows of metrics, in the order in which they are logged."""

    def __init__(self) -> None:
        self._history = MetricHistory()
        self._known: dict[str, Advisory] = {}

    def add(
        self, row: Mapping[str, float | None], details: Mapping[str, str] = MappingProxyType({})
    ) -> list[Advisory]:
        """Apply the rules to the history with a further row; return the advisories to announce.

        Args:
            row: metrics with their step as `step`, as in `metrics.jsonl`. None counts as a missing value.
            details: sentence about the first case of a finding, by its kind.
        """
        step = int(row["step"] or 0)
        self._history.add(row)
        announced, has_alarm = [], False
        for rule in RULES:
            known = self._known.get(rule.kind)
            figures = None if has_alarm and rule.level == "hint" else rule.find(self._history)
            if figures is None:
                if known is not None:
                    self._known[rule.kind] = replace(known, is_active=False)
                continue
            has_alarm |= rule.level == "alarm"
            first = step if known is None else known.first_step
            self._known[rule.kind] = found = Advisory(
                rule.kind,
                rule.level,
                rule.text.format(*figures),
                rule.remedy.format(*figures),
                first,
                step,
                detail=details.get(rule.kind, ""),
            )
            if known is None or step - known.last_step > REPEAT_STEPS:
                announced.append(found)
        return announced

    @property
    def advisories(self) -> list[Advisory]:
        """All advisories so far: active ones first, each with alarms before warnings and hints."""
        order = {rule.kind: position for position, rule in enumerate(RULES)}
        return sorted(self._known.values(), key=lambda item: (not item.is_active, order[item.kind]))
