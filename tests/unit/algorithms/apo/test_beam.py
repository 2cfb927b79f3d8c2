"""The search with random evaluations, critiques and edits, without Ray."""

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.beam import BeamSearch, sample_batch
from raylight.algorithms.apo.edits import RejectedEdit
from raylight.algorithms.apo.history import History
from raylight.algorithms.apo.settings import ApoSettings
from raylight.algorithms.apo.trials import Evaluation, Trial
from raylight.errors import CriticError
from raylight.types import RolloutMode

SEED = PromptTemplate(template="{a} 0")
N_TRAIN, N_VAL = 11, 7


class Interrupted(Exception):
    pass


class World:
    """Toy domain: a prompt is `{a} N`, and its reward depends only on N and the task."""

    def __init__(self, salt: int, stop_after: int | None = None) -> None:
        self.salt = salt
        self.left = math.inf if stop_after is None else stop_after
        self.running = self.most_running = self.evaluations = 0
        self.seen: list[tuple[str, tuple[int, ...], RolloutMode]] = []

    def reward(self, text: str, task: int) -> float:
        return random.Random(f"{self.salt}/{text}/{task}").choice([0.0, 0.25, 0.5, 1.0])

    async def evaluate(self, template: PromptTemplate, tasks: Sequence[int], mode: RolloutMode) -> Evaluation:
        if self.left <= 0:
            raise Interrupted
        self.left -= 1
        self.evaluations += 1
        self.seen.append((template.template, tuple(tasks), mode))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(random.Random(template.template).randrange(4)):
            await asyncio.sleep(0)
        self.running -= 1
        return Evaluation([Trial(task, "succeeded", self.reward(template.template, task)) for task in tasks])

    async def critique(self, template: PromptTemplate, trials: Sequence[Trial], variant: int) -> str:
        return f"{template.template} {variant} {[trial.task for trial in trials]}"

    async def edit(self, template: PromptTemplate, critique: str, variant: int) -> str:
        number = random.Random(f"{self.salt}/{critique}/{variant}").randrange(40)
        if number == 0:
            raise RejectedEdit("no answer", "endpoint")
        return {1: "lost it", 2: "{a} {b}", 3: "{a", 4: ""}.get(number, f"<prompt>{{a}} {number}</prompt>")

    def search(self, history: History, config: ApoSettings) -> BeamSearch:
        return BeamSearch(config, history, N_TRAIN, N_VAL, self.evaluate, self.critique, self.edit)


def fresh() -> History:
    return History.begin(SEED, "prompt", "tasks", {})


async def run_all(search: BeamSearch) -> None:
    await search.begin()
    while search.history.rounds_done < search.settings.beam_rounds:
        await search.round()


CONFIGS = st.builds(
    ApoSettings,
    gradient_batch_size=st.integers(1, 13),
    val_batch_size=st.integers(1, 9),
    beam_width=st.integers(1, 4),
    branch_factor=st.integers(1, 4),
    beam_rounds=st.integers(0, 4),
    run_initial_validation=st.booleans(),
    max_concurrent=st.integers(1, 5),
    seed=st.integers(0, 3),
)


@given(CONFIGS, st.integers(0, 1000))
def test_the_laws_of_the_search(config: ApoSettings, salt: int) -> None:
    world, history = World(salt), fresh()
    try:
        asyncio.run(run_all(world.search(history, config)))
    except CriticError:
        assert config.beam_width * config.branch_factor <= 4, (
            "with few branches, all may lack an answer by chance"
        )
        return
    by_version = {candidate.version: candidate for candidate in history.candidates}
    assert [*by_version] == [f"v{i}" for i in range(len(history.candidates))]
    assert len({candidate.template.template for candidate in history.candidates}) == len(by_version), (
        "none is tried twice"
    )
    assert world.most_running <= config.max_concurrent
    for candidate in history.candidates[1:]:
        parent = by_version[candidate.parent or ""]
        assert candidate.round > parent.round
        assert parent.version in history.beams[candidate.round - 1]
        assert candidate.template.placeholders() == {"a"}
        assert candidate.critique
    for number, beam in enumerate(history.beams[1:], 1):
        rivals = [
            c for c in history.candidates if c.round == number or c.version in history.beams[number - 1]
        ]
        scores = sorted((c.batch_scores[number] for c in rivals), reverse=True)
        assert len(beam) == min(config.beam_width, len(rivals))
        assert [by_version[version].batch_scores[number] for version in beam] == scores[: len(beam)]
        assert by_version[beam[0]].val_score is not None
        made, rejected = len(history.created_in(number)), sum(r.round == number for r in history.rejections)
        assert made + rejected == config.beam_width * config.branch_factor
        val = sample_batch(N_VAL, config.val_batch_size, number - 1, config.seed)
        for rival in rivals:  # all on the same tasks
            mean = sum(world.reward(rival.template.template, task) for task in val) / len(val)
            assert rival.batch_scores[number] == pytest.approx(mean)
    validated = [c for c in history.candidates if c.val_score is not None]
    if validated:
        best = history.best_candidate
        assert best.val_score == max(c.val_score for c in validated if c.val_score is not None)
        first = ["v0"] * config.run_initial_validation + [beam[0] for beam in history.beams[1:]]
        equal = [v for v in first if by_version[v].val_score == best.val_score]
        assert equal[0] == best.version, "an equal one does not replace it"
    else:
        assert history.best == "v0"


