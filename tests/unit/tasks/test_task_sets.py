"""Mixtures, curricula, stages, streams: proportions, pools, gates, and draws that a resumed run repeats."""

import itertools
import json
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import raylight as rl
import raylight.tasks.stream as stream_module
from raylight.errors import ConfigError, DatasetError
from raylight.tasks.curriculum import POOLS, CurriculumSampler
from raylight.tasks.datasets import as_task_set
from raylight.tasks.task_set import SetSampler, TaskSet
from raylight.trainer.spec.inputs import SourcedTasks, as_tasks, as_train_set

SETS: dict[str, TaskSet] = {
    "mixture": rl.tasks.Mixture({"a": [1, 2, 3], "b": list("vwxyz")}, weights={"a": 2}),
    "curriculum": rl.tasks.Curriculum(list(range(12))),
    "stages": rl.tasks.Stages({"easy": [0, 1], "hard": [2, 3, 4]}, advance_at=0.5, window=3),
    "stream": rl.tasks.Stream(lambda: iter(range(7))),
    "nested": rl.tasks.Mixture(
        {
            "staged": rl.tasks.Stages(
                {"easy": rl.tasks.Curriculum([0, 1]), "hard": [2, 3, 4]}, advance_at=0.5, window=2
            ),
            "read": rl.tasks.Stream([10, 11]),
        },
        weights={"staged": 3, "read": 1},
    ),
}


def reward_of(number: int) -> float:
    return (number * 7 % 11) / 10


@pytest.mark.parametrize("name", SETS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_resumed_sampler_draws_what_an_uninterrupted_one_does(name: str, data: st.DataObject) -> None:
    steps, size = 8, data.draw(st.integers(1, 4))
    stop = data.draw(st.integers(1, steps - 1))
    ahead = data.draw(st.integers(0, size))  # draws of the next step before the state was saved

    def step(sampler: SetSampler, number: int) -> list[Any]:
        drawn = [sampler.draw(n) for n in range(number * size, (number + 1) * size)]
        for n in range(number * size, (number + 1) * size):
            sampler.observe(n, reward_of(n))
        return [(draw.task, draw.source) for draw in drawn]

    whole = SETS[name].sampler(3)
    expected = [step(whole, number) for number in range(steps)]
    first = SETS[name].sampler(3)
    found = [step(first, number) for number in range(stop)]
    for number in range(stop * size, stop * size + ahead):
        first.draw(number)
    second = SETS[name].sampler(3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [step(second, number) for number in range(stop, steps)] == expected


@pytest.mark.parametrize("name", SETS)
def test_a_recalled_draw_is_that_of_the_earlier_process(name: str) -> None:
    first = SETS[name].sampler(3)
    state = json.loads(json.dumps(first.state_dict()))
    for number in range(4):  # outcomes that the state lacks change later draws
        first.draw(number)
        first.observe(number, 1.0)
    late = [first.draw(number) for number in range(4, 8)]
    second = SETS[name].sampler(3)
    second.load_state_dict(state)
    for number, draw in enumerate(late, 4):
        second.recall(number, json.loads(json.dumps(draw.place)))
    assert [second.draw(number).task for number in range(4, 8)] == [draw.task for draw in late]


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=12), st.integers(1, 200))
@example([1, 20, 5, 1, 20], 26)
def test_a_mixture_keeps_its_proportions(weights: list[float], draws: int) -> None:
    names = [f"s{number}" for number in range(len(weights))]
    mixture = rl.tasks.Mixture(
        {name: [name] for name in names}, weights=dict(zip(names, weights, strict=True))
    )
    sampler = mixture.sampler(0)
    counts = Counter(sampler.draw(number).source for number in range(draws))
    for name, weight in zip(names, weights, strict=True):
        assert abs(counts[name] - draws * weight / sum(weights)) < 1 + 1e-9


def test_a_mixture_without_weights_passes_over_all_tasks() -> None:
    mixture = rl.tasks.Mixture({"few": [1, 2], "many": list(range(10, 18))})
    sampler = mixture.sampler(0)
    assert mixture.size == 10
    assert sorted(sampler.draw(number).task for number in range(10)) == [1, 2, *range(10, 18)]


class Pools:
    """Model of a curriculum: the pool of each task by its last outcome."""

    def __init__(self, size: int) -> None:
        self.last: dict[int, float | None] = dict.fromkeys(range(size))

    def pool(self, task: int) -> str:
        reward = self.last[task]
        if reward is None:
            return "untested"
        return "solved" if reward >= 0.9 else "unsolved" if reward <= 0.1 else "learnable"


