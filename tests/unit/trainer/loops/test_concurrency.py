"""The limit of the rollouts in flight, against models of engines whose load follows from that limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylight.engines.protocol import EngineLoad
from raylight.trainer.loops.concurrency import FRESH_S, HIGH, QUEUE_S, ROOM, Concurrency


class Engines:
    """Replicas that share what is in flight equally, with a second between two observations.

    Args:
        rollout: share of a replica's cache that one rollout fills.
        slots: requests that a replica runs at the same time.
    """

    def __init__(self, concurrency: Concurrency, replicas: int, rollout: float, slots: int = 10**6) -> None:
        self.concurrency, self.replicas, self.rollout, self.slots = concurrency, replicas, rollout, slots
        self.in_flight = self.ended = self.preemptions = 0
        self.now = 100.0

    def loads(self) -> dict[str, EngineLoad]:
        each = -(-self.in_flight // self.replicas)
        use = each * self.rollout
        self.preemptions += use > 1
        running = min(each, self.slots, int(1 / self.rollout))
        load = EngineLoad(min(use, 1.0), running, each - running, self.preemptions)
        return {f"r{n}": load for n in range(self.replicas)}

    def run(self, seconds: int, ends: float = 0.2) -> list[int]:
        """Return the limits; a share of what is in flight ends in each second."""
        limits = []
        for _ in range(seconds):
            gone = min(self.in_flight, max(1, int(self.in_flight * ends)))
            self.in_flight, self.ended = self.in_flight - gone, self.ended + gone
            self.in_flight = max(self.in_flight, self.concurrency.limit)  # the producer fills it up
            self.now += 1
            limits.append(self.concurrency.observe(self.loads(), self.in_flight, self.ended, self.now))
        return limits


def room(**fields) -> EngineLoad:
    return EngineLoad(**{"kv_use": 0.3, "running": 8, **fields})


@given(
    ceiling=st.integers(1, 500),
    start=st.none() | st.integers(1, 600),
    steps=st.lists(
        st.tuples(
            st.dictionaries(
                st.sampled_from("abc"),
                st.builds(
                    EngineLoad,
                    st.floats(0, 1),
                    st.integers(0, 50),
                    st.integers(0, 50),
                    st.integers(0, 3),
                    st.just(0),
                    st.booleans(),
                ),
            ),
            st.integers(0, 600),
            st.integers(0, 100),
            st.floats(0, 30),
        ),
        max_size=30,
    ),
)
def test_the_limit_stays_between_one_and_the_ceiling(ceiling, start, steps):
    concurrency = Concurrency(ceiling, start)
    ended, now, known = 0, 0.0, 0
    for loads, in_flight, more, seconds in steps:
        before = concurrency.limit
        ended, now = ended + more, now + seconds
        limit = concurrency.observe(loads, in_flight, ended, now)
        known = len(loads)
        assert limit == concurrency.limit
        assert 1 <= limit <= ceiling
        if limit != before:
            assert limit >= min(known, ceiling)  # a rollout for each replica
        if not loads:
            assert limit == before


@given(
    replicas=st.integers(1, 8),
    rollout=st.floats(0.01, 0.3),
    start=st.integers(1, 1000),
    ends=st.floats(0.1, 0.5),
)
def test_a_constant_load_leads_to_a_constant_limit(replicas, rollout, start, ends):
    engines = Engines(Concurrency(1000, start), replicas, rollout)
    engines.run(1000, ends)
    settled = engines.run(100, ends)
    if rollout * replicas < HIGH - ROOM:  # a step of growth stays between the thresholds
        assert len(set(settled)) == 1
    assert max(settled) - min(settled) <= max(0.3 * max(settled), replicas)
    use = -(-settled[0] // replicas) * rollout
    assert ROOM - rollout <= use <= HIGH + rollout or settled[0] in (replicas, 1000)


@given(
    replicas=st.integers(1, 4),
    slots=st.integers(4, 64),
    start=st.integers(1, 1000),
    ends=st.floats(0.1, 0.5),
)
def test_a_queue_keeps_the_limit_near_the_slots(replicas, slots, start, ends):
    engines = Engines(Concurrency(1000, start), replicas, 1e-6, slots)
    engines.run(1000, ends)
    settled = engines.run(200, ends)
    assert len(set(settled)) == 1
    assert 0.7 * replicas * slots <= settled[0] <= 1.6 * replicas * slots + replicas


@given(st.integers(20, 400), st.floats(0.1, 0.5))
def test_preemptions_alone_keep_the_limit_in_a_band(most, ends):
    """An engine that reports no use of its cache, and preempts above a number of rollouts."""

    class Preempting(Engines):
        def loads(self):
            self.preemptions += self.in_flight > most
            return {"r": EngineLoad(0.0, self.in_flight, 0, self.preemptions)}

    engines = Preempting(Concurrency(1000, 1000), 1, 0.0)
    engines.run(1000, ends)
    settled = engines.run(400, ends)
    assert max(settled) <= 1.05 * most + 2
    assert min(settled) >= 0.7 * most


def test_the_limit_recovers_when_the_load_falls():
    engines = Engines(Concurrency(400), 1, 0.05)
    assert engines.run(200)[-1] < 20
    engines.rollout = 0.001  # the responses become short
    assert engines.run(600)[-1] == 400


def test_growth_is_once_in_a_turnover():
    concurrency = Concurrency(100, 8)
    assert concurrency.observe({"a": room()}, 8, 0, 1.0) == 8
    assert concurrency.observe({"a": room()}, 8, 7, 2.0) == 8
    assert concurrency.observe({"a": room()}, 8, 8, 3.0) == 10
    assert concurrency.observe({"a": room()}, 10, 17, 4.0) == 10
    assert concurrency.observe({"a": room()}, 10, 18, 5.0) == 12


@pytest.mark.parametrize(
    ("loads", "in_flight"),
    [
        pytest.param({}, 8, id="no-loads"),
        pytest.param({"a": room()}, 8, id="a-replica-does-not-report"),
        pytest.param({"a": room(), "b": room(paused=True)}, 8, id="an-engine-is-paused"),
        pytest.param({"a": room(), "b": room(waiting=1)}, 8, id="a-request-waits"),
        pytest.param({"a": room(), "b": room(kv_use=0.7)}, 8, id="a-cache-is-in-use"),
        pytest.param({"a": room(), "b": room()}, 5, id="the-limit-does-not-bind"),
    ],
)
def test_no_growth_without_room(loads, in_flight):
    concurrency = Concurrency(100, 8)
    concurrency.observe({"a": room(), "b": room()}, 8, 0, 1.0)
    assert concurrency.observe(loads, in_flight, 50, 2.0) == 8
    assert concurrency.observe({"a": room(), "b": room()}, 8, 50, 3.0) == 10


def test_a_replica_that_is_gone_does_not_keep_the_limit():
    concurrency = Concurrency(100, 8)
    concurrency.observe({"a": room(), "b": room()}, 8, 0, 0.0)
    assert concurrency.observe({"a": room()}, 8, 50, FRESH_S) == 8
    assert concurrency.observe({"a": room()}, 8, 50, FRESH_S + 1) == 10


def test_cuts_wait_until_the_rollouts_of_before_have_ended():
    concurrency = Concurrency(100)
    observe = concurrency.observe
    observe({"a": room()}, 100, 0, 0.0)
    assert observe({"a": room(preemptions=1)}, 100, 0, 1.0) == 80
    assert concurrency.signal == "preempted"
    assert observe({"a": room(preemptions=2)}, 90, 10, 2.0) == 80
    assert observe({"a": room(preemptions=3)}, 80, 20, 3.0) == 40
    assert observe({"a": room(preemptions=3)}, 30, 60, 4.0) == 40  # a turnover without a cut
    assert observe({"a": room(preemptions=4)}, 40, 70, 5.0) == 32


def test_a_cut_is_relative_to_what_was_in_flight():
    concurrency = Concurrency(100)
    concurrency.observe({"a": room()}, 50, 0, 0.0)
    assert concurrency.observe({"a": room(preemptions=1)}, 10, 40, 1.0) == 40


def test_a_queue_counts_once_it_lasts():
    concurrency = Concurrency(100)
    queue = {"a": room(waiting=9, running=8)}
    assert concurrency.observe(queue, 100, 0, 0.0) == 100
    assert concurrency.observe({"a": room()}, 100, 0, QUEUE_S - 1) == 100  # the group has begun
    assert concurrency.observe(queue, 100, 0, QUEUE_S) == 100
    assert concurrency.observe(queue, 100, 0, 2 * QUEUE_S) == 90
    assert concurrency.signal == "queue"


def test_wrong_arguments():
    with pytest.raises(ValueError, match="must be positive"):
        Concurrency(0)


def test_a_limit_at_the_ceiling_follows_it() -> None:
    """The ceiling moves when runners are added or taken away."""
    concurrency = Concurrency(10)
    concurrency.ceiling = 40
    assert concurrency.limit == 40
    concurrency.ceiling = 20
    assert concurrency.limit == 20
    low = Concurrency(10, start=4)
    low.ceiling = 40
    assert low.limit == 4
    low.ceiling = 3
    assert low.limit == 3
