"""The nouns: state tables, the invariant of a generation, spans, requests."""

import json
import pickle
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from unit_helpers import make_generation, make_key, make_rollout

from raylight.errors import ConfigError, SpanError
from raylight.semconv import VIRTUAL
from raylight.types import (
    ATTEMPT_FINISHED,
    ATTEMPT_TRANSITIONS,
    FINISHED,
    LIVE,
    RETRIED,
    ROLLOUT_TRANSITIONS,
    TRAINABLE_AGENTS,
    WAITING,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Failure,
    FailureKind,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    Span,
    SpanCoreFields,
)
from raylight.types.spans import Event, TraceStatus, plain_attributes, span_json

TABLES = pytest.mark.parametrize(
    ("table", "start"),
    [(ROLLOUT_TRANSITIONS, "queuing"), (ATTEMPT_TRANSITIONS, "preparing")],
    ids=["rollout", "attempt"],
)


def reachable(table: dict, start: str) -> set:
    seen, new = set(), {start}
    while new:
        seen |= new
        new = {after for status in new for after in table[status]} - seen
    return seen


@TABLES
def test_every_status_is_reachable_and_none_is_unknown(table: dict, start: str) -> None:
    assert reachable(table, start) == set(table)


@TABLES
def test_an_end_can_be_reached_from_every_status(table: dict, start: str) -> None:
    ends = {status for status, following in table.items() if not following}
    assert ends
    assert all(reachable(table, status) & ends for status in table)


def test_terminal_statuses_have_no_exit_but_a_sign_of_life() -> None:
    assert {"succeeded", "failed", "cancelled"} == FINISHED
    assert {"succeeded", "failed", "timeout"} == ATTEMPT_FINISHED
    assert all(not ATTEMPT_TRANSITIONS[status] for status in ATTEMPT_FINISHED)
    exits = {status: ROLLOUT_TRANSITIONS[status] for status in FINISHED if ROLLOUT_TRANSITIONS[status]}
    assert exits == {
        "failed": {"running", "succeeded"}
    }  # its latest attempt was thought unresponsive, and was not


def test_what_may_be_retried_is_how_an_attempt_ends_badly() -> None:
    assert {"unresponsive", "failed", "timeout"} == RETRIED
    assert RolloutConfig(retry_condition=RETRIED).retry_condition == sorted(RETRIED)
    given = RolloutConfig(retry_condition=["timeout", "failed"])
    assert given.retry_condition == ["timeout", "failed"]
    assert hash(given) == hash(given.model_copy()) != hash(RolloutConfig())


def test_live_attempts_may_end_in_any_way() -> None:
    assert all(ATTEMPT_TRANSITIONS[status] >= RETRIED | {"succeeded"} for status in LIVE)


def test_only_waiting_rollouts_can_be_prepared() -> None:
    assert {
        status for status, following in ROLLOUT_TRANSITIONS.items() if "preparing" in following
    } == WAITING


def test_every_undecided_rollout_can_be_cancelled() -> None:
    assert {status for status, following in ROLLOUT_TRANSITIONS.items() if "cancelled" in following} == set(
        ROLLOUT_TRANSITIONS
    ) - FINISHED


@pytest.mark.parametrize(
    ("logprobs", "versions"), [([-1.0], [0, 0]), ([-1.0, -1.0], [0]), ([], []), ([-1.0] * 3, [0, 0])]
)
def test_a_generation_has_a_logprob_and_a_version_for_every_token(logprobs: list, versions: list) -> None:
    with pytest.raises(ValueError, match="equally many"):
        make_generation([1], [2, 3], logprobs=logprobs, versions=versions, key=make_key(call_id="c-7"))


def test_an_empty_generation_is_one() -> None:
    assert make_generation([1], []).output_ids.tolist() == []


def test_the_temperature_of_the_most_probable_token_is_one() -> None:
    assert make_generation([1], [2], temperature=0.0).temperature == 1.0
    assert make_generation([1], [2], temperature=0.3).temperature == 0.3


# spans


def test_a_span_of_attributes_has_what_was_not_given() -> None:
    one, two = (Span.from_attributes(name="n", attributes={"a": 1}) for _ in range(2))
    assert (one.status.status_code, one.rollout_id, one.sequence_id, one.parent, one.start_time) == (
        "OK",
        "",
        0,
        None,
        None,
    )
    assert (len(one.trace_id), len(one.span_id)) == (32, 16)
    assert one.span_id != two.span_id
    assert Span.from_attributes(attributes={}, span_id="b" * 16, trace_id=None).context.span_id == "b" * 16
    assert Span.from_attributes(attributes={}).name == VIRTUAL


def test_a_span_knows_its_parent() -> None:
    span = Span.from_attributes(name="n", attributes={}, trace_id="a" * 32, parent_id="c" * 16)
    assert (span.parent.trace_id, span.parent.span_id) == ("a" * 32, "c" * 16)


@pytest.mark.parametrize(("start", "end", "expected"), [(1.0, 2.0, (1.0, 2.0)), (1.0, None, (1.0, 1.0))])
def test_core_fields_are_keyed_to_an_attempt(start: float, end: float | None, expected: tuple) -> None:
    core = SpanCoreFields(name="n", attributes={"a": [1]}, start_time=start, end_time=end)
    span = Span.from_core_fields(core, rollout_id="ro-1", attempt_id="at-1", sequence_id=4)
    assert (span.rollout_id, span.attempt_id, span.sequence_id, span.name) == ("ro-1", "at-1", 4, "n")
    assert (span.start_time, span.end_time) == expected
    assert Span.from_core_fields(SpanCoreFields(name="n")).start_time is not None


