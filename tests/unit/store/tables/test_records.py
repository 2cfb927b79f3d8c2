"""Spans in the store: kept once, in order, and only if they can be read back."""

import asyncio
import math
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, StatusCode
from store_helpers import BROKEN, LEASE_S, Box, ids_of, open_box, reward_of, span_of

from raylight.agent.emit import emit_reward
from raylight.errors import SpanError, UnknownIdError
from raylight.semconv import REWARD_AGENT, reward_attributes
from raylight.traces.reward_spans import NamedReward, get_any_rewards
from raylight.types import AttemptedRollout, Event, OtelResource, Span, SpanContext, TraceStatus
from raylight.types import Link as SpanLink


async def spans_in(box: Box, rollout: Any) -> list[Span]:
    return await box.store.query_spans(rollout.rollout_id)


async def test_a_span_comes_back_as_it_was_given(box: Box) -> None:
    rollout = await box.take()
    span = span_of(
        rollout,
        "näme 'x\" \0",
        parent_id="p" * 16,
        start_time=1.5,
        end_time=2.5,
        trace_id="t" * 32,
        status=TraceStatus(status_code="ERROR", description="d"),
        attributes={
            "s": "\ud800 ä",
            "i": 2**200,
            "f": 0.1,
            "b": True,
            "l": [1, 2],
            "n": None,
            "d": {"a": [{}]},
            "inf": -math.inf,
        },
        events=[Event(name="e", attributes={"a": 1}, timestamp=1.0)],
        links=[
            SpanLink(
                context=SpanContext(trace_id="a" * 32, span_id="b" * 16, trace_state={"k": "v"}),
                attributes={"x": 1},
            )
        ],
        resource=OtelResource(attributes={"service.name": "s"}, schema_url="u"),
    )
    stored = await box.store.add_span(span)
    assert stored == span.model_copy(update={"sequence_id": 1})
    assert await spans_in(box, rollout) == [stored]


async def test_what_cannot_be_compared_comes_back_too(box: Box) -> None:
    rollout = await box.take()
    await box.store.add_span(span_of(rollout, attributes={"nan": math.nan, "t": (1, 2)}, extra_field="kept"))
    (span,) = await spans_in(box, rollout)
    assert math.isnan(span.attributes["nan"])
    assert (span.attributes["t"], span.model_extra) == ([1, 2], {"extra_field": "kept"})


async def test_a_large_span_comes_back(box: Box) -> None:
    rollout = await box.take()
    attributes = {"text": "x" * 5_000_000, "numbers": list(range(200_000))} | {
        f"k{i}": i for i in range(2000)
    }
    await box.store.add_span(span_of(rollout, attributes=attributes))
    assert (await spans_in(box, rollout))[0].attributes == attributes


async def test_a_duplicate_says_so_and_changes_nothing(box: Box) -> None:
    rollout = await box.take()
    span = span_of(rollout)
    first = await box.store.add_span(span)
    assert await box.store.add_span(span) is None
    assert await box.store.add_span(span.model_copy(update={"name": "other", "sequence_id": 7})) is None
    new = span_of(rollout)
    assert [s.span_id for s in await box.store.add_many_spans([span, new, new])] == [new.span_id]
    assert [s.sequence_id for s in await spans_in(box, rollout)] == [1, 2]
    assert (await spans_in(box, rollout))[0] == first
    assert (await box.count("total_spans"), await box.count("spans_duplicate")) == (2, 4)


async def test_the_same_span_id_in_two_attempts_is_two_spans(box: Box) -> None:
    first = await box.take()
    await box.store.add_span(span_of(first, span_id="same"))
    second = await box.store.start_attempt(first.rollout_id)
    assert (await box.store.add_span(span_of(second, span_id="same"))).sequence_id == 1
    assert len(await spans_in(box, first)) == 2


async def test_many_spans_are_stored_together_or_not_at_all(box: Box) -> None:
    one, two = await box.take(), await box.take()
    stored = await box.store.add_many_spans([span_of(one), span_of(two), span_of(one)])
    assert [(span.rollout_id, span.sequence_id) for span in stored] == [
        (one.rollout_id, 1),
        (two.rollout_id, 1),
        (one.rollout_id, 2),
    ]
    wrong = span_of(one).model_copy(update={"attempt_id": "at-none"})
    with pytest.raises(UnknownIdError, match="at-none"):
        await box.store.add_many_spans([span_of(one), wrong])
    assert await box.store.add_many_spans([]) == []
    assert await box.count("total_spans") == 3


