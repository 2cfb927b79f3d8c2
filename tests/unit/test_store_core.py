"""The store's rules: by example, and against a model of them under any sequence of events."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from unit_helpers import make_generation, make_key

from raylight.errors import InvalidTransitionError, UnknownIdError
from raylight.semconv import reward_attributes
from raylight.store.core import StoreCore
from raylight.types import FINISHED, WAITING, Attempt, CallKey, Failure, RolloutConfig, RolloutRequest, Span

LOST = Failure(kind="infrastructure", error="ConnectionError: gone")
BROKEN = Failure(kind="agent", error="ValueError: no")


def make_core() -> StoreCore:
    numbers, times = itertools.count(1), itertools.count(100)
    return StoreCore(lambda: float(next(times)), lambda prefix: f"{prefix}-{next(numbers)}")


def take_one(core: StoreCore, **config: object) -> Attempt:
    core.enqueue([RolloutRequest(input=1, config=RolloutConfig(**config))])
    return core.dequeue("w", 1)[0].attempt


def reward_span(attempt: Attempt, value: float) -> Span:
    return Span.of_rewards(attempt, {"reward": value}, 0.0)


def test_rollouts_are_given_out_oldest_first_and_once() -> None:
    core = make_core()
    ids = [r.rollout_id for r in core.enqueue([RolloutRequest(input=i) for i in range(5)])]
    first, second, third = core.dequeue("a", 2), core.dequeue("b", 2), core.dequeue("a", 9)
    assert [r.rollout_id for r in first + second + third] == ids
    assert not core.has_waiting
    assert core.dequeue("a", 1) == []


def test_a_dequeued_rollout_says_who_has_it_and_which_try_it_is() -> None:
    core = make_core()
    attempt = take_one(core)
    assert (attempt.worker_id, attempt.sequence_id, attempt.status) == ("w", 1, "preparing")
    core.finish_attempt(attempt.rollout_id, attempt.attempt_id, "failed", LOST, [])
    again = core.dequeue("v", 1)[0].attempt
    assert (again.worker_id, again.sequence_id) == ("v", 2)
    assert again.attempt_id != attempt.attempt_id


def test_a_rollout_gets_the_latest_resources_unless_it_names_some() -> None:
    core = make_core()
    assert core.enqueue([RolloutRequest(input=1)])[0].resources_id is None
    old, new = core.add_resources({"llm": 1}), core.add_resources({"llm": 2})
    got = core.enqueue([RolloutRequest(input=1), RolloutRequest(input=1, resources_id=old)])
    assert [r.resources_id for r in got] == [new, old]
    assert core.get_resources(old) == {"llm": 1}


def test_resources_do_not_change_with_the_dict_they_came_from() -> None:
    core, given = make_core(), {"llm": 1}
    resources_id = core.add_resources(given)
    given["llm"] = 2
    assert core.get_resources(resources_id) == {"llm": 1}


def test_unknown_ids_are_typed_errors() -> None:
    core = make_core()
    attempt = take_one(core)
    with pytest.raises(UnknownIdError, match="ro-none"):
        core.get("ro-none")
    with pytest.raises(UnknownIdError, match="rs-none"):
        core.get_resources("rs-none")
    with pytest.raises(UnknownIdError, match="ro-none"):
        core.cancel(["ro-none"])
    with pytest.raises(UnknownIdError, match="ro-none"):
        core.collect(["ro-none"])
    with pytest.raises(UnknownIdError, match="at-none"):
        core.finish_attempt(attempt.rollout_id, "at-none", "succeeded", None, [])
    with pytest.raises(UnknownIdError, match="at-none"):
        core.count_open_calls(attempt.rollout_id, "at-none")


def test_success_with_open_calls_is_refused_and_changes_nothing() -> None:
    core = make_core()
    attempt = take_one(core)
    key = make_key(attempt.rollout_id, attempt.attempt_id)
    core.open_calls([key])
    with pytest.raises(InvalidTransitionError, match="1 calls are open"):
        core.finish_attempt(attempt.rollout_id, attempt.attempt_id, "succeeded", None, [reward_span(attempt, 1.0)])
    assert core.get(attempt.rollout_id).status == "running"
    assert core.collect([attempt.rollout_id])[0].reward is None
    core.close_calls([(key, make_generation([1], [2], key=key))])
    core.finish_attempt(attempt.rollout_id, attempt.attempt_id, "succeeded", None, [reward_span(attempt, 1.0)])
    assert core.get(attempt.rollout_id).status == "succeeded"


@pytest.mark.parametrize("status", ["running", "unresponsive"])
def test_an_attempt_is_decided_only_by_a_final_status(status: str) -> None:
    core = make_core()
    attempt = take_one(core)
    with pytest.raises(InvalidTransitionError):
        core.finish_attempt(attempt.rollout_id, attempt.attempt_id, status, None, [])


def test_only_the_kinds_named_in_the_config_are_retried() -> None:
    core = make_core()
    attempt = take_one(core, retry_on={"agent"})
    core.finish_attempt(attempt.rollout_id, attempt.attempt_id, "failed", BROKEN, [])
    assert core.get(attempt.rollout_id).status == "requeuing"
    attempt = core.dequeue("w", 1)[0].attempt
    core.finish_attempt(attempt.rollout_id, attempt.attempt_id, "failed", LOST, [])
    assert core.get(attempt.rollout_id).status == "failed"


def test_rewards_and_generations_of_an_earlier_attempt_are_gone() -> None:
    core = make_core()
    first = take_one(core)
    key = make_key(first.rollout_id, first.attempt_id)
    core.open_calls([key])
    core.close_calls([(key, make_generation([1], [2], key=key))])
    core.finish_attempt(first.rollout_id, first.attempt_id, "failed", LOST, [reward_span(first, 5.0)])
    second = core.dequeue("w", 1)[0].attempt
    core.finish_attempt(second.rollout_id, second.attempt_id, "succeeded", None, [])
    found = core.collect([first.rollout_id])[0]
    assert found.reward is None
    assert found.generations == []
    assert found.rollout.attempt.attempt_id == second.attempt_id


def test_generations_are_collected_in_the_order_in_which_the_calls_began() -> None:
    core = make_core()
    attempt = take_one(core)
    keys = [make_key(attempt.rollout_id, attempt.attempt_id) for _ in range(3)]
    core.open_calls(keys)
    made = [make_generation([1], [i], key=keys[i], start=float(i)) for i in range(3)]
    core.close_calls([(keys[i], made[i]) for i in (2, 0, 1)])
    assert core.collect([attempt.rollout_id])[0].generations == made


def test_a_call_that_is_closed_twice_is_recorded_once() -> None:
    core = make_core()
    attempt = take_one(core)
    key = make_key(attempt.rollout_id, attempt.attempt_id)
    closed = (key, make_generation([1], [2], key=key))
    core.open_calls([key])
    core.close_calls([closed, closed])
    assert len(core.collect([attempt.rollout_id])[0].generations) == 1
    assert core.statistics()["generations_late"] == 1


def test_a_cancelled_rollout_is_not_given_out_and_its_attempt_decides_nothing() -> None:
    core = make_core()
    running = take_one(core)
    waiting = core.enqueue([RolloutRequest(input=2)])[0].rollout_id
    core.cancel([running.rollout_id, waiting])
    assert core.dequeue("w", 9) == []
    core.finish_attempt(running.rollout_id, running.attempt_id, "failed", LOST, [])
    assert core.dequeue("w", 9) == []
    assert core.get(running.rollout_id).status == "cancelled"


@dataclass
class Known:
    """What the model expects of a rollout."""

    config: RolloutConfig
    status: str = "queuing"
    attempts: list[str] = field(default_factory=list)
    worker: str | None = None
    undecided: bool = False
    """Whether the latest attempt still runs."""
    open: set[str] = field(default_factory=set)
    recorded: list[str] = field(default_factory=list)
    reward: float | None = None
    end_time: float | None = None


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of events, some of them late or wrong, beside a model of what must come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = ["a", "b"]
        self.core = make_core()
        self.known: dict[str, Known] = {}
        self.attempts: list[tuple[str, str]] = []
        self.calls: list[CallKey] = []
        self.late = Counter()
        self.numbers = itertools.count()

    def attempt_of(self, data: st.DataObject) -> tuple[str, str]:
        return data.draw(st.sampled_from(self.attempts))

    def live(self, rollout_id: str, attempt_id: str) -> Known | None:
        known = self.known[rollout_id]
        return known if known.undecided and known.attempts[-1] == attempt_id else None

    def decide(self, known: Known, status: str, kind: str | None) -> None:
        known.undecided, known.worker = False, None
        if known.status == "cancelled":
            return
        if status == "succeeded":
            known.status = "succeeded"
        else:
            again = kind in known.config.retry_on and len(known.attempts) < known.config.max_attempts
            known.status = "requeuing" if again else "failed"

    @rule(
        count=st.integers(1, 3),
        attempts=st.integers(1, 3),
        retry_on=st.sampled_from([{"infrastructure"}, {"infrastructure", "agent"}, set()]),
    )
    def enqueue(self, count: int, attempts: int, retry_on: set[str]) -> None:
        config = RolloutConfig(max_attempts=attempts, retry_on=retry_on)
        for rollout in self.core.enqueue([RolloutRequest(input=i, config=config) for i in range(count)]):
            assert rollout.rollout_id not in self.known
            self.known[rollout.rollout_id] = Known(config)

    @rule(which=st.integers(0, 1), limit=st.integers(1, 4))
    def dequeue(self, which: int, limit: int) -> None:
        worker = self.workers[which]
        waiting = {i for i, known in self.known.items() if known.status in WAITING}
        taken = self.core.dequeue(worker, limit)
        assert len(taken) == min(limit, len(waiting))
        assert {r.rollout_id for r in taken} <= waiting
        for rollout in taken:
            known = self.known[rollout.rollout_id]
            known.attempts.append(rollout.attempt.attempt_id)
            known.status, known.worker, known.undecided = "preparing", worker, True
            known.open, known.recorded, known.reward = set(), [], None
            assert rollout.attempt.sequence_id == len(known.attempts)
            self.attempts.append((rollout.rollout_id, rollout.attempt.attempt_id))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def open_call(self, data: st.DataObject) -> None:
        rollout_id, attempt_id = self.attempt_of(data)
        key = CallKey(rollout_id, attempt_id, f"c{next(self.numbers)}")
        self.calls.append(key)
        self.core.open_calls([key])
        known = self.live(rollout_id, attempt_id)
        if known is None:
            self.late["calls_late"] += 1
        else:
            known.open.add(key.call_id)
            if known.status == "preparing":
                known.status = "running"

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), sampled=st.booleans())
    def close_call(self, data: st.DataObject, sampled: bool) -> None:
        key = data.draw(st.sampled_from(self.calls))
        self.core.close_calls([(key, make_generation([1], [2], key=key) if sampled else None)])
        known = self.live(key.rollout_id, key.attempt_id)
        if known is None or key.call_id not in known.open:
            self.late["generations_late"] += sampled
            return
        known.open.discard(key.call_id)
        if sampled:
            known.recorded.append(key.call_id)

    @precondition(lambda self: self.attempts)
    @rule(
        data=st.data(),
        end=st.sampled_from([("succeeded", None), ("failed", "agent"), ("failed", "infrastructure"), ("timeout", "timeout")]),
        reward=st.none() | st.floats(-1, 1),
    )
    def finish(self, data: st.DataObject, end: tuple[str, str | None], reward: float | None) -> None:
        rollout_id, attempt_id = self.attempt_of(data)
        status, kind = end
        known = self.known[rollout_id]
        failure = Failure(kind=kind, error="E: e") if kind else None
        attributes = {} if reward is None else reward_attributes({"reward": reward})
        span = Span(
            rollout_id=rollout_id, attempt_id=attempt_id, name="s", attributes=attributes, start_time=0, end_time=0
        )  # fmt: skip
        if known.attempts[-1] != attempt_id:
            expected = UnknownIdError
        elif not known.undecided or (status == "succeeded" and known.open):
            expected = InvalidTransitionError
        else:
            self.core.finish_attempt(rollout_id, attempt_id, status, failure, [span])
            self.decide(known, status, kind)
            known.reward = reward
            return
        with pytest.raises(expected):
            self.core.finish_attempt(rollout_id, attempt_id, status, failure, [span])

    @rule(which=st.integers(0, 1))
    def release_worker(self, which: int) -> None:
        worker, self.workers[which] = self.workers[which], f"{self.workers[which]}'"
        held = {i for i, known in self.known.items() if known.worker == worker}
        assert {r.rollout_id for r in self.core.release_worker(worker, "died")} == held
        for rollout_id in held:
            self.decide(self.known[rollout_id], "failed", "infrastructure")
        assert self.core.dequeue(worker, 4) == []  # a poll that outlived its worker takes nothing

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rollout_id = data.draw(st.sampled_from(sorted(self.known)))
        self.core.cancel([rollout_id])
        if self.known[rollout_id].status not in FINISHED:
            self.known[rollout_id].status = "cancelled"

    @invariant()
    def every_rollout_is_in_the_place_the_events_lead_to(self) -> None:
        for rollout_id, known in self.known.items():
            rollout = self.core.get(rollout_id)
            assert rollout.status == known.status
            assert len(known.attempts) <= known.config.max_attempts

    @invariant()
    def a_rollout_ends_once_and_for_all(self) -> None:
        for rollout_id, known in self.known.items():
            end_time = self.core.get(rollout_id).end_time
            assert (end_time is not None) == (known.status in FINISHED)
            assert known.end_time in (None, end_time)
            known.end_time = end_time

    @invariant()
    def only_the_latest_attempt_counts(self) -> None:
        for found, known in zip(self.core.collect(list(self.known)), self.known.values(), strict=True):
            assert [g.key.call_id for g in found.generations] == known.recorded
            assert all(g.key.attempt_id == known.attempts[-1] for g in found.generations)
            assert found.reward == known.reward

    @invariant()
    def nothing_is_uncounted(self) -> None:
        counts = self.core.statistics()
        assert counts.get("enqueued", 0) == len(self.known)
        assert sum(n for name, n in counts.items() if name.startswith("rollouts_")) == len(self.known)
        for name in ("calls_late", "generations_late"):
            assert counts.get(name, 0) == self.late[name]

    def teardown(self) -> None:
        """Whoever waits is given out exactly once; whoever runs is given back by its worker; then nothing is left."""
        waiting = sorted(i for i, known in self.known.items() if known.status in WAITING)
        assert sorted(r.rollout_id for r in self.core.dequeue("c", 10_000)) == waiting
        for worker in [*self.workers, "c", "d", "e", "f"]:
            self.core.dequeue(worker, 10_000)
            self.core.release_worker(worker, "end")
        assert all(self.core.get(rollout_id).status in FINISHED for rollout_id in self.known)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
