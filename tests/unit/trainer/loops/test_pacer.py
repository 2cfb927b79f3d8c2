"""The bound of staleness, and progress, in a simulation of dispatch, training and publication."""

import bisect
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pacing_model import Simulation

from raylight.trainer.loops.pacer import Pacer


def are_of_one_distribution(one: list[float], other: list[float]) -> bool:
    """Test two samples with Kolmogorov and Smirnov's, at a level of 1 %."""
    one, other = sorted(one), sorted(other)
    distance = max(
        abs(bisect.bisect_right(one, value) / len(one) - bisect.bisect_right(other, value) / len(other))
        for value in (*one, *other)
    )
    return distance < 1.628 * math.sqrt((len(one) + len(other)) / (len(one) * len(other)))


def simulation(staleness: int, per_step: int, steps: int, rounds: int, order: str, seed: int) -> Simulation:
    """Return a run whose durations and rewards are drawn at random."""
    draw = random.Random(seed)
    sigma, dull = draw.choice([0.0, 1.0, 2.0]), draw.choice([0.0, 0.4, 1.0])
    return Simulation(
        Pacer(per_step, staleness, steps),
        rounds,
        order,
        lambda group: draw.lognormvariate(0, sigma),
        lambda group: draw.random() >= dull,
        draw.choice([0.0, 1.0, 5.0]),
        draw.choice([0.0, 1.0, 9.0]),
    )


@given(
    staleness=st.integers(0, 4),
    per_step=st.integers(1, 6),
    steps=st.integers(1, 12),
    rounds=st.integers(1, 3),
    order=st.sampled_from(["wait", "drop", "mask"]),
    seed=st.integers(0, 10**6),
)
def test_every_step_is_taken_and_no_group_is_older_than_allowed(
    staleness: int, per_step: int, steps: int, rounds: int, order: str, seed: int
) -> None:
    run = simulation(staleness, per_step, steps, rounds, order, seed)
    run.run()
    taken = [group for step in run.taken for group in step]
    assert len(run.taken) == steps
    assert len(set(taken)) == len(taken)
    assert not set(taken) & set(run.dropped)
    for step in run.taken:
        informative = sum(run.informative[group] for group in step)
        assert informative == per_step or len(step) == per_step * rounds
    if order != "mask":
        assert max(run.ages) <= staleness
    if order == "wait":
        assert taken == list(range(len(taken)))
        assert not run.dropped
    if not staleness:
        assert run.pacer.dispatched == len(taken) + len(run.finished)


def test_no_group_is_dispatched_that_no_step_trains_on() -> None:
    run = simulation(8, 3, 4, 1, "wait", seed=0)
    run.run()
    assert run.pacer.dispatched == 12


@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
def test_nothing_is_dispatched_before_the_engines_have_the_weights(staleness: int) -> None:
    pacer = Pacer(4, staleness, 100)
    assert pacer.room() == 0
    pacer.published = 7
    assert pacer.room() == (8 + staleness) * 4
    pacer.dispatched = 28
    assert pacer.room() == 4 * (1 + staleness)
    assert pacer.room(to_replace=2) == 4 * (1 + staleness) + 2


@pytest.mark.parametrize(("order", "is_true"), [("wait", True), ("mask", True), ("drop", False)])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_trained_lengths_are_those_of_the_offered_groups(staleness: int, order: str, is_true: bool) -> None:
    """Only `drop` prefers short rollouts: long ones are too old when they are finished."""
    draw, offered = random.Random(0), dict[int, float]()

    def duration(group: int) -> float:
        return offered.setdefault(group, draw.lognormvariate(0, 1.0))

    run = Simulation(Pacer(16, staleness, 200), 1, order, duration, update_s=0.5, publish_s=0.1)
    run.run()
    trained = [offered[group] for step in run.taken for group in step]
    assert are_of_one_distribution(trained, list(offered.values())) == is_true