def test_what_another_version_of_opentelemetry_adds_is_kept() -> None:
    span = Span.model_validate(
        Span.from_attributes(name="n", attributes={}).model_dump() | {"kind": "CLIENT"}
    )
    assert span.model_dump()["kind"] == "CLIENT"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ({"a": b"\xff"}, {"a": "ff"}),
        ({"a": (1, b"\x00")}, {"a": (1, "00")}),
        ({"a": [1, 2]}, {"a": [1, 2]}),
        ({"a": {"b": b"\x01", "c": None}}, {"a": {"b": "01", "c": None}}),
    ],
)
def test_attributes_become_what_json_can_hold(given: Any, expected: dict) -> None:
    assert plain_attributes(given) == expected


# rollouts


def test_a_rollout_marks_its_agents_once() -> None:
    rollout = make_rollout()
    for agent in ("b", "a", "b"):
        rollout.mark_agent_as_trainable(agent)
    assert rollout.metadata == {TRAINABLE_AGENTS: ["b", "a"]}
    assert make_rollout().metadata == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"timeout_seconds": 0},
        {"unresponsive_seconds": -1},
        {"retry_condition": {"boredom"}},
        {"retries": 3},
        {"infrastructure_retries": -1},
        {"max_turns": 0},
        {"max_tokens": 1.5},
        {"max_seconds": 0},
        {"truncated": "drop"},
        {"truncated_reward": float("nan")},
    ],
)
def test_a_rollout_config_refuses_what_it_cannot_mean(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="RolloutConfig"):
        RolloutConfig(**wrong)


def test_a_request_refuses_an_unknown_field_and_mode() -> None:
    with pytest.raises(ValidationError):
        EnqueueRolloutRequest(input=1, colour="red")
    with pytest.raises(ValidationError):
        EnqueueRolloutRequest(input=1, mode="play")


def test_a_failure_has_one_of_the_known_kinds() -> None:
    for kind in get_args(FailureKind):
        assert Failure.model_validate_json(Failure(kind=kind, error="E: e").model_dump_json()).kind == kind
    with pytest.raises(ValidationError):
        Failure(kind="bad luck", error="E: e")


def test_no_metadata_are_empty_metadata() -> None:
    assert EnqueueRolloutRequest(input=1, metadata=None).metadata == {}  # type: ignore[arg-type]
    rollout = Rollout(rollout_id="r", input=1, start_time=0.0, metadata=None)  # type: ignore[arg-type]
    rollout.mark_agent_as_trainable("planner")
    assert rollout.metadata == {TRAINABLE_AGENTS: ["planner"]}
    with pytest.raises(ValidationError, match="metadata"):
        EnqueueRolloutRequest(input=1, metadata="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy_logprobs", "allowed"), [([-1.0], [2]), ([-1.0, -1.0], []), ([], [2, 2]), ([-1.0, -1.0], [2])]
)
def test_a_constraint_is_recorded_for_all_tokens_or_none(
    policy_logprobs: list[float], allowed: list[int]
) -> None:
    with pytest.raises(ValueError, match="policy log-probs"):
        make_generation([1], [2, 3], policy_logprobs=policy_logprobs, allowed=allowed)
    made = make_generation([1], [2, 3], policy_logprobs=[-1.0, -2.0], allowed=[1, 2])
    assert made.allowed.tolist() == [1, 2]


@dataclass
class Pair:
    left: int
    right: str


def test_the_json_of_a_span_has_its_parts_that_are_not_empty() -> None:
    plain: dict[str, Any] = {"trace_id": "t", "span_id": "s", "name": "n"}
    assert span_json(Span(**plain, start_time=0.0)) == "{}"
    parts: dict[str, Any] = {
        "status": TraceStatus(status_code="ERROR", description="\ud800"),
        "attributes": {"a": (1, float("inf")), "b": True, "c": Pair(1, "x")},
        "events": [Event(name="e", attributes={"x": None}, colour="red")],
        "resource": {"attributes": {"service.name": "agent"}, "schema_url": "u"},
        "of_a_later_version": {"nested": TraceStatus()},
        "empty": None,
    }
    read = json.loads(span_json(Span(**plain, **parts)))
    assert read["status"] == {"status_code": "ERROR", "description": "\ud800"}
    assert read["attributes"] == {"a": [1, float("inf")], "b": True, "c": {"left": 1, "right": "x"}}
    assert read["events"] == [{"name": "e", "attributes": {"x": None}, "colour": "red"}]
    assert read["resource"] == parts["resource"]
    assert (read["of_a_later_version"], read["empty"]) == ({"nested": {}}, None)
    with pytest.raises(SpanError, match="set is not JSON serializable"):
        span_json(Span(**plain, attributes={"a": {object()}}))


# collections


def test_a_page_is_a_list_that_knows_its_place() -> None:
    page = PaginatedResult("abc", limit=2, offset=1, total=5)
    assert (page, page[1:], page.total, page.limit, page.offset) == (["a", "b", "c"], ["b", "c"], 5, 2, 1)
    assert repr(page) == "<PaginatedResult (1:3 of 5) ['a', ...]>"
    assert repr(PaginatedResult()) == "<PaginatedResult (0: of 0) empty>"
    assert vars(pickle.loads(pickle.dumps(page))) == vars(page)


def test_an_attempted_rollout_has_its_own_attempt() -> None:
    rollout = make_rollout("ro-1")
    fields = dict(rollout)
    assert AttemptedRollout(**fields).attempt == rollout.attempt
    for wrong in (fields | {"attempt": None}, fields | {"rollout_id": "ro-2"}):
        with pytest.raises(ValidationError):
            AttemptedRollout(**wrong)