@pytest.mark.parametrize("which", ["rollout", "attempt", "latest", "empty", "of another"])
async def test_a_span_of_an_unknown_attempt_is_an_error(box: Box, which: str) -> None:
    rollout, other = await box.take(), await box.take()
    ids = {
        "rollout": ("ro-none", ids_of(rollout)[1]),
        "attempt": (rollout.rollout_id, "at-none"),
        "empty": ("", ""),
        "latest": (rollout.rollout_id, "latest"),
        "of another": (rollout.rollout_id, ids_of(other)[1]),
    }[which]
    with pytest.raises(UnknownIdError):
        await box.store.add_span(
            span_of(rollout).model_copy(update=dict(zip(("rollout_id", "attempt_id"), ids, strict=True)))
        )
    if which != "latest":
        with pytest.raises(UnknownIdError):
            await box.store.get_next_span_sequence_id(*ids)
    assert await box.count("total_spans") == 0
    assert await box.store.get_next_span_sequence_id(*ids_of(rollout)) == 1


def circular() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


@pytest.mark.parametrize(
    "fields",
    [
        {"attributes": {"a": b"bytes"}},
        {"attributes": {"a": {1, 2}}},
        {"attributes": {"a": object()}},
        {"attributes": {"a": circular()}},
        {"attributes": {"a": deep()}},
        {"attributes": {"a": 10**5000}},
        {"name": "\ud800"},
        {"span_id": "\udfff"},
        {"trace_id": "x\ud800"},
        {"parent_id": "\ud800"},
        {"sequence_id": -1},
        {"sequence_id": 2**63},
        {"sequence_id": 2**200},
        {"events": [Event(name="e", attributes={"a": object()})]},
    ],
    ids=[
        "bytes",
        "set",
        "object",
        "circular",
        "deep",
        "endless number",
        "name",
        "span id",
        "trace id",
        "parent id",
        "negative",
        "too high",
        "much too high",
        "event",
    ],
)
async def test_a_span_that_cannot_be_stored_is_an_error_that_names_it(
    box: Box, fields: dict[str, Any]
) -> None:
    rollout = await box.take()
    bad, good = span_of(rollout, **{"name": "bad", **fields}), span_of(rollout)
    added = await asyncio.gather(box.store.add_span(good), box.store.add_span(bad), return_exceptions=True)
    assert isinstance(added[1], SpanError)
    assert repr(bad.name) in str(added[1])
    with pytest.raises(SpanError):
        await box.store.finish_attempt(rollout, "succeeded", None, [bad])
    assert [span.span_id for span in await spans_in(box, rollout)] == [good.span_id]


# sequence ids


async def test_sequence_ids_only_grow(box: Box) -> None:
    rollout = await box.take()
    ids = ids_of(rollout)
    assert [await box.store.get_next_span_sequence_id(*ids) for _ in range(2)] == [1, 2]
    assert (await box.store.add_span(span_of(rollout))).sequence_id == 3
    assert (await box.store.add_span(span_of(rollout, sequence_id=10))).sequence_id == 10
    assert (await box.store.add_span(span_of(rollout, sequence_id=2))).sequence_id == 2
    assert (await box.store.add_span(span_of(rollout))).sequence_id == 11
    stored = await box.store.add_many_spans(
        [span_of(rollout), span_of(rollout, sequence_id=20), span_of(rollout)]
    )
    assert [span.sequence_id for span in stored] == [12, 20, 21]
    assert [span.sequence_id for span in await spans_in(box, rollout)] == [2, 3, 10, 11, 12, 20, 21]


async def test_many_sequence_ids_at_once(box: Box) -> None:
    one, two = ids_of(await box.take()), ids_of(await box.take())
    assert await box.store.get_many_span_sequence_ids([one, two, one, one]) == [1, 1, 2, 3]
    assert await box.store.get_many_span_sequence_ids([]) == []
    with pytest.raises(UnknownIdError, match="at-none"):
        await box.store.get_many_span_sequence_ids([one, (two[0], "at-none")])
    assert await box.store.get_many_span_sequence_ids([one, two]) == [4, 2]
    assert await box.store.get_many_span_sequence_ids([(one[0], "latest"), one]) == [5, 6]
    assert await box.store.get_next_span_sequence_id(two[0], "latest") == 3
    (waiting,) = await box.enqueue()
    with pytest.raises(UnknownIdError, match="has no attempt 'latest'"):
        await box.store.get_next_span_sequence_id(waiting, "latest")


async def test_a_hundred_who_ask_together_get_a_hundred_numbers(box: Box) -> None:
    ids = ids_of(await box.take())
    asked = await asyncio.gather(*[box.store.get_next_span_sequence_id(*ids) for _ in range(100)])
    assert asked == list(range(1, 101))


