"""Examples of supervised training as token rows, and the batches of its steps."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raylight.errors import ConfigError, RowTooLongError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.demonstrations import DemonstrationRow
from raylight.experience.batches.token_budgets import LongRows
from raylight.types import IntArray, JsonObject, MaskArray, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class LearnedRow:
    """Tokens of a conversation. `mask` is 1 for those that are learned."""

    tokens: IntArray
    mask: MaskArray

    @classmethod
    def from_demonstration(cls, row: DemonstrationRow) -> LearnedRow:
        """Return the row of a demonstration, in which answers are learned."""
        mask = np.zeros(len(row.tokens), np.int8)
        mask[row.learned] = 1
        return cls(np.array(row.tokens, np.int32), mask)

    @classmethod
    def from_trajectory(cls, row: Trajectory) -> LearnedRow:
        """Return the tokens of a trajectory, whose sampled tokens are learned.

        Raises:
            ConfigError: it has images.
        """
        if row.images:
            raise ConfigError(
                f"rollout {row.rollout_id} has images, from which rl.SFT, rl.DPO and rl.RewardModel do not "
                "learn; choose a run without images, or train with rewards (rl.GRPO)"
            )
        return cls(row.token_ids, row.mask)

    @classmethod
    def scored(cls, tokens: Sequence[int]) -> LearnedRow:
        """Return the row of a conversation that a reward model scores: its score is the value before one more
        token, which no other token sees."""
        return cls(np.array([*tokens, tokens[-1]], np.int32), np.array([0] * len(tokens) + [1], np.int8))

    def to_trajectory(self, source: str) -> Trajectory:
        """Return the row as the learners take it, at temperature 1."""
        length = len(self.tokens)
        no_logprobs, no_versions = np.zeros(length, np.float32), np.zeros(length, np.int64)
        return Trajectory(source, self.tokens, self.mask, no_logprobs, no_versions)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Rows that are learned together: of one conversation, or of a pair of answers.

    Attributes:
        source: origin, for messages.
        answers: the rows of each answer: of the only one, or of the chosen and the rejected one.
        margin: score by which the chosen answer of a pair should exceed the other, for a reward model.
    """

    source: str
    answers: tuple[tuple[LearnedRow, ...], ...]
    margin: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.tokens) for rows in self.answers for row in rows)

    @property
    def learned_tokens(self) -> int:
        """Tokens of all rows that are learned."""
        return sum(int(np.count_nonzero(row.mask)) for rows in self.answers for row in rows)


class LengthLimit:
    """Applies a length limit to the rows of examples, and counts the dropped and truncated examples.

    Args:
        tokens: length of the longest row.
        rule: treatment of an example with a longer row.
    """

    def __init__(self, tokens: int, rule: LongRows) -> None:
        self._tokens, self._rule = tokens, rule
        self.dropped = self.truncated = 0

    def apply(self, example: Example) -> Example | None:
        """Return the example, truncated if need be, or None if it is dropped.

        An answer without a learned token within the limit is dropped under either rule.

        Raises:
            RowTooLongError: a row is too long, and the rule is "error".
        """
        longest = max(len(row.tokens) for rows in example.answers for row in rows)
        if longest <= self._tokens:
            return example
        if self._rule == "error":
            raise RowTooLongError(
                f"{example.source} has a row of {longest} tokens, and a learner takes {self._tokens}: raise "
                "learner.max_row_tokens and learner.max_tokens_per_micro_batch, or choose "
                "learner.long_rows='drop' or 'truncate'"
            )
        cut = tuple(tuple(filter(None, map(self._cut, rows))) for rows in example.answers)
        if self._rule == "drop" or not all(cut):
            self.dropped += 1
            return None
        self.truncated += 1
        return Example(example.source, cut, example.margin)

    def _cut(self, row: LearnedRow) -> LearnedRow | None:
        mask = row.mask[: self._tokens]
        return LearnedRow(row.tokens[: self._tokens], mask) if mask.any() else None


