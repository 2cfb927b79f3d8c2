"""Beam search over prompts with textual gradients: ProTeGi (Pryzant et al. 2023, https://arxiv.org/abs/2305.03495).

Pure: rolling out, criticising and rewriting are given. Everything random follows from the seed and the place in the search, so that
one which was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from raylight.agent.prompts import PromptTemplate
from raylight.aio import task_group
from raylight.algorithms.apo.edits import RejectedEdit, rewrite_of
from raylight.algorithms.apo.history import Candidate, History, Rejection
from raylight.algorithms.apo.settings import ApoSettings
from raylight.algorithms.apo.trials import Evaluation, Trial
from raylight.errors import CriticError
from raylight.types import RolloutMode


class Evaluate(Protocol):
    async def __call__(self, template: PromptTemplate, tasks: Sequence[int], mode: RolloutMode) -> Evaluation:
        """Roll the agent out with a prompt.

        Args:
            tasks: places in the training dataset (mode "train") or the validation dataset ("val").
        """
        ...


class Critique(Protocol):
    async def __call__(self, template: PromptTemplate, trials: Sequence[Trial], variant: int) -> str: ...


class Edit(Protocol):
    async def __call__(self, template: PromptTemplate, critique: str, variant: int) -> str: ...


Written = tuple[PromptTemplate, str] | RejectedEdit
"""A rewritten prompt with the critique that led to it, or why there is none."""


def batch_of(n: int, size: int, index: int, seed: int) -> list[int]:
    """The batch of this index among `n` items, all of them where `size` is more. No item is twice in a batch."""
    size = min(size, n)
    epoch, place = divmod(index, n // size)
    order = random.Random(f"{seed}/batch/{epoch}").sample(range(n), n)
    return order[place * size : (place + 1) * size]


class BeamSearch:
    """Searches for a better prompt.

    Args:
        history: where the search stands; it is carried on.
        n_train, n_val: tasks in the datasets.
        changed: called whenever the history has grown.
        say: told what goes on.

    Raises:
        CriticError: in a round, no branch got an answer from the models that criticise and rewrite.
    """

    def __init__(
        self,
        settings: ApoSettings,
        history: History,
        n_train: int,
        n_val: int,
        evaluate: Evaluate,
        critique: Critique,
        edit: Edit,
        changed: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings = settings
        self.history = history
        self._n_train, self._n_val = n_train, n_val
        self._evaluate, self._critique, self._edit = evaluate, critique, edit
        self._changed = changed
        self._say = say
        self._places = asyncio.Semaphore(settings.max_concurrent)

    async def begin(self) -> None:
        """Score the seed on all validation tasks, if that is wanted."""
        if self.settings.run_initial_validation and not self.history.rounds_done:
            await self._validate(self.history.beam[0])

    async def round(self) -> None:
        """The next round: rewrite prompts of the beam, score all on one batch, keep the best, validate the first."""
        history, number = self.history, self.history.rounds_done + 1
        if history.generated < number:
            await self._branch_out(number)
        batch = batch_of(self._n_val, self.settings.val_batch_size, number - 1, self.settings.seed)
        rivals = [*history.beam, *history.made_in(number)]
        self._say(f"round {number}: scoring {len(rivals)} prompts on {len(batch)} validation tasks")
        async with task_group() as group:
            for candidate in rivals:
                group.create_task(self._score(candidate, number, batch))
        # of equals the older one stays
        kept = sorted(rivals, key=lambda candidate: -candidate.batch_scores[number])[
            : self.settings.beam_width
        ]
        await self._validate(kept[0])
        history.beams.append([candidate.version for candidate in kept])
        self._changed()

    def parents(self, number: int) -> list[Candidate]:
        """Of a round's branches: the beam in a random order, gone through again while it is smaller than its width."""
        beam, width = self.history.beam, self.settings.beam_width
        order = random.Random(f"{self.settings.seed}/parents/{number}").sample(beam, len(beam))
        return [order[place % len(order)] for place in range(width)]

    async def _branch_out(self, number: int) -> None:
        """Make the rewrites of a round."""
        history = self.history
        parents = [parent for parent in self.parents(number) for _ in range(self.settings.branch_factor)]
        self._say(
            f"round {number}: {len(parents)} rewrites of {', '.join(sorted({parent.version for parent in parents}))}"
        )
        async with task_group() as group:
            branches = [
                group.create_task(self._branch(parent, number, place)) for place, parent in enumerate(parents)
            ]
        written = [branch.result() for branch in branches]
        unanswered = [item for item in written if isinstance(item, RejectedEdit) and item.kind == "endpoint"]
        if len(unanswered) == len(written):
            raise CriticError(
                f"none of the {len(written)} branches of round {number} got an answer; the last one: {unanswered[-1]}. Check the "
                "endpoint of the client; fit(resume='auto') goes on with this round"
            )
        for parent, item in zip(parents, written, strict=True):
            self._enter(parent, number, item)
        history.generated = number
        self._changed()

    async def _branch(self, parent: Candidate, number: int, place: int) -> Written:
        """One rewrite: roll the parent out on training tasks, criticise, edit."""
        settings = self.settings
        index = (number - 1) * settings.beam_width * settings.branch_factor + place
        tasks = batch_of(self._n_train, settings.gradient_batch_size, index, settings.seed)
        variants = random.Random(f"{settings.seed}/variants/{number}/{place}")
        critic, editor = variants.randrange(1_000_000), variants.randrange(1_000_000)
        async with self._places:
            tried = await self._evaluate(parent.template, tasks, "train")
            try:
                critique = await self._critique(parent.template, tried.trials, critic)
                answer = await self._edit(parent.template, critique, editor)
                return rewrite_of(parent.template, answer), critique
            except RejectedEdit as rejected:
                return rejected

    def _enter(self, parent: Candidate, number: int, item: Written) -> None:
        """Put down what a branch led to."""
        if not isinstance(item, RejectedEdit):
            template, critique = item
            if not self.history.knows(template.template):
                self.history.add(template, parent.version, number, critique)
                return
            item = RejectedEdit("the same prompt was tried before", "duplicate", template.template)
        self._say(f"round {number}: a rewrite of {parent.version} is rejected ({item.kind}): {item}")
        self.history.rejections.append(
            Rejection(parent=parent.version, round=number, kind=item.kind, reason=str(item), text=item.text)
        )

    async def _score(self, candidate: Candidate, number: int, batch: Sequence[int]) -> None:
        if number in candidate.batch_scores:  # before this round was interrupted
            return
        async with self._places:
            found = await self._evaluate(candidate.template, batch, "val")
        candidate.batch_scores[number] = found.score
        self._tell(candidate, found, f"on {len(batch)} tasks")
        self._changed()

    async def _validate(self, leader: Candidate) -> None:
        """Score a prompt on all validation tasks, once, and take it for the best if it is strictly better."""
        history = self.history
        if leader.val_score is not None:
            return
        found = await self._evaluate(leader.template, range(self._n_val), "val")
        best = history.best_candidate.val_score
        leader.val_score = found.score
        self._tell(leader, found, f"on all {self._n_val} validation tasks")
        if best is None or found.score > best:
            history.best = leader.version
        self._changed()

    def _tell(self, candidate: Candidate, found: Evaluation, where: str) -> None:
        endings = found.endings()
        self._say(f"{candidate.version} scores {found.score:.3f} {where}{f' ({endings})' if endings else ''}")