# spans of the OpenTelemetry SDK


def sdk_spans() -> list[Any]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "agent"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("t")
    with tracer.start_as_current_span("outer") as outer:
        outer.set_status(StatusCode.ERROR, "why")
        with tracer.start_as_current_span("inner", links=[Link(outer.get_span_context(), {"l": 1})]) as inner:
            inner.set_attributes({"a": [1, 2], "r": 0.25, **reward_attributes({"primary": 0.5})})
            inner.add_event("event", {"e": True}, timestamp=5_000_000_000)
    return list(exporter.get_finished_spans())


async def test_a_span_of_the_sdk_is_stored_as_it_is(box: Box) -> None:
    rollout = await box.take()
    inner, outer = sdk_spans()
    stored = [await box.store.add_otel_span(*ids_of(rollout), span) for span in (inner, outer)]
    found = await spans_in(box, rollout)
    assert [span.model_dump_json() for span in found] == [span.model_dump_json() for span in stored]
    assert [span.sequence_id for span in stored] == [1, 2]
    assert (stored[0].trace_id, stored[0].span_id) == (
        f"{inner.context.trace_id:032x}",
        f"{inner.context.span_id:016x}",
    )
    assert stored[0].parent_id == stored[1].span_id
    assert (found[0].attributes["a"], stored[0].start_time, stored[0].end_time) == (
        [1, 2],
        inner.start_time / 1e9,
        inner.end_time / 1e9,
    )
    assert (stored[0].events[0].name, stored[0].events[0].timestamp) == ("event", 5.0)
    assert stored[0].links[0].context.span_id == stored[1].span_id
    assert stored[1].status == TraceStatus(status_code="ERROR", description="why")
    assert stored[1].resource.attributes["service.name"] == "agent"
    assert await box.store.add_otel_span(*ids_of(rollout), inner) is None
    assert (await box.store.collect([rollout.rollout_id]))[0].reward == 0.5


async def test_a_span_of_the_sdk_with_a_number_of_ones_own(box: Box) -> None:
    rollout = await box.take()
    inner, outer = sdk_spans()
    assert (await box.store.add_otel_span(*ids_of(rollout), inner, sequence_id=7)).sequence_id == 7
    assert (await box.store.add_otel_span(*ids_of(rollout), outer, 0)).sequence_id == 8
    with pytest.raises(UnknownIdError):
        await box.store.add_otel_span("ro-none", "at-none", outer)


# rewards


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "much", None])
async def test_a_reward_that_is_no_number_is_none(box: Box, value: Any) -> None:
    rollout = await box.take()
    await box.store.add_many_spans([reward_of(rollout, 0.25), reward_of(rollout, value)])
    assert (await box.store.collect([rollout.rollout_id]))[0].reward == 0.25


async def test_the_last_reward_by_sequence_id_counts(box: Box) -> None:
    rollout = await box.take()
    await box.store.add_many_spans(
        [reward_of(rollout, 1), span_of(rollout), reward_of(rollout, -2.5), span_of(rollout)]
    )
    assert (await box.store.collect([rollout.rollout_id]))[0].reward == -2.5
    await box.store.add_span(reward_of(rollout, 9).model_copy(update={"sequence_id": 2}))
    assert (await box.store.collect([rollout.rollout_id]))[0].reward == -2.5


@pytest.mark.parametrize("end", ["succeeded", "failed", "timeout", "released"])
async def test_a_reward_that_comes_after_the_end_changes_nothing(box: Box, end: str) -> None:
    rollout = await box.take()
    await box.store.add_span(reward_of(rollout, 0.25))
    if end == "released":
        await box.store.release_worker("w", "died")
    else:
        await box.store.finish_attempt(
            rollout, end, None if end == "succeeded" else BROKEN, [reward_of(rollout, 0.5)]
        )
    decided = (await box.store.collect([rollout.rollout_id]))[0].reward
    assert decided == (0.25 if end == "released" else 0.5)
    late = reward_of(rollout, 9.0)
    assert (await box.store.add_span(late)).attributes == late.attributes
    assert await box.store.add_span(late) is None
    assert (await box.store.collect([rollout.rollout_id]))[0].reward == decided
    assert (await spans_in(box, rollout))[-1].attributes == late.attributes, "it is kept as it came"
    assert (await box.count("spans_late"), await box.count("spans_duplicate")) == (1, 1)


