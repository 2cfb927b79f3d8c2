"""No call of the store walks through all rollouts: every statement that it uses finds what it needs through
an index."""

import re
import sqlite3
from typing import Any

import pytest
from store_helpers import BROKEN, LOST, Box, call_of, ids_of, open_box, reward_of, span_of
from unit_helpers import make_generation

from raylight.types import EnqueueRolloutRequest, RolloutConfig

LARGE = re.compile(r"\bSCAN (rollouts|attempts|spans|calls|clients|sampled|r|a|s)\b")
"""A walk through all of a table that grows with the run."""
THROUGH_A_SMALL_INDEX = re.compile(
    r"USING (COVERING )?INDEX (rollouts_queue|attempts_deadline|attempts_worker|calls_open|rollouts_start)\b"
)
"""Partial indexes, which hold only what waits or runs, and one that is walked in order, up to the end of the
page."""


async def use_everything(box: Box) -> None:
    """Every call of the store, and every way through it."""
    store = box.store
    old = await store.add_resources({"a": 1})
    await store.update_resources(old.resources_id, {"a": 2})
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=i, resources_id=old.resources_id) for i in range(4)]
    )
    await store.start_rollout(1, worker_id="w")
    first = await box.take("w", timeout_seconds=5, max_attempts=3, retry_condition={"failed"})
    key = call_of(first)
    await store.capture(
        [(key, 0.0), (call_of(first), 0.0)], [(key, make_generation([1], [2], key=key), span_of(first))]
    )
    await store.add_many_spans([span_of(first), reward_of(first, 1.0)])
    await store.get_many_span_sequence_ids([ids_of(first)])
    await store.heartbeat("w", {}, [ids_of(first)[1]])
    await store.update_worker("w", {"a": 1})
    await store.finish_attempt(first, "failed", BROKEN, [span_of(first)], timeout=0)
    second = (await store.dequeue_many_rollouts(limit=9, worker_id="v", timeout=1))[-1]
    await store.update_rollout(
        second.rollout_id, config=RolloutConfig(timeout_seconds=9), metadata={}, mode="val"
    )
    await store.update_attempt(second.rollout_id, "latest", worker_id="x", metadata={})
    await store.update_attempt(second.rollout_id, "latest", status="failed", failure=LOST)
    await store.start_attempt(second.rollout_id)
    await box.pass_time(1000)
    await box.service.dequeue("v", 1, 1, "request")
    await store.add_span(span_of(first))
    await store.release_worker("v", "died")
    await store.cancel_rollouts([second.rollout_id])
    await store.wait_until_decided(rollout_ids=[second.rollout_id, first.rollout_id], at_least=1)
    await store.collect([first.rollout_id, second.rollout_id], with_spans=True)
    await store.get_latest_attempt(first.rollout_id)
    await store.count_sampled_tokens([first.rollout_id])
    await store.token_totals("ro-", 1, [0])
    await store.get_resources_by_id(old.resources_id)
    await store.get_latest_resources()
    await store.get_worker_by_id("w")
    await store.statistics()
    await store.lease_s()
    await store.chat_history(*ids_of(first))
    box.service._leases.renew_all()
    await query_everything(box, first.rollout_id)


async def query_everything(box: Box, rollout_id: str) -> None:
    store = box.store
    await store.query_rollouts(status_in=["queuing", "running"], limit=5)
    await store.query_rollouts(status_in=["succeeded"], sort_by="start_time", sort_order="desc", limit=5)
    await store.query_rollouts(rollout_id_in=[rollout_id], sort_by="start_time", sort_order="desc")
    await store.query_rollouts(rollout_id_in=[rollout_id], status_in=["failed"], filter_logic="or")
    await store.query_rollouts(rollout_id_in=[rollout_id], status_in=["failed"])
    await store.query_rollouts(sort_by="start_time", limit=5)
    assert (await store.query_rollouts(sort_by="start_time", limit=0)).total == 6
    assert (await store.query_rollouts(status_in=["failed"], limit=0)).total
    await store.query_attempts(rollout_id, sort_by="start_time", limit=1)
    await store.query_spans(rollout_id)
    await store.query_spans(
        rollout_id, "latest", name_contains="s", trace_id="t", filter_logic="or", sort_by="name"
    )
    await store.query_resources(resources_id_contains="rs", limit=1)
    await store.query_workers(status_in=["busy"], worker_id_contains="w")


def plan_of(db: sqlite3.Connection, statement: str) -> list[str]:
    return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()]


async def test_no_statement_walks_through_a_large_table() -> None:
    async with open_box() as box:
        statements: set[str] = set()
        journal = box.service._journal
        for db in (journal.db, journal.reader):
            db.set_trace_callback(statements.add)
        await use_everything(box)
        for db in (journal.db, journal.reader):
            db.set_trace_callback(None)
        asked = [
            s for s in statements if s.lstrip().upper().startswith(("SELECT", "UPDATE", "INSERT", "DELETE"))
        ]
        assert len(asked) > 40
        assert any("suspect = 1 ORDER BY queue" in s for s in asked)
        assert any("FROM clients" in s for s in asked)
        walks = {
            statement: step
            for statement in asked
            for step in plan_of(journal.db, statement)
            if LARGE.search(step) and not THROUGH_A_SMALL_INDEX.search(step)
        }
        assert walks == {}


@pytest.mark.parametrize(
    "query",
    [
        {"status_in": ["succeeded"], "sort_by": "start_time", "sort_order": "desc", "limit": 5},
        {"status_in": ["succeeded"], "limit": 5},
        {"sort_by": "start_time", "sort_order": "desc", "limit": 5},
        {"limit": 5},
    ],
)
async def test_a_page_is_read_in_the_order_of_an_index(query: dict[str, Any]) -> None:
    """Nothing is sorted but what began at the same time, so that the page costs no more in a long run."""
    async with open_box() as box:
        statements: list[str] = []
        journal = box.service._journal
        journal.reader.set_trace_callback(statements.append)
        await box.store.query_rollouts(**query)
        journal.reader.set_trace_callback(None)
        (asked,) = [s for s in statements if s.startswith("SELECT") and "COUNT" not in s]
        assert "USE TEMP B-TREE FOR ORDER BY" not in plan_of(journal.db, asked)


async def test_this_test_would_see_a_walk() -> None:
    async with open_box() as box:
        db = box.service._journal.db
        for statement in (
            "SELECT * FROM rollouts WHERE mode = 'val'",
            "SELECT 1 FROM rollouts r JOIN attempts a USING (rollout_id)",
        ):
            assert any(
                LARGE.search(step) and not THROUGH_A_SMALL_INDEX.search(step)
                for step in plan_of(db, statement)
            ), statement
