"""Training of a starter model: imitation of a teacher that is right, and then of one that is careless.

The skill is slow to learn from noisy labels, so the teacher is right until the model is. Then a careless
teacher spreads the model's probability over wrong answers, until the aimed accuracy is reached. The right
answer stays the most probable one, which reinforcement learning finds again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from examples.starter_models.batches import CarelessTeacher, batches, careless_rate, split_by_size
from raylight.experience.batches.demonstrations import DemonstrationRow

LEARNING_RATE, WARMUP = 3e-3, 50
CARELESS_RATE, CARELESS_WARMUP = 2e-4, 10
"""Learning rate while the teacher is careless, and the steps until it is reached."""
CARELESS_STEPS = 400
"""Largest number of steps with a careless teacher."""
SKILLED = 0.9
"""Accuracy with which the first phase ends early; halfway to 1 if the aimed accuracy is higher."""
STRAYING = 0.6
"""Accuracy of the careless teacher, as a part of the accuracy that is aimed at."""
EVERY, CARELESS_EVERY = 50, 2
"""Steps between two measurements of the accuracy, for each phase."""


@dataclass(frozen=True)
class TeachingProgress:
    """State of a training at a measurement.

    Attributes:
        step: steps done.
        steps: steps of this phase at most.
        careless: True if the teacher is careless.
        loss: mean loss since the last measurement, in nats per token.
        accuracy: probability that all answers of a conversation that is not trained on are the teacher's.
        seconds: seconds since the start.
        seconds_left: seconds that the phase takes at most.
    """

    step: int
    steps: int
    careless: bool
    loss: float
    accuracy: float
    seconds: float
    seconds_left: float


Report = Callable[[TeachingProgress], None]


class StarterTraining:
    """Training of one model on rows.

    Args:
        model: a causal language model of transformers, with one final layer `lm_head`.
        rows: rows to learn.
        held_out: rows that measure the accuracy.
        padding: token that fills up the rows of a batch.
        seed: seed of the batches and of the careless teacher.
        batch_tokens: tokens of a batch at most.
        report: called after each measurement.

    Attributes:
        steps_done: steps of both phases.
        skill: accuracy at the end of the first phase.
    """

    def __init__(
        self,
        model: Any,
        rows: Sequence[DemonstrationRow],
        held_out: Sequence[DemonstrationRow],
        padding: int,
        seed: int,
        batch_tokens: int,
        report: Report,
    ) -> None:
        self._model = model
        self._rows = rows
        self._held_out = held_out
        self._padding = padding
        self._random = random.Random(seed)
        self._batch_tokens = batch_tokens
        self._report = report
        self._start = time.monotonic()
        self.steps_done = 0
        self.skill = 0.0

    def run(self, steps: int, aim: float) -> float:
        """Train until the accuracy is `aim`, with at most `steps` steps of the teacher that is right.

        Returns the accuracy. It is below `aim` if the steps do not suffice.
        """
        skilled = max(SKILLED, (1 + aim) / 2)
        source = batches(self._rows, self._random, self._batch_tokens)
        schedule = [cosine(step, steps) * LEARNING_RATE for step in range(steps)]
        self.skill = self._phase(source, schedule, EVERY, False, lambda accuracy: accuracy >= skilled)
        if self.skill <= aim:
            return self.skill
        careless = CarelessTeacher(self._rows, careless_rate(self._rows, STRAYING * aim), self._random)
        mistaken = ([careless.answer(row) for row in group] for group in source)
        schedule = [CARELESS_RATE * min(1, n / CARELESS_WARMUP) for n in range(1, CARELESS_STEPS + 1)]
        return self._phase(mistaken, schedule, CARELESS_EVERY, True, lambda accuracy: accuracy <= aim)

    def _phase(
        self,
        source: Iterator[list[DemonstrationRow]],
        schedule: Sequence[float],
        every: int,
        careless: bool,
        done: Callable[[float], bool],
    ) -> float:
        """Train with one learning rate a step, until `done(accuracy)`; return the last accuracy."""
        import torch

        parameters = list(self._model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.1)
        losses: list[float] = []
        accuracy, start = 0.0, time.monotonic()
        for step, (rate, group) in enumerate(zip(schedule, source, strict=False), 1):
            optimizer.param_groups[0]["lr"] = rate
            loss = -learned_logprobs(self._model, group, self._padding)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(loss.item())
            self.steps_done += 1
            if step % every and step < len(schedule):
                continue
            accuracy = right_answers(self._model, self._held_out, self._padding)
            now = time.monotonic()
            left = (now - start) / step * (len(schedule) - step)
            mean = sum(losses) / len(losses)
            seconds = now - self._start
            self._report(TeachingProgress(step, len(schedule), careless, mean, accuracy, seconds, left))
            losses.clear()
            if done(accuracy):
                break
        return accuracy


def cosine(step: int, steps: int) -> float:
    """Return the learning rate's factor: linear warm-up, then a cosine that reaches zero after `steps`."""
    return min(1.0, (step + 1) / min(WARMUP, steps / 4)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def learned_logprobs(model: Any, rows: Sequence[DemonstrationRow], padding: int) -> tuple[Any, list[int]]:
    """Return the log-probs of all learned tokens of some rows, and the number of them in each row."""
    import torch

    width = max(len(row.tokens) for row in rows)
    tokens = torch.tensor([row.tokens + [padding] * (width - len(row.tokens)) for row in rows])
    places = torch.tensor([i * width + place for i, row in enumerate(rows) for place in row.learned])
    hidden = model.model(tokens, use_cache=False).last_hidden_state.flatten(0, 1)
    logits = model.lm_head(hidden[places - 1])
    losses = torch.nn.functional.cross_entropy(logits, tokens.flatten()[places], reduction="none")
    return -losses, [len(row.learned) for row in rows]


def right_answers(model: Any, rows: Sequence[DemonstrationRow], padding: int) -> float:
    """Return the mean probability that a model sampled at temperature 1 gives all answers of a row."""
    import torch

    probabilities: list[float] = []
    with torch.no_grad():
        for group in split_by_size(sorted(rows, key=lambda row: len(row.tokens))):
            logprobs, counts = learned_logprobs(model, group, padding)
            probabilities += [part.sum().exp().item() for part in logprobs.split(counts)]
    return sum(probabilities) / len(probabilities)