@given(
    st.integers(1, 9),
    st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])), max_size=60),
    st.integers(0, 5),
)
def test_tasks_are_in_the_pool_of_their_last_outcome(
    size: int, outcomes: list[float | None], lag: int
) -> None:
    sampler = rl.tasks.Curriculum(list(range(size))).sampler(1)
    assert isinstance(sampler, CurriculumSampler)
    model, drawn = Pools(size), []
    for number, outcome in enumerate(outcomes):
        drawn.append(sampler.draw(number).task)
        if number >= lag:
            sampler.observe(number - lag, outcome)
            if outcome is not None:
                model.last[drawn[number - lag]] = outcome
        assert {task: sampler.pool_of(task) for task in range(size)} == {
            task: model.pool(task) for task in range(size)
        }
    assert sum(sampler.metrics().values()) == size
    assert set(sampler.metrics()) == {*POOLS}


def test_draws_of_a_curriculum_follow_the_weights_and_test_again() -> None:
    tasks = list(range(40))
    sampler = rl.tasks.Curriculum(tasks, weights={"solved": 0.5, "unsolved": 0.0}).sampler(0)
    rewards = {task: 1.0 if task < 10 else 0.0 if task < 20 else 0.5 for task in tasks}
    counts: Counter[str] = Counter()
    tested: Counter[int] = Counter()
    for number in range(640):
        all_tested = sampler.metrics()["untested"] == 0
        task = sampler.draw(number).task
        if all_tested:
            counts["solved" if task < 10 else "unsolved" if task < 20 else "learnable"] += 1
            tested[task] += 1
        sampler.observe(number, rewards[task])
    assert counts["unsolved"] == 0
    assert counts.total() > 400
    assert counts["solved"] / counts["learnable"] == pytest.approx(0.5, abs=0.12)
    solved = [tested[task] for task in range(10)]
    assert max(solved) - min(solved) <= 1  # each in turn


def test_a_pool_without_weight_is_drawn_from_if_all_others_are_empty() -> None:
    sampler = rl.tasks.Curriculum([0, 1], weights={"unsolved": 0.0}).sampler(0)
    for number in range(2):
        sampler.draw(number)
        sampler.observe(number, 0.0)
    assert {sampler.draw(number).task for number in (2, 3)} == {0, 1}


def test_a_gate_opens_when_its_stage_is_learned() -> None:
    sampler = rl.tasks.Stages({"easy": ["e"], "hard": ["h"]}, advance_at=0.75, window=4).sampler(0)
    rewards = [0.0, 1.0, 1.0, None, 0.5, 1.0]
    seen = []
    for number, reward in enumerate(rewards):
        seen.append(sampler.draw(number).source)
        sampler.observe(number, reward)
    assert seen == ["easy"] * 6  # 3.5 of 4 only after the last one
    assert sampler.draw(6).source == "hard"
    assert sampler.metrics() == {"stage": 1.0}
    for number in range(6, 20):  # the last stage has no end
        assert sampler.draw(number).source == "hard"
        sampler.observe(number, 1.0)


def test_a_stream_is_read_as_needed_and_again_from_its_start() -> None:
    passes = []

    def rows() -> Any:
        passes.append(0)
        for number in range(3):
            passes[-1] += 1
            yield number

    sampler = rl.tasks.Stream(rows).sampler(0)
    assert [sampler.draw(number).task for number in (0, 1)] == [0, 1]
    assert passes == [2]
    assert [sampler.draw(number).task for number in (2, 5, 3)] == [2, 2, 0]
    endless = rl.tasks.Stream(itertools.count).sampler(0)
    assert endless.draw(1000).task == 1000

    def broken() -> Any:
        yield 1
        raise OSError("the disk is gone")

    for source in (lambda: [], broken):
        with pytest.raises(DatasetError, match=r"is empty|OSError: the disk is gone"):
            rl.tasks.Stream(source).sampler(0).draw(1)


def test_a_closed_sampler_ends_its_streams(caplog: pytest.LogCaptureFixture) -> None:
    ended = []

    def rows(name: str) -> Any:
        try:
            yield from range(3)
        finally:
            ended.append(name)
            if name == "broken":
                raise OSError("the disk is gone")

    def stream(name: str) -> rl.tasks.Stream:
        return rl.tasks.Stream(lambda: rows(name))

    mixture = rl.tasks.Mixture(
        {"mixed": stream("mixed"), "broken": stream("broken")}, {"mixed": 1.0, "broken": 1.0}
    )
    sampler = rl.tasks.Stages({"first": mixture, "never": stream("never")}, advance_at=1.0).sampler(0)
    for number in range(2):
        sampler.draw(number)
    assert ended == []
    sampler.close()
    assert sorted(ended) == ["broken", "mixed"]
    assert "OSError: the disk is gone" in caplog.text


