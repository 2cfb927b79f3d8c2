"""The first case, and the summary, of calls that left their conversations."""

from collections import Counter

from unit_helpers import make_key

from raylight.experience.trajectories.call_relations import Drift, RelationReport
from raylight.trainer.output.drift_log import DriftLog


def step(calls: int, **kinds: int) -> RelationReport:
    counts = Counter({f"drifts_{kind}": count for kind, count in kinds.items()})
    drifts = {
        kind: Drift(kind, make_key(f"ro-{kind}", call_id="c2"), f"reason of {kind}", "message 3")
        for kind in kinds
    }
    return RelationReport(calls, counts, 1.0, 1, drifts)


def test_the_first_call_of_the_most_frequent_kind_is_shown() -> None:
    log = DriftLog()
    log.add(step(100))
    assert log.detail() == ""
    log.add(step(100, answer_edited=2, template=3))
    log.add(step(100, template=5))
    assert log.detail() == (
        "In 8 of 10 such calls reason of template (message 3): `raylight trace RUN --rollout ro-template` "
        "shows the first one"
    )


def test_the_summary_has_the_first_call_of_each_kind() -> None:
    log = DriftLog()
    assert log.summary() == {}
    log.add(step(10, header=1))
    log.add(step(10, header=1, template=4))
    first = {"rollout": "ro-header", "call": "c2", "reason": "reason of header", "place": "message 3"}
    assert log.summary()["header"] == {"calls": 2, **first}
    assert list(log.summary()) == ["template", "header"]
