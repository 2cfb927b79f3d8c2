"""Selection of recorded rollouts by reward and group."""

import weakref

import pytest

from raylight.experience.trajectories.rollout_selection import RolloutSelection
from raylight.store.overview import RolloutLine


def line(name: str, reward: float | None, group: str | None = "g", **changes) -> RolloutLine:
    known = {"status": "succeeded", "mode": "train"} | changes
    return RolloutLine(
        1, name, known["status"], known["mode"], group, 0.0, "at", 0.0, 1.0, None, reward, 5, 1, {}
    )


LINES = [
    line("a0", 0.0, "a"),
    line("b0", 0.5, "b"),
    line("a1", 1.0, "a"),
    line("a2", 1.0, "a"),
    line("b1", 0.5, "b"),
    line("c0", 1.0, "c", status="failed"),
    line("c1", None, "c"),
    line("d0", 0.9, None),
    line("v0", 1.0, "v", mode="val"),
]


@pytest.mark.parametrize(
    ("rules", "chosen"),
    [
        ({}, ["a0", "b0", "a1", "a2", "b1", "d0"]),
        ({"min_reward": 0.9}, ["a1", "a2", "d0"]),
        ({"best_of_group": True}, ["a1", "b0", "d0"]),
        ({"best_of_group": True, "min_reward": 0.6}, ["a1", "d0"]),
        ({"split": "val"}, ["v0"]),
        ({"split": "all", "min_reward": 1.0}, ["a1", "a2", "v0"]),
        ({"min_reward": 2.0}, []),
    ],
)
def test_rollouts_are_chosen_by_reward_group_and_split(rules, chosen):
    assert RolloutSelection(**rules).choose(LINES) == chosen


@pytest.mark.parametrize(
    ("rules", "lines", "below"),
    [
        ({}, LINES, (1, 1.0)),
        ({}, [*LINES, line("b2", 0.7, "b")], (3, 1.0)),
        ({}, [*LINES, line("b2", 0.2, "b")], (2, 1.0)),
        ({"split": "val"}, LINES, (0, 1.0)),
        ({}, [], (0, float("-inf"))),
    ],
)
def test_rollouts_below_the_best_of_their_group_are_counted(rules, lines, below):
    assert RolloutSelection(**rules).below_best(lines) == below


def test_a_large_group_is_compared_in_linear_time():
    compared = 0

    class Reward(float):
        def __gt__(self, other):
            nonlocal compared
            compared += 1
            return super().__gt__(other)

    lines = [line(f"r{number}", Reward(number)) for number in range(1000)]
    assert RolloutSelection().below_best(lines) == (999, 999.0)
    assert compared < 3000


def test_a_pair_has_the_best_and_the_worst_of_a_group_whose_rewards_differ():
    assert RolloutSelection().pairs([*LINES, line("b2", 0.7, "b")]) == [("a1", "a0"), ("b2", "b0")]
    assert RolloutSelection(min_reward=0.8).pairs(LINES) == [("a1", "a0")]


def test_tasks_are_not_held_while_pairs_are_chosen():
    class Task(dict):
        """A task that can be watched."""

    watched: list[weakref.ref[Task]] = []

    def lines():
        for number in range(6):
            assert sum(task() is not None for task in watched) <= 1, "only the last one"
            task = Task()
            watched.append(weakref.ref(task))
            yield line(f"r{number}", number / 4, f"g{number // 2}")._replace(task=task)
            del task

    assert RolloutSelection().pairs(lines()) == [("r1", "r0"), ("r3", "r2"), ("r5", "r4")]


def test_a_name_of_a_group_that_a_later_lineage_uses_again_is_another_group():
    lines = [
        line(f"{lineage}-train-1-{sample}", reward, "train-1")
        for lineage, rewards in (("aaaa", (0.0, 0.5)), ("bbbb", (0.25, 1.0)))
        for sample, reward in enumerate(rewards)
    ]
    assert RolloutSelection(best_of_group=True).choose(lines) == ["aaaa-train-1-1", "bbbb-train-1-1"]
    assert RolloutSelection().pairs(lines) == [
        ("aaaa-train-1-1", "aaaa-train-1-0"),
        ("bbbb-train-1-1", "bbbb-train-1-0"),
    ]
