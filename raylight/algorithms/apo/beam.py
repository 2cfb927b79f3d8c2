"""Beam search over prompts with textual gradients: ProTeGi (Pryzant et al. 2023,
https://arxiv.org/abs/2305.03495).

Pure: evaluation, critique and edit are passed in as functions. All randomness derives from the seed and the
position in the search, so an interrupted search that is resumed gives the same result.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from raylight._utils.aio import task_group
from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.edits import RejectedEdit, parse_rewrite
from raylight.algorithms.apo.history import Candidate, History, Rejection
from raylight.algorithms.apo.settings import ApoSettings
from raylight.algorithms.apo.trials import Evaluation, Trial, lowest_reward
from raylight.errors import CriticError
from raylight.types import RolloutMode


class EvaluateFunction(Protocol):
    """Function that rolls the agent out with a prompt."""

    async def __call__(self, template: PromptTemplate, tasks: Sequence[int], mode: RolloutMode) -> Evaluation:
        """Evaluate a prompt.

        Args:
            tasks: indices into the training dataset (mode "train") or the validation dataset (mode "val").
        """
        ...


CritiqueFunction = Callable[[PromptTemplate, Sequence[Trial], int], Awaitable[str]]
"""Function that criticises a prompt by its rollouts; the number selects one of several ways to ask."""
EditFunction = Callable[[PromptTemplate, str, int], Awaitable[str]]
"""Function that returns a model's answer with a rewritten prompt, by a critique; the number is as before."""
BranchResult = tuple[PromptTemplate, str] | RejectedEdit
"""Rewritten prompt with the critique that led to it, or the reason for its absence."""


