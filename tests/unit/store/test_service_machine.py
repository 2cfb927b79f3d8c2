"""The store against a small model of its rules, under any sequence of events, some of them late, wrong, or
across a restart."""

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_helpers import BROKEN, LEASE_S, LOST, Clock, reward_of, span_of
from store_model import CONFIGS, FINAL, LIVE, OVER, Known, Try
from unit_helpers import make_generation

from raylight.config import StoreConfig
from raylight.errors import InvalidTransitionError, WorkerGoneError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.store.tables.attempts import TIMEOUT_GRACE_S
from raylight.store.tables.transitions import MAX_BACKOFF_S, backoff_seconds
from raylight.types import CallKey, EnqueueRolloutRequest, Rollout, RolloutConfig


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.known: dict[str, Known] = {}
        self.queue: list[str] = []
        self.calls: list[tuple[Try, str]] = []
        self.late: Counter[str] = Counter()
        self.deaths = Counter[str]()
        self.runners = set[str | None]()
        """Workers that have sent heartbeats."""
        self.away = False
        self.numbers = itertools.count()
        self.open()

    def open(self) -> None:
        self.service = StoreService(
            Path(self.folder.name, "s.db"), StoreConfig(lease_s=LEASE_S), self.clock, self.clock.lived
        )
        self.store = StoreClient(self.service)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @property
    def tries(self) -> list[Try]:
        return [attempt for known in self.known.values() for attempt in known.tries]

    def worker(self, slot: str) -> str:
        """Current worker of a slot; each death brings another."""
        return f"{slot}{self.deaths[slot]}"

    def held_by(self, worker: str | None) -> list[Try]:
        return [attempt for attempt in self.tries if attempt.worker == worker and attempt.status in LIVE]

    def offered(self, worker: str | None, limit: int) -> list[str]:
        """Expected rollouts of a dequeue: one suspect, unless the worker has one, and the oldest others."""
        if self.away:
            return []
        queue = [
            rollout_id for rollout_id in self.queue if self.known[rollout_id].held_until <= self.clock.lived()
        ]
        suspects = [rollout_id for rollout_id in queue if self.known[rollout_id].suspect]
        if worker is not None and any(attempt.rollout.suspect for attempt in self.held_by(worker)):
            suspects = []
        others = [rollout_id for rollout_id in queue if not self.known[rollout_id].suspect]
        return (suspects[:1] + others)[:limit]

    # the rules of the model

    def begin(self, rollout: Rollout, worker: str | None, leased: bool) -> None:
        known = self.known[rollout.rollout_id]
        now = self.clock.lived()
        known.tries.append(Try(known, rollout, worker, leased, now, heard=now, spoke=now))
        self.put(known, "preparing")
        assert (rollout.status, rollout.attempt.sequence_id) == ("preparing", len(known.tries))

    def put(self, known: Known, status: str) -> None:
        """A rollout's new status, and its place in the queue."""
        rollout_id = next(i for i, other in self.known.items() if other is known)
        if rollout_id in self.queue:
            self.queue.remove(rollout_id)
        if status in ("queuing", "requeuing"):
            self.queue.append(rollout_id)
        known.status, known.held_until = status, 0.0

    def become(
        self,
        attempt: Try,
        status: str,
        infrastructure: bool = False,
        charged: bool = True,
        reported: bool = False,
    ) -> None:
        """An attempt's new status, and what follows for its rollout."""
        known, before, was_lost = attempt.rollout, attempt.status, attempt.lost
        attempt.status, attempt.lost = status, infrastructure and status == "unresponsive"
        attempt.infrastructure = infrastructure
        if status in FINAL:
            attempt.open.clear()
            attempt.ended = self.clock.lived()
        if known.tries[-1] is attempt and status not in LIVE and not infrastructure:
            known.suspect = False
        if known.tries[-1] is not attempt or known.status == "cancelled":
            return
        if before == "unresponsive":
            if status in ("running", "succeeded") and known.status in ("requeuing", "failed"):
                known.lost = max(known.lost - was_lost, 0)
                known.charged = max(known.charged - was_lost, 0)
                attempt.charged &= not was_lost
                self.put(known, status)
        elif known.status == "requeuing":
            if status == "succeeded":
                self.put(known, status)
        elif known.status not in OVER:
            known.lost += infrastructure
            known.charged += infrastructure and charged
            attempt.charged = infrastructure and charged
            self.put(
                known, status if status in ("running", "succeeded") else known.verdict(status, infrastructure)
            )
            if infrastructure and reported and known.status == "requeuing":
                delay = backoff_seconds(known.charged, attempt.taken.attempt.attempt_id)
                known.held_until = self.clock.lived() + delay

    def heard(self, attempt: Try) -> None:
        """A span or a call came."""
        if attempt.status not in FINAL:
            if attempt.status != "running":
                self.become(attempt, "running")
            attempt.heard = attempt.spoke = self.clock.lived()
            attempt.silent_from = 0.0

    # events

    @rule(count=st.integers(1, 3), config=st.sampled_from(CONFIGS))
    def enqueue(self, count: int, config: RolloutConfig) -> None:
        for _ in range(count):
            rollout_id = f"ro-{next(self.numbers)}"
            for _ in range(2):  # the second time it is there already
                request = EnqueueRolloutRequest(input=1, rollout_id=rollout_id, config=config)
                assert [r.rollout_id for r in self.do(self.store.enqueue_many_rollouts([request]))] == [
                    rollout_id
                ]
            self.known[rollout_id] = Known(config)
            self.queue.append(rollout_id)

    @rule(slot=st.sampled_from(["a", "b", None]), limit=st.integers(1, 4))
    def dequeue(self, slot: str | None, limit: int) -> None:
        worker = slot and self.worker(slot)
        offered = self.offered(worker, limit)
        assert self.service._leases.can_dequeue(worker) == bool(offered)
        taken = self.do(self.store.dequeue_many_rollouts(limit=limit, worker_id=worker))
        assert [rollout.rollout_id for rollout in taken] == offered
        for rollout in taken:
            self.begin(rollout, worker, leased=True)

    @precondition(lambda self: self.deaths)
    @rule(data=st.data(), timeout=st.sampled_from([0, 60]))
    def dequeue_after_death(self, data: st.DataObject, timeout: float) -> None:
        slot = data.draw(st.sampled_from(sorted(self.deaths)))
        with pytest.raises(WorkerGoneError):
            self.do(
                self.store.dequeue_rollout(
                    f"{slot}{data.draw(st.integers(0, self.deaths[slot] - 1))}", timeout=timeout
                )
            )

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def start_attempt(self, data: st.DataObject) -> None:
        rollout_id = data.draw(st.sampled_from(sorted(self.known)))
        if self.known[rollout_id].status == "cancelled":
            with pytest.raises(InvalidTransitionError):
                self.do(self.store.start_attempt(rollout_id))
        else:
            self.begin(self.do(self.store.start_attempt(rollout_id, "c")), "c", leased=False)

    @precondition(lambda self: self.tries)
    @rule(data=st.data(), reward=st.none() | st.floats(-1, 1), twice=st.booleans())
    def span(self, data: st.DataObject, reward: float | None, twice: bool) -> None:
        attempt = data.draw(st.sampled_from(self.tries))
        span = span_of(attempt.taken) if reward is None else reward_of(attempt.taken, reward)
        stored = self.do(self.store.add_many_spans([span, span] if twice else [span]))
        attempt.spans.append(span.span_id)
        assert [s.sequence_id for s in stored] == [len(attempt.spans)]
        if attempt.status in FINAL:
            self.late["spans_late"] += 1
        elif reward is not None:
            attempt.reward = reward
        self.heard(attempt)

    @precondition(lambda self: self.tries)
    @rule(data=st.data())
    def open_call(self, data: st.DataObject) -> None:
        attempt, call_id = data.draw(st.sampled_from(self.tries)), f"c{next(self.numbers)}"
        key = CallKey(attempt.taken.rollout_id, attempt.taken.attempt.attempt_id, call_id)
        self.do(self.store.capture([(key, float(next(self.numbers)))], []))
        self.calls.append((attempt, call_id))
        if attempt.status in FINAL:
            self.late["calls_late"] += 1
        else:
            attempt.open.add(call_id)
            self.heard(attempt)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), sampled=st.booleans())
    def close_call(self, data: st.DataObject, sampled: bool) -> None:
        attempt, call_id = data.draw(st.sampled_from(self.calls))
        key = CallKey(attempt.taken.rollout_id, attempt.taken.attempt.attempt_id, call_id)
        prompt = [1] * data.draw(st.sampled_from([1, 20, 40])) + [int(call_id[1:])] * 20
        call = make_generation(prompt, [2] * 20, key=key) if sampled else None
        self.do(self.store.capture([], [(key, call, None)]))
        if call_id in attempt.open:
            attempt.open.discard(call_id)
            if call:
                attempt.recorded[call_id] = call
        elif call_id not in attempt.recorded:
            self.late["generations_late"] += sampled

    @precondition(lambda self: self.tries)
    @rule(
        data=st.data(),
        end=st.sampled_from([("succeeded", None), ("failed", BROKEN), ("failed", LOST), ("timeout", BROKEN)]),
        again=st.booleans(),
    )
    def finish(self, data: st.DataObject, end: tuple[str, Any], again: bool) -> None:
        attempt, (status, failure) = data.draw(st.sampled_from(self.tries)), end
        for _ in range(1 + again):
            self.do(self.store.finish_attempt(attempt.taken, status, failure, timeout=0))
        if attempt.status in FINAL:
            self.late["attempts_late"] += (attempt.status != status) * (1 + again)
            return
        if status == "succeeded" and attempt.open:
            status, failure = "failed", LOST
            self.late["attempts_late"] += again
        self.late["calls_lost"] += len(attempt.open)
        self.become(attempt, status, failure is LOST, reported=True)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rollout_id = data.draw(st.sampled_from(sorted(self.known)))
        self.do(self.store.cancel_rollout(rollout_id))
        if self.known[rollout_id].status not in OVER:
            self.put(self.known[rollout_id], "cancelled")

    @precondition(lambda self: self.known)
    @rule(data=st.data(), status=st.sampled_from(["requeuing", "succeeded", "failed", "queuing", "running"]))
    def by_hand(self, data: st.DataObject, status: str) -> None:
        rollout_id = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[rollout_id]
        allowed = {
            "requeuing": ("preparing", "running", *OVER),
            "failed": ("queuing", "requeuing", "preparing", "running"),
            "succeeded": ("queuing", "requeuing", "preparing", "running", "failed"),
            "queuing": (),
            "running": ("preparing",),
        }[status]
        if known.status != status and known.status not in allowed:
            with pytest.raises(InvalidTransitionError):
                self.do(self.store.update_rollout(rollout_id, status=status))
            return
        self.do(self.store.update_rollout(rollout_id, status=status))
        if known.status != status:
            self.put(known, status)
            if status == "requeuing":  # it has the retries of a new rollout
                known.lost, known.charged = len(known.tries), 0
                for attempt in known.tries:
                    attempt.charged = False

    @rule(age=st.sampled_from([0, 5, 30]))
    def go_away(self, age: float) -> None:
        since = self.clock.lived() - age
        lost = [] if self.away else [attempt for attempt in self.tries if self.overlaps(attempt, since)]
        for _ in range(2):  # a report is repeated while the outage lasts
            reported = self.do(self.store.report_outage("policy", since, "nothing listens"))
            assert reported == (0 if self.away else len(lost))
            self.away = True
        for attempt in sorted(lost, key=lambda attempt: (attempt.status in LIVE, self.age(attempt))):
            known, charged, was_lost = attempt.rollout, attempt.charged, attempt.infrastructure
            before = known.status
            self.late["calls_lost"] += len(attempt.open)
            if attempt.status in LIVE:
                self.become(attempt, "failed", infrastructure=True, charged=False)
                continue
            ended = attempt.ended
            self.become(attempt, "failed", infrastructure=True)
            attempt.charged, attempt.ended = False, ended or attempt.ended
            known.lost, known.charged = known.lost + (not was_lost), max(known.charged - charged, 0)
            if known.tries[-1] is attempt:
                assert before != "cancelled"
                self.put(known, "requeuing")

    def overlaps(self, attempt: Try, since: float) -> bool:
        """True if an outage since this time makes the attempt a loss."""
        if not attempt.leased or attempt.status in LIVE:
            return attempt.leased
        if attempt.status == "unresponsive":
            silent_at = attempt.silent_at()
            recent = silent_at is not None and silent_at >= since
        else:
            recent = attempt.ended is not None and attempt.ended >= since
        by_hand = attempt.rollout.tries[-1] is attempt and attempt.rollout.status not in (
            ("succeeded",) if attempt.status == "succeeded" else ("failed", "requeuing")
        )
        return recent and not by_hand and (attempt.charged or not attempt.infrastructure)

    @rule()
    def come_back(self) -> None:
        assert self.do(self.store.report_outage("policy", None)) == 0
        self.away = False

    @rule(slot=st.sampled_from(["a", "b"]), data=st.data())
    def heartbeat(self, slot: str, data: st.DataObject) -> None:
        worker = self.worker(slot)
        self.runners.add(worker)
        own = [attempt for attempt in self.tries if attempt.worker == worker]
        named = data.draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        over = self.do(
            self.store.heartbeat(worker, {}, [attempt.taken.attempt.attempt_id for attempt in named])
        )
        for attempt in named:
            unwanted = self.is_obsolete(attempt)
            assert (attempt.taken.attempt.attempt_id in over) == unwanted
            if not unwanted and attempt.status != "unresponsive":
                attempt.heard = self.clock.lived()

    def is_obsolete(self, attempt: Try) -> bool:
        known = attempt.rollout
        unwanted = known.status == "failed" and attempt.status != "unresponsive"
        unwanted |= attempt.status in FINAL or known.tries[-1] is not attempt
        return unwanted or known.status in ("cancelled", "succeeded")

    @rule(slot=st.sampled_from(["a", "b"]))
    def update_worker(self, slot: str) -> None:
        worker = self.worker(slot)
        self.do(self.store.update_worker(worker))
        for attempt in self.tries:
            wanted = attempt.rollout.tries[-1] is attempt and attempt.rollout.status not in OVER
            if attempt.worker == worker and attempt.status in LIVE and wanted:
                attempt.heard = self.clock.lived()

    @rule(slot=st.sampled_from(["a", "b"]))
    def release_worker(self, slot: str) -> None:
        worker = self.worker(slot)
        held = sorted(self.held_by(worker), key=lambda attempt: (attempt.start, self.age(attempt)))
        to_blame = [attempt for attempt in held if attempt.rollout.suspect] or held
        assert self.do(self.store.release_worker(worker, "died")) == len(held)
        self.deaths[slot] += 1
        for attempt in held:
            self.late["calls_lost"] += len(attempt.open)
            attempt.rollout.suspect = True
            self.become(attempt, "failed", infrastructure=True, charged=to_blame == [attempt])

    @rule(seconds=st.sampled_from([1, 10, 25, LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.expire()

    def expire(self) -> None:
        now = self.clock.lived()
        due = [(end, attempt) for attempt in self.tries if (end := attempt.end()) and end[0] <= now]
        due = [(end, attempt) for end, attempt in due if not self.postpones(attempt, end, now)]
        assert self.do(self.service.expire()) == len(due)
        for end, attempt in sorted(due, key=lambda found: (found[0][0], self.age(found[1]))):
            _, how, infrastructure = attempt.what_ended(end, now)
            self.late["calls_lost"] += len(attempt.open) if how in FINAL else 0
            self.become(attempt, how, infrastructure)

    def postpones(self, attempt: Try, end: tuple[float, str, bool], now: float) -> bool:
        """True if a runner gets time to report the timeout of an attempt."""
        first = attempt.worker in self.runners and attempt.leased and attempt.timeout_from <= attempt.limit()
        if not first or attempt.what_ended(end, now)[1] != "timeout" or self.is_obsolete(attempt):
            return False
        attempt.heard, attempt.timeout_from = now, now + TIMEOUT_GRACE_S
        if attempt.status in LIVE:
            attempt.silent_from = max(attempt.silent_from, attempt.timeout_from)
        return True

    def age(self, attempt: Try) -> int:
        """Attempts with the same start are ordered by their position in the store."""
        row = self.service._journal.fetch_one(
            "SELECT rowid FROM attempts WHERE attempt_id = ?", (attempt.taken.attempt.attempt_id,)
        )
        return row[0]

    @rule(seconds=st.sampled_from([5, 86_400, -5, -86_400]))
    def reopen(self, seconds: float) -> None:
        self.do(self.service.close())
        self.clock.jump(seconds)
        self.away = False  # until the monitor repeats its report
        self.open()
        for attempt in self.tries:
            if attempt.status in LIVE:
                attempt.heard = attempt.spoke = self.clock.lived()
                if attempt.leased:
                    attempt.timeout_from = attempt.silent_from = attempt.heard + 2 * LEASE_S

    # what must hold

    @invariant()
    def every_rollout_is_where_the_events_lead_to(self) -> None:
        found = self.do(self.store.query_rollouts())
        assert [rollout.rollout_id for rollout in found] == list(self.known)
        for rollout, known in zip(found, self.known.values(), strict=True):
            assert rollout.status == known.status
            assert (rollout.end_time is not None) == (known.status in OVER)
            assert (rollout.attempt.status if rollout.attempt else None) == (
                known.tries[-1].status if known.tries else None
            )

    @invariant()
    def only_the_latest_attempt_counts(self) -> None:
        for found, known in zip(
            self.do(self.store.collect(list(self.known), True)), self.known.values(), strict=True
        ):
            latest = known.tries[-1] if known.tries else None
            assert found.reward == (latest.reward if latest else None)
            assert [span.span_id for span in found.spans] == (latest.spans if latest else [])
            read = {call.key.call_id: call for call in found.generations}
            assert read == (latest.recorded if latest else {})

    @invariant()
    def losses_are_charged_to_whom_they_belong(self) -> None:
        rows = self.service._journal.execute(
            "SELECT lost, charged, suspect FROM rollouts ORDER BY position"
        ).fetchall()
        assert rows == [(known.lost, known.charged, known.suspect) for known in self.known.values()]

    @invariant()
    def the_counts_are_right(self) -> None:
        counts = self.do(self.store.statistics())
        statuses = Counter(known.status for known in self.known.values())
        assert {n: c for n, c in counts.items() if n.startswith("rollouts_") and c} == {
            f"rollouts_{s}": c for s, c in statuses.items()
        }
        expected = {
            "total_rollouts": len(self.known),
            "total_attempts": len(self.tries),
            **self.late,
            "total_spans": sum(len(attempt.spans) for attempt in self.tries),
            "generations": sum(len(attempt.recorded) for attempt in self.tries),
        }
        assert {name: counts.get(name, 0) for name in expected} == expected

    def teardown(self) -> None:
        """The queue is as the model has it, and every rollout comes to an end."""
        self.come_back()
        self.pass_time(MAX_BACKOFF_S)
        while offered := self.offered(None, 1000):
            taken = self.do(self.store.dequeue_many_rollouts(limit=1000))
            assert [rollout.rollout_id for rollout in taken] == offered
            for rollout in taken:
                self.begin(rollout, None, leased=True)
        assert self.queue == []
        assert self.do(self.store.dequeue_rollout(None, timeout=0)) is None
        for rollout in self.do(self.store.query_rollouts(status_in=["preparing", "running"])):
            self.do(self.store.finish_attempt(rollout, "timeout", BROKEN, timeout=0))
            self.do(self.store.cancel_rollout(rollout.rollout_id))
        assert all(rollout.status in OVER for rollout in self.do(self.store.query_rollouts()))
        self.do(self.service.close())
        self.loop.close()
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=15, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
class TestStoreMachineAtLength(StoreMachine.TestCase):
    settings = settings(TestStoreMachine.settings, max_examples=300)