@given(CONFIGS, st.integers(0, 1000), st.integers(0, 60))
def test_a_resumed_search_ends_like_one_without_interruption(
    config: ApoSettings, salt: int, stop_after: int
) -> None:
    straight, world = fresh(), World(salt)
    failed = False
    try:
        asyncio.run(run_all(world.search(straight, config)))
    except CriticError:
        failed = True
    kept = [fresh().model_dump_json()]
    history = fresh()
    cut = World(salt, stop_after)
    search = BeamSearch(
        config,
        history,
        N_TRAIN,
        N_VAL,
        cut.evaluate,
        cut.critique,
        cut.edit,
        on_change=lambda: kept.append(history.model_dump_json()),
    )
    with contextlib.suppress(Interrupted, CriticError):
        asyncio.run(run_all(search))
    again, rest = History.model_validate_json(kept[-1]), World(salt)
    try:
        asyncio.run(run_all(rest.search(again, config)))
    except CriticError:
        assert failed
        return
    assert again == straight


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 5))
def test_an_epoch_of_batches_repeats_no_item(n: int, size: int, seed: int) -> None:
    per_epoch = n // min(size, n)
    for epoch in range(3):
        items = [
            item
            for index in range(per_epoch)
            for item in sample_batch(n, size, epoch * per_epoch + index, seed)
        ]
        assert len(set(items)) == len(items) == per_epoch * min(size, n)
        assert set(items) <= set(range(n))
    drawn = {item for index in range(60 * per_epoch) for item in sample_batch(n, size, index, seed)}
    assert drawn == set(range(n)), "a batch size that does not divide n excludes no item for good"


def test_a_beam_below_its_width_is_repeated() -> None:
    config = ApoSettings(beam_width=3, branch_factor=2, beam_rounds=1)
    world = World(5)
    search = world.search(fresh(), config)
    assert [parent.version for parent in search.parents(1)] == ["v0", "v0", "v0"]
    asyncio.run(run_all(search))
    train = [tasks for _, tasks, mode in world.seen if mode == "train"]
    assert len(train) == 6
    assert len({frozenset(tasks) for tasks in train}) > 2, "each branch has its own tasks"


def test_the_seed_survives_edits_that_are_all_worse() -> None:
    class Downhill(World):
        def reward(self, text: str, task: int) -> float:
            return 1.0 if text == SEED.template else 0.0

    history = fresh()
    asyncio.run(run_all(Downhill(1).search(history, ApoSettings(beam_rounds=2, beam_width=2))))
    assert history.best == "v0"
    assert history.best_candidate.val_score == 1.0
    assert history.beams[1][0] == history.beams[2][0] == "v0"


class Costs(World):
    """Rewards are costs; an odd number in a prompt crashes the agent on half of the tasks."""

    def reward(self, text: str, task: int) -> float:
        return super().reward(text, task) - 1.5

    async def evaluate(self, template: PromptTemplate, tasks: Sequence[int], mode: RolloutMode) -> Evaluation:
        found = await super().evaluate(template, tasks, mode)
        odd = int(template.template.split()[-1]) % 2
        return Evaluation([Trial(t.task, "failed") if odd and t.task % 2 else t for t in found.trials])