async def test_the_last_spans_of_an_attempt_that_was_decided_before_are_late(box: Box) -> None:
    rollout = await box.take(timeout_seconds=5)
    await box.pass_time(5)
    late = [span_of(rollout), reward_of(rollout, 1.0)]
    for _ in range(2):
        assert (await box.store.finish_attempt(rollout, "succeeded", None, late)).status == "failed"
    (found,) = await box.store.collect([rollout.rollout_id], with_spans=True)
    assert (found.reward, [span.span_id for span in found.spans]) == (None, [span.span_id for span in late])
    assert await box.count("spans_late") == 2


async def test_the_spans_of_an_attempt_are_bounded(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes' spans, whose sequence ids have gaps, count too. Rewards have separate room."""
    monkeypatch.setattr("raylight.store.tables.records.MAX_SPANS", 4)
    rollout = await box.take()
    await box.store.add_many_spans([span_of(rollout), reward_of(rollout, 0.25), span_of(rollout)])
    await box.store.get_many_span_sequence_ids([ids_of(rollout)] * 5)
    stored = await box.store.add_many_spans(
        [span_of(rollout), span_of(rollout), span_of(rollout), reward_of(rollout, 0.75), span_of(rollout)]
    )
    assert len(stored) == 3
    decided = await box.store.finish_attempt(rollout, "succeeded", None, [span_of(rollout)])
    (found,) = await box.store.collect([rollout.rollout_id], with_spans=True)
    assert (decided.status, found.reward, len(found.spans)) == ("succeeded", 0.75, 6)
    assert (await box.count("spans_dropped"), await box.count("spans_duplicate")) == (3, 0)


async def test_an_attempt_with_too_many_rewards_fails(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.store.tables.records.MAX_REWARD_SPANS", 3)
    rollout, other = await box.take(), await box.take()
    for value in range(5):
        await box.store.add_span(reward_of(rollout, value))
    for value in range(3):
        await box.store.add_span(reward_of(other, value))
    assert (await box.store.finish_attempt(other, "succeeded")).status == "succeeded"
    failed = await box.store.finish_attempt(rollout, "succeeded")
    assert (failed.status, failed.attempt.failure.kind) == ("failed", "reward")
    assert "more than 3 spans with a reward" in failed.attempt.failure.error
    assert await box.count("spans_dropped") == 1


async def test_spans_that_arrive_again_take_no_room(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.store.tables.records.MAX_REWARD_SPANS", 3)
    monkeypatch.setattr("raylight.store.tables.records.MAX_SPANS", 3)
    rollout = await box.take()
    sent = [span_of(rollout), span_of(rollout), reward_of(rollout, 0.25), reward_of(rollout, 0.5)]
    await box.store.add_many_spans(sent)
    new = [span_of(rollout), reward_of(rollout, 0.75)]
    assert len(await box.store.add_many_spans([*sent, *new])) == 2
    assert (await box.store.finish_attempt(rollout, "succeeded")).status == "succeeded"
    (found,) = await box.store.collect([rollout.rollout_id], with_spans=True)
    assert (found.reward, len(found.spans)) == (0.75, 6)
    assert (await box.count("spans_dropped"), await box.count("spans_duplicate")) == (0, 4)


async def test_a_span_that_comes_before_the_end_is_not_late(box: Box) -> None:
    rollout = await box.take()
    spans = [span_of(rollout), reward_of(rollout, 1.0)]
    for _ in range(2):
        await box.store.finish_attempt(rollout, "succeeded", None, spans)
    assert await box.store.add_many_spans(spans) == []
    unresponsive = await box.take()
    await box.pass_time(LEASE_S)
    await box.store.add_span(reward_of(unresponsive, 0.5))
    assert (await box.store.collect([unresponsive.rollout_id]))[0].reward == 0.5
    assert await box.count("spans_late") == 0


async def test_rewards_of_agents_are_not_the_rollouts_and_do_not_come_late() -> None:
    def reward(rollout: AttemptedRollout, value: float, agent: str | None = None) -> Span:
        core = emit_reward(value, agent=agent, propagate=False)
        own = Span.from_core_fields(core)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        return own.model_copy(update=ids)

    async with open_box() as box:
        rollout = await box.store.start_rollout("task")
        await box.store.add_many_spans([reward(rollout, 0.5), reward(rollout, 1.0, "planner")])
        await box.store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
        await box.store.add_span(reward(rollout, 9.0, "planner"))
        (found,) = await box.store.collect([rollout.rollout_id], with_spans=True)
        assert (found.reward, found.rewards) == (0.5, {"primary": 0.5})
        assert [get_any_rewards(span)[:1] for span in found.spans] == [
            [NamedReward(name="primary", value=0.5)],
            [NamedReward(name="primary", value=1.0)],
            [],
        ]
        assert REWARD_AGENT not in found.spans[-1].attributes
