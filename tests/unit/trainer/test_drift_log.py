"""Notes, advice and summary of calls that left their conversations."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from unit_helpers import make_key

from raylight.experience.call_relations import TOKEN_DRIFTS, Drift, RelationReport
from raylight.trainer.drift_log import ADVICE, PAGE, DriftLog
from raylight.types import DRIFTS

REPOSITORY = Path(__file__).parents[3]


def step(calls: int, **kinds: int) -> RelationReport:
    counts = Counter({f"drifts_{kind}": count for kind, count in kinds.items()})
    drifts = {
        kind: Drift(kind, make_key(f"ro-{kind}", call_id="c2"), f"reason of {kind}", "message 3")
        for kind in kinds
    }
    return RelationReport(calls, counts, 1.0, 1, drifts)


def test_the_first_drifts_are_noted_once() -> None:
    log = DriftLog()
    assert log.add(step(100)) is None
    note = log.add(step(100, answer_edited=2, template=3))
    assert note is not None
    assert "5 of 100 calls" in note
    assert "template: reason of template (message 3)" in note
    assert "raylight trace RUN --rollout ro-template" in note
    assert log.add(step(100, answer_edited=50)) is None


def test_advice_is_given_if_many_calls_drift() -> None:
    log = DriftLog()
    log.add(step(100, answer_edited=5))
    assert log.advice() is None
    log.add(step(100, answer_edited=6, header=1))
    assert log.advice() == (
        "12 of 200 calls started a new row although they continue a conversation, 11 of them because reason "
        f"of answer_edited: send answers back as they were received ({PAGE})"
    )


def test_the_summary_has_the_first_call_of_each_kind() -> None:
    log = DriftLog()
    assert log.summary() == {}
    log.add(step(10, header=1))
    log.add(step(10, header=1, template=4))
    first = {"rollout": "ro-header", "call": "c2", "reason": "reason of header", "place": "message 3"}
    assert log.summary()["header"] == {"calls": 2, **first}
    assert list(log.summary()) == ["template", "header"]


def test_every_kind_has_advice_and_the_page_exists() -> None:
    assert set(ADVICE) == set(DRIFTS)
    assert not {relation.removeprefix("drift_") for relation in TOKEN_DRIFTS} & set(ADVICE)
    path, _, anchor = PAGE.partition("#")
    headings = re.findall("^## (.*)$", (REPOSITORY / path).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(",", "").replace(" ", "-") for heading in headings}
