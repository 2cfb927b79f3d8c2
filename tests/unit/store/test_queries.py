"""Queries of the store: every filter, their logic, order and pages."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from store_helpers import BROKEN, LEASE_S, Box, ids_of, span_of

from raylight.errors import ConfigError, QueryError, UnknownIdError
from raylight.store.queries import Queries
from raylight.types import AttemptedRollout, EnqueueRolloutRequest, Rollout, Span

# rollouts


@pytest.fixture
async def four(box: Box) -> Box:
    """r-a succeeded, r-b failed, r-c running, x-d queuing; enqueued a second apart."""
    for name, mode in (("r-a", "train"), ("r-b", None), ("r-c", "val"), ("x-d", None)):
        await box.store.enqueue_rollout(name, mode=mode, rollout_id=name)
        box.clock.now += 1
    a, b, c = [await box.again() for _ in range(3)]
    await box.store.finish_attempt(a, "succeeded")
    box.clock.now += 1
    await box.store.finish_attempt(b, "failed", BROKEN)
    await box.store.add_span(span_of(c))
    return box


async def found(box: Box, **query: Any) -> str:
    return " ".join(rollout.rollout_id for rollout in await box.store.query_rollouts(**query))


@pytest.mark.parametrize(
    ("query", "total"),
    [
        ({}, 4),
        ({"limit": 3}, 4),
        ({"limit": 9, "offset": 1}, 4),
        ({"offset": 9}, 4),
        ({"limit": 0}, 4),
        ({"status_in": ["succeeded", "failed"], "limit": 1}, 2),
        ({"rollout_id_contains": "r-", "sort_by": "start_time", "limit": 1, "offset": 1}, 3),
        ({"status_in": ["cancelled"], "limit": 1}, 0),
    ],
)
async def test_a_page_tells_how_many_results_there_are(four: Box, query: dict[str, Any], total: int) -> None:
    page = await four.store.query_rollouts(**query)
    assert (page.total, page.limit, page.offset) == (total, query.get("limit", -1), query.get("offset", 0))


async def test_every_query_tells_how_many_results_there_are(four: Box) -> None:
    store = four.store
    await store.update_worker("w")
    await store.add_resources({})
    for _ in range(2):
        await store.start_attempt("r-c")
    assert (await store.query_attempts("r-c", limit=1)).total == 3
    assert (await store.query_spans("r-c", limit=0)).total == 1
    assert (await store.query_spans("x-d", "latest", limit=1)).total == 0
    assert (await store.query_resources(offset=5)).total == 1
    assert (await store.query_workers(limit=0)).total == 1


async def test_filters_have_the_names_of_agent_lightning_too(four: Box) -> None:
    assert await found(four, status=["failed"]) == "r-b"
    assert await found(four, rollout_ids=["r-a"], status=["succeeded"]) == "r-a"
    with pytest.raises(ConfigError, match="status_in and status mean the same"):
        await four.store.query_rollouts(status=["failed"], status_in=["queuing"])


async def test_a_rollout_with_an_attempt_is_of_a_type_of_its_own(four: Box) -> None:
    kinds = [type(rollout) for rollout in await four.store.query_rollouts()]
    assert kinds == [AttemptedRollout, AttemptedRollout, AttemptedRollout, Rollout]
    started = await four.store.start_rollout(1, group_id="g")
    assert (type(started), started.group_id) == (AttemptedRollout, "g")
    assert (await four.store.enqueue_rollout(1, group_id="g")).group_id == "g"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "r-a r-b r-c x-d"),
        ({"status_in": ["failed", "queuing"]}, "r-b x-d"),
        ({"status_in": ["cancelled"]}, ""),
        ({"status_in": []}, ""),
        ({"rollout_id_in": ["x-d", "r-a", "none", "r-a"]}, "r-a x-d"),
        ({"rollout_id_in": []}, ""),
        ({"rollout_id_in": ("r-b",)}, "r-b"),
        ({"rollout_id_contains": "-"}, "r-a r-b r-c x-d"),
        ({"rollout_id_contains": "r-"}, "r-a r-b r-c"),
        ({"rollout_id_contains": "R-"}, ""),
        ({"rollout_id_contains": "%"}, ""),
        ({"rollout_id_contains": ""}, "r-a r-b r-c x-d"),
        ({"status_in": ["running", "queuing"], "rollout_id_contains": "r"}, "r-c"),
        ({"status_in": ["queuing"], "rollout_id_contains": "r", "filter_logic": "or"}, "r-a r-b r-c x-d"),
        ({"status_in": ["queuing"], "rollout_id_in": ["r-b"], "filter_logic": "or"}, "r-b x-d"),
        ({"status_in": ["queuing"], "rollout_id_in": ["r-b"]}, ""),
        ({"status_in": [], "rollout_id_in": ["r-b"], "filter_logic": "or"}, "r-b"),
        ({"status_in": [], "filter_logic": "or"}, ""),
        ({"filter_logic": "or"}, "r-a r-b r-c x-d"),
        ({"limit": 2}, "r-a r-b"),
        ({"limit": 0}, ""),
        ({"limit": 2, "offset": 3}, "x-d"),
        ({"offset": 1}, "r-b r-c x-d"),
        ({"offset": 9}, ""),
        ({"limit": 2**63 - 1, "offset": 2**63 - 1}, ""),
        ({"sort_by": "rollout_id", "sort_order": "desc"}, "x-d r-c r-b r-a"),
        ({"sort_by": "start_time", "sort_order": "desc", "limit": 1}, "x-d"),
        ({"sort_by": "end_time"}, "r-c x-d r-a r-b"),
        ({"sort_by": "end_time", "sort_order": "desc"}, "r-b r-a r-c x-d"),
        ({"sort_by": "mode"}, "r-b x-d r-a r-c"),
        ({"sort_by": "mode", "sort_order": "desc"}, "r-c r-a r-b x-d"),
        ({"sort_by": "status"}, "r-b x-d r-c r-a"),
        ({"sort_by": "group_id", "sort_order": "desc"}, "r-a r-b r-c x-d"),
        ({"sort_order": "desc"}, "r-a r-b r-c x-d"),
    ],
)
async def test_rollouts(four: Box, query: dict[str, Any], expected: str) -> None:
    assert await found(four, **query) == expected


async def test_rollouts_come_with_their_latest_attempts(four: Box) -> None:
    for rollout in await four.store.query_rollouts():
        assert rollout == await four.store.get_rollout_by_id(rollout.rollout_id)
    with pytest.raises(UnknownIdError, match="ro-none"):
        await four.store.get_rollout_by_id("ro-none")


async def test_more_ids_than_a_statement_has_room_for(four: Box) -> None:
    ids = [f"none-{i}" for i in range(300_000)]
    assert await found(four, rollout_id_in=[*ids, "r-b"]) == "r-b"


async def test_odd_ids_are_found(box: Box) -> None:
    ids = ["it's", 'a "b"', "c d", "ü\U0001f600", "%_", "1"]
    await box.store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=i, rollout_id=name) for i, name in enumerate(ids)]
    )
    for i, name in enumerate(ids):
        (rollout,) = await box.store.query_rollouts(rollout_id_in=[name])
        assert (rollout.rollout_id, rollout.input) == (name, i)
        assert name in [
            rollout.rollout_id for rollout in await box.store.query_rollouts(rollout_id_contains=name)
        ]
        assert (await box.store.get_rollout_by_id(name)).input == i


# attempts


async def test_attempts(box: Box) -> None:
    rollout = await box.store.start_rollout(1, worker_id="b")
    for worker in ("a", None):
        box.clock.now += 1
        await box.store.start_attempt(rollout.rollout_id, worker)
    await box.store.update_attempt(rollout.rollout_id, "latest", status="failed")

    async def numbers(**query: Any) -> list[int]:
        return [
            attempt.sequence_id for attempt in await box.store.query_attempts(rollout.rollout_id, **query)
        ]

    assert await numbers() == await numbers(sort_by=None) == [1, 2, 3]
    assert await numbers(sort_order="desc", limit=2) == [3, 2]
    assert await numbers(offset=1, limit=1) == [2]
    assert await numbers(sort_by="worker_id") == [3, 2, 1]
    assert await numbers(sort_by="end_time", sort_order="desc") == [3, 1, 2]
    with pytest.raises(UnknownIdError, match="ro-none"):
        await box.store.query_attempts("ro-none")


# spans


@pytest.fixture
async def spanned(box: Box) -> tuple[Box, Rollout, Rollout]:
    """Two attempts: a (root of b) and b in the first, c without parent in the second."""
    first = await box.take()
    await box.store.add_many_spans(
        [
            span_of(first, "chat.a", span_id="s1", trace_id="t1", start_time=2.0),
            span_of(first, "Tool b", span_id="s2", trace_id="t1", parent_id="s1", start_time=1.0),
        ]
    )
    second = await box.store.start_attempt(first.rollout_id)
    await box.store.add_span(span_of(second, "chat.c", span_id="s3", trace_id="t2", parent_id="s9"))
    return box, first, second


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "s1 s3 s2"),
        ({"sort_by": None}, "s1 s2 s3"),
        ({"trace_id": "t1"}, "s1 s2"),
        ({"trace_id_contains": "t"}, "s1 s3 s2"),
        ({"trace_id": "t"}, ""),
        ({"span_id": "s2"}, "s2"),
        ({"span_id_contains": "3"}, "s3"),
        ({"parent_id": "s1"}, "s2"),
        ({"parent_id_contains": "s"}, "s3 s2"),
        ({"name": "chat.a"}, "s1"),
        ({"name": "chat"}, ""),
        ({"name_contains": "chat"}, "s1 s3"),
        ({"name_contains": "tool"}, ""),
        ({"name_contains": "_"}, ""),
        ({"name_contains": "chat", "trace_id": "t1"}, "s1"),
        ({"name_contains": "Tool", "trace_id": "t2", "filter_logic": "or"}, "s3 s2"),
        ({"name": "Tool b", "span_id": "s1", "filter_logic": "or"}, "s1 s2"),
        ({"name": "nothing", "filter_logic": "or"}, ""),
        ({"sort_by": "start_time", "trace_id": "t1"}, "s2 s1"),
        ({"sort_by": "parent_id", "sort_order": "asc"}, "s1 s2 s3"),
        ({"sort_by": "parent_id", "sort_order": "desc"}, "s3 s2 s1"),
        ({"sort_by": "span_id", "sort_order": "desc", "limit": 1, "offset": 1}, "s2"),
        ({"limit": 0}, ""),
    ],
)
async def test_spans(spanned: tuple[Box, Rollout, Rollout], query: dict[str, Any], expected: str) -> None:
    box, rollout, _ = spanned
    spans = await box.store.query_spans(rollout.rollout_id, **query)
    assert " ".join(span.span_id for span in spans) == expected


async def test_spans_of_one_attempt_and_of_the_latest(spanned: tuple[Box, Rollout, Rollout]) -> None:
    box, first, second = spanned

    async def of(*ids: Any, **query: Any) -> list[str]:
        return [span.span_id for span in await box.store.query_spans(*ids, **query)]

    assert await of(*ids_of(first)) == ["s1", "s2"]
    assert await of(*ids_of(second)) == await of(first.rollout_id, "latest") == ["s3"]
    assert await of(*ids_of(first), name="chat.a", trace_id="t2", filter_logic="or") == ["s1"]
    assert await of(first.rollout_id, "latest", trace_id="t1", filter_logic="or") == []
    (waiting,) = await box.enqueue()
    assert await of(waiting) == await of(waiting, "latest") == []


async def test_spans_of_what_is_not_there(spanned: tuple[Box, Rollout, Rollout]) -> None:
    box, first, _ = spanned
    other = await box.take()
    for ids in (
        ("ro-none",),
        ("ro-none", "latest"),
        (first.rollout_id, "at-none"),
        (first.rollout_id, ids_of(other)[1]),
    ):
        with pytest.raises(
            UnknownIdError,
            match="no rollout 'ro-none'" if ids[0] == "ro-none" else f"has no attempt {ids[-1]!r}",
        ):
            await box.store.query_spans(*ids)


# errors of wrong queries


Query = Callable[..., Any]
QUERIES: dict[str, Callable[[Box], Query]] = {
    "rollouts": lambda box: box.store.query_rollouts,
    "attempts": lambda box: lambda **q: box.store.query_attempts("ro", **q),
    "spans": lambda box: lambda **q: box.store.query_spans("ro", **q),
    "resources": lambda box: box.store.query_resources,
    "workers": lambda box: box.store.query_workers,
}


@pytest.mark.parametrize("which", QUERIES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sort_by": "body"}, "cannot sort by 'body'"),
        ({"sort_by": "start_time; DROP TABLE rollouts"}, "cannot sort by"),
        ({"sort_by": ""}, "cannot sort by ''"),
        ({"sort_order": "up"}, "sort_order is 'asc' or 'desc', not 'up'"),
        ({"limit": -2}, "limit must be at least -1"),
        ({"limit": 1.5}, "limit must be at least -1"),
        ({"limit": None}, "limit must be at least -1"),
        ({"limit": 2**63}, "limit must be at least -1"),
        ({"offset": -1}, "offset at least 0"),
        ({"offset": 2**70}, "offset at least 0"),
    ],
)
async def test_a_wrong_order_or_page_is_an_error(
    box: Box, which: str, wrong: dict[str, Any], message: str
) -> None:
    await box.store.enqueue_rollout(1, rollout_id="ro")
    with pytest.raises(QueryError, match=message):
        await QUERIES[which](box)(**wrong)


@pytest.mark.parametrize("which", ["rollouts", "spans", "workers"])
@pytest.mark.parametrize("filters", [{}, {"sort_by": None}])
async def test_a_wrong_logic_is_an_error(box: Box, which: str, filters: dict[str, Any]) -> None:
    await box.store.enqueue_rollout(1, rollout_id="ro")
    with pytest.raises(QueryError, match="filter_logic is 'and' or 'or', not 'xor'"):
        await QUERIES[which](box)(filter_logic="xor", **filters)


async def test_one_value_where_a_list_belongs_is_an_error(box: Box) -> None:
    with pytest.raises(QueryError, match=r"write \['queuing'\]"):
        await box.store.query_rollouts(status_in="queuing")
    with pytest.raises(QueryError, match="list of values"):
        await box.store.query_rollouts(rollout_id_in="ro")
    with pytest.raises(QueryError, match="list of values"):
        await box.store.query_workers(status_in="idle")


async def test_text_that_is_not_unicode_is_an_error_or_finds_nothing(box: Box) -> None:
    await box.store.enqueue_rollout(1, rollout_id="ro")
    for query in ({"rollout_id_contains": "\ud800"}, {"rollout_id_contains": "a\udfff"}):
        with pytest.raises(QueryError, match="not Unicode"):
            await box.store.query_rollouts(**query)
    for ids in (["\ud800"], ["\ud800", "\udfff"]):
        assert await box.store.query_rollouts(rollout_id_in=ids) == []
    with pytest.raises(QueryError, match="not Unicode"):
        await box.store.query_spans("ro", name="\ud800")


@pytest.mark.parametrize("wrong", ["none", "", "\ud800", "ro\0"])
async def test_an_id_that_there_cannot_be_is_unknown(box: Box, wrong: str) -> None:
    await box.store.enqueue_rollout(1, rollout_id="ro")
    store = box.store
    for ask in (
        store.get_rollout_by_id,
        store.get_latest_attempt,
        store.query_attempts,
        store.query_spans,
        store.get_resources_by_id,
        store.get_worker_by_id,
        lambda i: store.query_spans("ro", i),
        lambda i: store.collect(["ro", i]),
    ):
        with pytest.raises(UnknownIdError, match=re.escape(repr(wrong))):
            await ask(wrong)
    assert (await store.get_rollout_by_id("ro")).status == "queuing", "and the next query works"


@pytest.mark.parametrize("values", [["queuing"], [None], ["queuing", None], []])
async def test_a_filter_of_one_value_or_none_is_a_filter(box: Box, values: list[Any]) -> None:
    await box.enqueue(2)
    for logic in ("and", "or"):
        assert len(await box.store.query_rollouts(status_in=values, filter_logic=logic)) == 2 * (
            "queuing" in values
        )


async def test_reads_go_beside_the_writer(box: Box) -> None:
    rollout = await box.take()
    update = await box.store.add_resources({})
    statements: list[str] = []
    box.service._journal.db.set_trace_callback(statements.append)
    await box.store.get_rollout_by_id(rollout.rollout_id)
    await box.store.get_latest_attempt(rollout.rollout_id)
    await box.store.get_resources_by_id(update.resources_id)
    await box.store.get_latest_resources()
    await box.store.collect([rollout.rollout_id], with_spans=True)
    await box.store.statistics()
    assert await box.store.lease_s() == LEASE_S
    assert [s for s in statements if "deadline" not in s] == [], "but for the timer's"


async def test_what_a_query_reads_is_of_one_moment(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = await box.take(max_attempts=2, retry_condition={"failed"})
    look = Queries.rollout
    loop = asyncio.get_running_loop()

    def look_slowly(self: Queries, rollout_id: str) -> Any:
        found = look(self, rollout_id)
        asyncio.run_coroutine_threadsafe(again(), loop).result()
        return found

    async def again() -> None:
        await box.store.finish_attempt(rollout, "failed", None, [span_of(rollout)])
        await box.store.add_span(span_of(await box.again(), "of the second"))

    with monkeypatch.context() as patch:
        patch.setattr(Queries, "rollout", look_slowly)
        (found,) = await box.store.collect([rollout.rollout_id], with_spans=True)
    assert (found.rollout.attempt.sequence_id, found.spans) == (1, [])
    (found,) = await box.store.collect([rollout.rollout_id], with_spans=True)
    assert (found.rollout.attempt.sequence_id, [span.name for span in found.spans]) == (2, ["of the second"])


async def test_a_query_sees_what_was_acknowledged_before_it(box: Box) -> None:
    rollout = await box.take()
    for i in range(50):
        await box.store.add_span(span_of(rollout))
        assert len(await box.store.query_spans(rollout.rollout_id)) == i + 1


async def test_a_span_of_the_past_is_not_changed_by_who_reads_it(box: Box) -> None:
    rollout = await box.take()
    await box.store.add_span(span_of(rollout, attributes={"a": [1]}))
    (first,) = await box.store.query_spans(rollout.rollout_id)
    assert isinstance(first, Span)
    first.attributes["a"].append(2)
    assert (await box.store.query_spans(rollout.rollout_id))[0].attributes == {"a": [1]}