def test_a_read_that_does_not_return_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "CLOSE_TIMEOUT_S", 0.01)
    begun, free = threading.Event(), threading.Event()

    def rows() -> Any:
        begun.set()
        free.wait(60)
        yield 1

    sampler = rl.tasks.Stream(rows).sampler(0)
    reader = threading.Thread(target=sampler.draw, args=(0,))
    reader.start()
    try:
        assert begun.wait(60)
        sampler.close()
        assert reader.is_alive()
    finally:
        free.set()
        reader.join(60)


def test_datasets_of_hugging_face() -> None:
    import datasets

    rows = [{"question": f"{n} + {n}", "answer": 2 * n} for n in range(5)]
    listed = datasets.Dataset.from_list(rows)
    assert as_tasks(listed, "train_dataset", required=True) == rows
    assert as_train_set(listed).size == 5
    streamed = as_train_set(listed.to_iterable_dataset())
    assert isinstance(streamed, rl.tasks.Stream)
    assert [streamed.sampler(0).draw(number).task for number in (0, 4, 5)] == [rows[0], rows[4], rows[0]]
    with pytest.raises(DatasetError, match="no end"):
        as_tasks(listed.to_iterable_dataset(), "val_dataset", required=True)
    assert rl.tasks.Mixture({"a": listed, "b": [1]}).size == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rl.tasks.Mixture({}), "give datasets by name"),
        (lambda: rl.tasks.Mixture([[1], [2]]), "give datasets by name"),  # type: ignore[arg-type]
        (lambda: rl.tasks.Mixture({"a": []}), "source 'a' is empty"),
        (lambda: rl.tasks.Mixture({"a": [1]}, weights={"b": 1}), "weights b are of no source"),
        (lambda: rl.tasks.Mixture({"a": [1]}, weights={"a": 0}), "must be positive"),
        (lambda: rl.tasks.Mixture({"a": [1]}, weights={"a": float("nan")}), "must be positive"),
        (lambda: rl.tasks.Mixture({"a": [1]}, weights={"a": "2"}), "must be positive"),  # type: ignore[dict-item]
        (lambda: rl.tasks.Mixture({"a": [1], "b": rl.tasks.Stream([1])}), "size of b is not known"),
        (lambda: rl.tasks.Curriculum([]), "is empty"),
        (lambda: rl.tasks.Curriculum(rl.tasks.Stream([1])), "a Stream has no list"),
        (lambda: rl.tasks.Curriculum([1], weights={"easy": 1}), "no pools easy"),
        (lambda: rl.tasks.Curriculum([1], weights=dict.fromkeys(POOLS, 0.0)), "not all 0"),
        (lambda: rl.tasks.Curriculum([1], weights={"solved": -1.0}), "at least 0"),
        (lambda: rl.tasks.Curriculum([1], weights={"solved": "1"}), "be numbers"),  # type: ignore[dict-item]
        (lambda: rl.tasks.Curriculum([1], weights={"solved": None}), "be numbers"),  # type: ignore[dict-item]
        (lambda: rl.tasks.Curriculum([1], solved="1"), "must be a number less"),  # type: ignore[arg-type]
        (lambda: rl.tasks.Curriculum([1], unsolved=float("nan")), "must be a number less"),
        (lambda: rl.tasks.Curriculum([1], solved=0.1, unsolved=0.1), "must be a number less than"),
        (lambda: rl.tasks.Stages({}, advance_at=1.0), "give datasets by name"),
        (lambda: rl.tasks.Stages({"a": [1]}, advance_at=1.0, window=0), "at least 1"),
        (lambda: rl.tasks.Stages({"a": [1]}, advance_at=1.0, window=1.5), "integer"),  # type: ignore[arg-type]
        (lambda: rl.tasks.Stages({"a": [1]}, advance_at=float("nan")), "finite number"),
        (lambda: rl.tasks.Stages({"a": [1]}, advance_at="0.8"), "finite number"),  # type: ignore[arg-type]
        (lambda: rl.tasks.Stream(iter([1])), "read only once"),
        (lambda: rl.tasks.Stream(3), "give an iterable"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_set_raises(make: Any, message: str) -> None:
    with pytest.raises((ConfigError, DatasetError), match=message):
        make()


def test_validation_tasks_know_their_sources() -> None:
    tasks = as_tasks(SETS["mixture"], "val_dataset", required=False)
    assert isinstance(tasks, SourcedTasks)
    assert list(zip(tasks.sources, tasks, strict=True))[2:5] == [("a", 3), ("b", "v"), ("b", "w")]
    assert as_task_set(SETS["mixture"], "x") is SETS["mixture"]
