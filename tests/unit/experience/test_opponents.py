"""The pool of opponents: draws, Elo ratings and what leaves, as a pure state machine."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylight as rl
from raylight.errors import ConfigError
from raylight.experience.opponents import OpponentPool, SelfPlay, expected_score
from raylight.experience.trajectories.row_rules import RowRules


def filled(settings: SelfPlay, steps: int, seed: int = 0) -> OpponentPool:
    pool = OpponentPool(settings, seed)
    for step in range(steps):
        if pool.is_due(step):
            pool.add(step, step)
    return pool


def test_a_pool_of_one_has_the_last_version() -> None:
    pool = OpponentPool(SelfPlay(every=3), 0)
    drawn = []
    for step in range(8):
        if pool.is_due(step):
            pool.add(step, step)
        drawn.append(pool.draw(step))
    assert drawn == [0, 0, 0, 3, 3, 3, 6, 6]
    assert not pool.is_due(6), "it is an opponent already"


def test_the_weakest_leaves_and_the_newest_stays() -> None:
    pool = filled(SelfPlay(every=1, pool=3), 3)
    pool.record([(1, 1.0)] * 5 + [(2, 0.0)] * 5)
    assert min(pool.opponents, key=lambda one: one.rating).step == 1
    assert pool.add(3, 3) == 1
    assert [one.step for one in pool.opponents] == [0, 2, 3]
    pool.record([(3, 1.0)] * 30)
    assert pool.add(4, 4) == 3


def test_ratings_follow_elo() -> None:
    """Hand-made values, https://en.wikipedia.org/wiki/Elo_rating_system: 1500 v. 1500, 1400 v. 1800."""
    assert expected_score(0.0, 0.0) == 0.5
    assert expected_score(1400.0, 1800.0) == pytest.approx(1 / 11)
    pool = filled(SelfPlay(every=1, rating=32.0, win_reward=2.0, loss_reward=-2.0), 1)
    pool.record([(0, 2.0)])
    assert (pool.rating, pool.opponents[0].rating) == (16.0, -16.0)
    expected = 1 / (1 + 10 ** (-32 / 400))
    pool.record([(0, 0.0), (7, 2.0)])  # a draw; and a game with an opponent that has left
    assert pool.rating == pytest.approx(16 + 32 * (0.5 - expected))
    assert pool.opponents[0].games == 2


def test_draws_by_rating_prefer_equals() -> None:
    pool = filled(SelfPlay(every=1, pool=3), 3)
    pool.opponents[0].rating, pool.opponents[1].rating, pool.opponents[2].rating = -800.0, 10.0, -400.0
    counts = Counter(pool.draw(group) for group in range(3000))
    chances = [expected_score(0.0, one.rating) for one in pool.opponents]
    weights = [chance * (1 - chance) for chance in chances]
    for opponent, weight in zip(pool.opponents, weights, strict=True):
        assert counts[opponent.step] / 3000 == pytest.approx(weight / sum(weights), abs=0.03)
    uniform = OpponentPool(SelfPlay(every=1, pool=3, draw="uniform"), 0)
    uniform.load_state_dict(pool.state_dict())
    counts = Counter(uniform.draw(group) for group in range(3000))
    assert all(count / 3000 == pytest.approx(1 / 3, abs=0.03) for count in counts.values())


def test_a_smaller_pool_of_a_resumed_run_keeps_the_best() -> None:
    pool = filled(SelfPlay(every=1, pool=4), 4)
    pool.opponents[1].rating = 50.0
    smaller = OpponentPool(SelfPlay(every=1, pool=2), 0)
    smaller.load_state_dict(pool.state_dict())
    assert [one.step for one in smaller.opponents] == [1, 3]
    assert smaller.add(4, 4) == 3
    assert len(smaller.opponents) == 2


GAMES = st.lists(st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1)), max_size=6), max_size=12)


@given(GAMES, st.integers(1, 4), st.integers(0, 5))
def test_a_resumed_pool_goes_on_as_the_first(games: list[Any], size: int, cut: int) -> None:
    settings = SelfPlay(every=2, pool=size)

    def play(pool: OpponentPool, steps: range) -> list[int]:
        drawn = []
        for step in steps:
            if pool.is_due(step):
                pool.add(step, step)
            assert len(pool.opponents) <= size
            drawn += [pool.draw(step * 10 + k) for k in range(3)]
            pool.record(games[step] if step < len(games) else ())
        return drawn

    whole = OpponentPool(settings, 1)
    expected = play(whole, range(12))
    first = OpponentPool(settings, 1)
    drawn = play(first, range(cut))
    second = OpponentPool(settings, 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drawn + play(second, range(cut, 12)) == expected
    assert second.state_dict() == whole.state_dict()
    # what one side wins, the other loses; a rating that left took its points along
    if size >= 6:
        assert second.rating + sum(one.rating for one in second.opponents) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"opponents": {"every": 0}}, "every"),
        ({"opponents": {"win_reward": 0.0}}, "loss_reward=0 is not below win_reward=0"),
        ({"opponents": {}, "max_staleness": 1}, "set max_staleness=0"),
        ({"opponents": {}, "models": {"a": {}}}, "leave models out"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.GRPO(model="m", **settings)


def test_calls_of_opponents_are_not_trained() -> None:
    algorithm = rl.GRPO(model="m", opponents=SelfPlay(every=5))
    assert algorithm.trained_models == ("policy",)
    assert algorithm.served_models == ("policy", "opponent")
    rules = RowRules.from_config({"algorithm": algorithm.arguments()})
    assert rules.models == ("policy",)