def sample_batch(n: int, size: int, index: int, seed: int) -> list[int]:
    """Return the batch number `index` among `n` items; no item is twice in a batch.

    Each epoch is a new permutation, of which a remainder below `size` is dropped. A batch has all `n` items
    if `size` is larger.
    """
    size = min(size, n)
    epoch, position = divmod(index, n // size)
    order = random.Random(f"{seed}/batch/{epoch}").sample(range(n), n)
    return order[position * size : (position + 1) * size]


class BeamSearch:
    """Beam search for a better prompt.

    Args:
        history: state of the search, which is continued in place.
        n_train: number of training tasks.
        n_val: number of validation tasks.
        on_change: called after each change of the history.
        log: receives a line per event.

    Raises:
        CriticError: in a round, no branch got an answer from the models that criticise and rewrite.
    """

    def __init__(
        self,
        settings: ApoSettings,
        history: History,
        n_train: int,
        n_val: int,
        evaluate: EvaluateFunction,
        critique: CritiqueFunction,
        edit: EditFunction,
        on_change: Callable[[], None] = lambda: None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings = settings
        self.history = history
        self._n_train, self._n_val = n_train, n_val
        self._evaluate, self._critique, self._edit = evaluate, critique, edit
        self._on_change = on_change
        self._log = log
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        if settings.failure_reward is not None:
            history.set_failure_reward(settings.failure_reward)

    async def begin(self) -> None:
        """Score the seed on all validation tasks, if the settings ask for it."""
        if self.settings.run_initial_validation and not self.history.rounds_done:
            await self._validate(self.history.beam[0])

    async def round(self) -> None:
        """Run the next round.

        Rewrite prompts of the beam, score the beam and the rewrites on one batch, keep the best as the next
        beam, and validate its first prompt on all validation tasks.
        """
        history, number = self.history, self.history.rounds_done + 1
        if history.generated < number:
            await self._generate(number)
        batch = sample_batch(self._n_val, self.settings.val_batch_size, number - 1, self.settings.seed)
        rivals = [*history.beam, *history.created_in(number)]
        self._log(f"round {number}: scoring {len(rivals)} prompts on {len(batch)} validation tasks")
        async with task_group() as group:
            for candidate in rivals:
                group.create_task(self._score(candidate, number, batch))
        ranked = sorted(
            rivals, key=lambda candidate: -candidate.batch_scores[number]
        )  # of equals, the older one stays
        kept = ranked[: self.settings.beam_width]
        await self._validate(kept[0])
        history.beams.append([candidate.version for candidate in kept])
        self._on_change()

    def parents(self, number: int) -> list[Candidate]:
        """Return the parents of a round: the beam in a random order, repeated up to the beam width."""
        beam, width = self.history.beam, self.settings.beam_width
        order = random.Random(f"{self.settings.seed}/parents/{number}").sample(beam, len(beam))
        return [order[index % len(order)] for index in range(width)]

    async def _generate(self, number: int) -> None:
        """Make the rewrites of a round, one per branch."""
        history = self.history
        parents = [parent for parent in self.parents(number) for _ in range(self.settings.branch_factor)]
        versions = ", ".join(sorted({parent.version for parent in parents}))
        self._log(f"round {number}: {len(parents)} rewrites of {versions}")
        async with task_group() as group:
            branches = [
                group.create_task(self._branch(parent, number, index)) for index, parent in enumerate(parents)
            ]
        results = [branch.result() for branch in branches]
        unanswered = [item for item in results if isinstance(item, RejectedEdit) and item.kind == "endpoint"]
        if len(unanswered) == len(results):
            raise CriticError(
                f"none of the {len(results)} branches of round {number} got an answer from the models; the "
                f"last error: {unanswered[-1]}. Check the client's endpoint; fit(resume='auto') continues "
                "with this round"
            )
        for parent, result in zip(parents, results, strict=True):
            self._record(parent, number, result)
        history.generated = number
        self._on_change()

    async def _branch(self, parent: Candidate, number: int, index: int) -> BranchResult:
        """Make one rewrite: roll the parent out on training tasks, criticise it, edit it."""
        settings = self.settings
        batch = (number - 1) * settings.beam_width * settings.branch_factor + index
        tasks = sample_batch(self._n_train, settings.gradient_batch_size, batch, settings.seed)
        variants = random.Random(f"{settings.seed}/variants/{number}/{index}")
        critique_variant, edit_variant = variants.randrange(1_000_000), variants.randrange(1_000_000)
        async with self._slots:
            evaluation = await self._roll_out(parent, tasks, "train")
            try:
                critique = await self._critique(parent.template, evaluation.trials, critique_variant)
                answer = await self._edit(parent.template, critique, edit_variant)
                return parse_rewrite(parent.template, answer), critique
            except RejectedEdit as rejected:
                return rejected

    def _record(self, parent: Candidate, number: int, result: BranchResult) -> None:
        if not isinstance(result, RejectedEdit):
            template, critique = result
            if not self.history.contains(template.template):
                self.history.add(template, parent.version, number, critique)
                return
            result = RejectedEdit("the same prompt was tried before", "duplicate", template.template)
        self._log(f"round {number}: rejected a rewrite of {parent.version} ({result.kind}): {result}")
        self.history.rejections.append(
            Rejection(
                parent=parent.version, round=number, kind=result.kind, reason=str(result), text=result.text
            )
        )

    async def _score(self, candidate: Candidate, number: int, batch: Sequence[int]) -> None:
        if number in candidate.batch_scores:  # scored before the round was interrupted
            return
        async with self._slots:
            evaluation = await self._roll_out(candidate, batch, "val")
        candidate.batch_scores[number] = evaluation.score(self.history.failure_reward)
        candidate.batch_failures[number] = evaluation.failed_fraction
        self._log_score(candidate, evaluation, f"on {len(batch)} tasks")
        self._on_change()

    async def _validate(self, leader: Candidate) -> None:
        """Score a prompt on all validation tasks, once; it becomes the best if its score is strictly
        higher."""
        history = self.history
        if leader.val_score is not None:
            return
        evaluation = await self._roll_out(leader, range(self._n_val), "val")
        leader.val_score = evaluation.score(history.failure_reward)
        leader.val_failures = evaluation.failed_fraction
        self._log_score(leader, evaluation, f"on all {self._n_val} validation tasks")
        history.choose_best()
        self._on_change()

    async def _roll_out(self, candidate: Candidate, tasks: Sequence[int], mode: RolloutMode) -> Evaluation:
        """Evaluate a prompt. A lower reward than any before is from then on the score of failed rollouts."""
        evaluation = await self._evaluate(candidate.template, tasks, mode)
        if self.settings.failure_reward is None:
            lowest = lowest_reward(evaluation.trials, self.history.failure_reward)
            if lowest < self.history.failure_reward:
                self.history.set_failure_reward(lowest)
        return evaluation

    def _log_score(self, candidate: Candidate, evaluation: Evaluation, tasks: str) -> None:
        problems = evaluation.problems()
        self._log(
            f"{candidate.version} scored {evaluation.score(self.history.failure_reward):.3f} {tasks}"
            f"{f' ({problems})' if problems else ''}"
        )