class SupervisedData:
    """The examples of a run: those that are learned, and those that are held out.

    Attributes:
        notes: messages for the user about examples that were left out.
    """

    def __init__(
        self, train: Sequence[Example], held_out: Sequence[Example] = (), notes: Sequence[str] = ()
    ) -> None:
        self.train, self.held_out, self.notes = list(train), list(held_out), list(notes)

    def fingerprint(self) -> JsonObject:
        """Return the number of examples and a digest of their tokens, which a resumed run compares."""
        digest = hashlib.sha256()
        for example in self.train:
            for row in itertools.chain(*example.answers):
                digest.update(row.tokens.tobytes())
                digest.update(row.mask.tobytes())
            if example.margin:
                digest.update(f"{example.margin!r}".encode())
        return {"number": len(self.train), "digest": digest.hexdigest()[:16]}


class BatchSchedule:
    """The examples of each step: all in a random order in every epoch.

    It depends on its arguments only, so that a resumed run continues with the same batches.

    Args:
        tokens: tokens of each example.
        batch_size: examples of a step at most.
        batch_tokens: tokens of a step at most, unless a single example has more; None for no limit.
        n_epochs: passes over the examples.
        n_steps: number of steps, whatever `n_epochs` is; None for all of the epochs.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        batch_size: int,
        batch_tokens: int | None,
        n_epochs: int,
        n_steps: int | None,
        seed: int,
    ) -> None:
        self._tokens, self._size, self._limit, self._seed = tokens, batch_size, batch_tokens, seed
        self._first_steps = [0]
        """Number of steps before each epoch."""
        while len(self._first_steps) <= n_epochs if n_steps is None else self._first_steps[-1] < n_steps:
            epoch = len(self._first_steps) - 1
            self._first_steps.append(self._first_steps[-1] + len(self._batches(epoch)))
        self.steps = self._first_steps[-1] if n_steps is None else n_steps
        self._epoch, self._current = -1, list[list[int]]()

    def batch(self, step: int) -> list[int]:
        """Return the indices of a step's examples; the first step is 1."""
        epoch = next(e for e, first in enumerate(self._first_steps[1:]) if step <= first)
        if epoch != self._epoch:
            self._epoch, self._current = epoch, self._batches(epoch)
        return self._current[step - 1 - self._first_steps[epoch]]

    def fingerprint(self, step: int) -> JsonObject:
        """Return the examples of a step in short; empty for step 0 and after the last one."""
        if not 0 < step <= self.steps:
            return {}
        batch = np.array(self.batch(step), np.int64)
        return {"number": len(batch), "digest": hashlib.sha256(batch.tobytes()).hexdigest()[:16]}

    def epochs_after(self, step: int) -> float:
        """Return the passes over the examples after a step, as a number with a fraction."""
        epoch = next(e for e, first in enumerate(self._first_steps[1:]) if step <= first)
        start, end = self._first_steps[epoch : epoch + 2]
        return epoch + (step - start) / (end - start)

    def _batches(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self._tokens)))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return list(split_examples(order, self._tokens, self._size, self._limit))


def split_examples(
    order: Sequence[int], tokens: Sequence[int], size: int, limit: int | None
) -> Iterator[list[int]]:
    """Yield consecutive examples of an order, at most `size` and with at most `limit` tokens together; a
    longer example is alone.

    Args:
        tokens: tokens of each example.
    """
    part: list[int] = []
    used = 0
    for index in order:
        if part and (len(part) == size or (limit is not None and used + tokens[index] > limit)):
            yield part
            part, used = [], 0
        part.append(index)
        used += tokens[index]
    if part:
        yield part


def build_supervised_batch(examples: Sequence[Example]) -> TrainBatch:
    """Return the learners' batch. Each answer is a rollout of it; the two of a pair follow each other, the
    chosen one first, whose reward is the pair's margin."""
    batch = TrainBatch([], [], [], [])
    for number, example in enumerate(examples):
        for place, rows in enumerate(example.answers):
            for row in rows:
                batch.rows.append(row.to_trajectory(example.source))
                batch.owners.append(len(batch.rewards))
            batch.rewards.append(example.margin if place == 0 else 0.0)
            batch.groups.append(str(number))
    return batch