@pytest.mark.parametrize("fixed", [None, -7.0])
@pytest.mark.parametrize("salt", range(5))
def test_failures_score_the_lowest_reward_of_the_whole_search(salt: int, fixed: float | None) -> None:
    world, history = Costs(salt), fresh()
    asyncio.run(run_all(world.search(history, ApoSettings(beam_rounds=2, failure_reward=fixed))))
    seen = [
        world.reward(text, t)
        for text, tasks, _ in world.seen
        for t in tasks
        if not (int(text.split()[-1]) % 2 and t % 2)
    ]
    worst = min(seen) if fixed is None else fixed

    def mean(text: str, tasks: Sequence[int]) -> float:
        crashes = int(text.split()[-1]) % 2
        return sum(worst if crashes and t % 2 else world.reward(text, t) for t in tasks) / len(tasks)

    validated = [c for c in history.candidates if c.val_score is not None]
    for candidate in validated:
        assert candidate.val_score == pytest.approx(mean(candidate.template.template, range(N_VAL)))
    for candidate in history.candidates:
        for number, score in candidate.batch_scores.items():
            batch = sample_batch(N_VAL, ApoSettings().val_batch_size, number - 1, 0)
            assert score == pytest.approx(mean(candidate.template.template, batch))
    assert history.best_candidate.val_score == max(c.val_score for c in validated)  # type: ignore[type-var]


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_prompts_are_evaluated_concurrently_up_to_max_concurrent(slots: int) -> None:
    class Held(World):
        """Evaluation that takes long enough for all others to start."""

        def __init__(self) -> None:
            super().__init__(1)
            self.most = Counter[RolloutMode]()

        async def evaluate(
            self, template: PromptTemplate, tasks: Sequence[int], mode: RolloutMode
        ) -> Evaluation:
            self.running += 1
            self.most[mode] = max(self.most[mode], self.running)
            for _ in range(300):
                await asyncio.sleep(0)
            self.running -= 1
            return Evaluation([Trial(task, "succeeded", 1.0) for task in tasks])

    world, history = Held(), fresh()
    config = ApoSettings(
        beam_width=3, branch_factor=4, beam_rounds=1, max_concurrent=slots, run_initial_validation=False
    )
    asyncio.run(run_all(world.search(history, config)))
    assert len(history.candidates) > 3
    assert world.most == {"train": min(slots, 12), "val": min(slots, len(history.candidates))}


def test_a_leader_is_validated_once() -> None:
    class Uphill(World):
        def reward(self, text: str, task: int) -> float:
            return float(text.split()[1])

    world, history = Uphill(3), fresh()
    asyncio.run(run_all(world.search(history, ApoSettings(beam_rounds=4, val_batch_size=2))))
    full = [text for text, tasks, mode in world.seen if mode == "val" and len(tasks) == N_VAL]
    assert len(full) == len(set(full))
    assert history.best_candidate.val_score == max(
        float(c.template.template.split()[1]) for c in history.candidates
    )


def test_a_round_without_any_answer_ends_the_search_and_can_be_resumed() -> None:
    class Silent(World):
        async def edit(self, *arguments: Any) -> str:
            raise RejectedEdit("'m' did not answer: APITimeoutError", "endpoint")

    history = fresh()
    with pytest.raises(CriticError, match="APITimeoutError"):
        asyncio.run(run_all(Silent(1).search(history, ApoSettings(beam_width=2, branch_factor=2))))
    assert (history.generated, history.rounds_done) == (0, 0)
    asyncio.run(run_all(World(1).search(history, ApoSettings(beam_width=2, branch_factor=2, beam_rounds=1))))
    assert history.rounds_done == 1


def test_rejections_are_recorded_with_their_reason() -> None:
    answers = iter(
        ["no placeholder", "{a} {b}", "{a", "<prompt> </prompt>", "{a} 0", "<prompt>{a} 9</prompt>", "{a} 9"]
    )

    class Scripted(World):
        async def edit(self, *arguments: Any) -> str:
            return next(answers)

    lines: list[str] = []
    history, world = fresh(), Scripted(1)
    search = BeamSearch(
        ApoSettings(beam_width=1, branch_factor=7, beam_rounds=1, max_concurrent=1),
        history,
        N_TRAIN,
        N_VAL,
        world.evaluate,
        world.critique,
        world.edit,
        log=lines.append,
    )
    asyncio.run(run_all(search))
    assert history.rejected_by_kind() == {"placeholders": 2, "duplicate": 2, "malformed": 1, "empty": 1}
    assert [candidate.template.template for candidate in history.candidates] == ["{a} 0", "{a} 9"]
    assert "lacks the placeholders a" in history.rejections[0].reason
    assert history.rejections[0].text == "no placeholder"
    assert "lacks" not in history.rejections[1].reason
    assert "has the unknown placeholders b" in history.rejections[1].reason
    assert sum("rejected a rewrite of" in line for line in lines) == 6
