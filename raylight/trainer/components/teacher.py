"""Teachers for distillation: fixed models in dedicated engines, which score sampled tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from raylight._utils.aio import task_group
from raylight.errors import RowTooLongError, TeacherPromptError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.teachers import (
    ChangedPrompt,
    TeacherChoice,
    changed_prompts,
    choose_teachers,
    replace_prompt,
)
from raylight.experience.token_alignment import AlignedTokens, TokenAligner, load_aligner, span_logprobs
from raylight.rewards.group import run_plain
from raylight.serving.deploy.replica import ScoredRow
from raylight.trainer.cluster_fit.scoring_models import longest_row
from raylight.trainer.components import Component
from raylight.trainer.components.model_service import ModelService
from raylight.trainer.components.served_model import ServingContext
from raylight.trainer.spec.settings import ServedTeacher, TeacherSettings
from raylight.types import FinishedRollout, Trajectory

MOST_TOKENS = 16_384
"""Tokens of one request; a longer row is a separate request."""
MEANS = {"teacher/added_tokens": "teacher/changed_prompts", "teacher/tokens_per_span": "spans"}
"""Metrics that are means, with the count that divides their sum."""
REQUESTS_PER_REPLICA = 2
"""Requests in flight for each replica, so that none waits for the next one to arrive."""


class Teacher:
    """A teacher's deployment, and the requests to it, which find a lost teacher.

    Args:
        context: the run.
        settings: the model, its engine and the user's settings.
    """

    def __init__(self, context: ServingContext, settings: ServedTeacher) -> None:
        model, self._timeout_s = settings.serving, settings.config.timeout_s
        self._top_k = settings.top_k
        aligned_to = settings.aligned_to
        self._aligner = load_aligner(aligned_to, model.model_path) if aligned_to is not None else None
        self._show_stage = context.show_stage
        self._prompt, self._noted = settings.config.prompt, False
        self._most_tokens = longest_row(model.engine)
        self.service = ModelService(
            context,
            model,
            title="the teacher",
            setting="teacher.timeout_s",
            timeout_s=self._timeout_s,
            requests=REQUESTS_PER_REPLICA,
        )

    async def score(
        self, batch: TrainBatch, finished: Sequence[FinishedRollout]
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Return a batch with the teacher's log-probs, of the sampled tokens or of its most probable ones, at
        each row's sampling temperature, and metrics, in which the `MEANS` are still sums.

        Args:
            finished: the rollouts of the batch; with spans if the teacher has a prompt function.

        Raises:
            ServingLostError: the teacher did not answer in time.
            TeacherPromptError: the prompt function fails, or its messages cannot be rendered.
            RowTooLongError: a row is too long with the teacher's prompt.
        """
        started = time.perf_counter()
        if self._aligner is None:
            batch, totals = await self._score_same(batch, finished)
        else:
            batch, totals = await self._score_aligned(batch, finished, self._aligner)
        retries = float(self.service.retries)
        return batch, totals | {"time/teacher_s": time.perf_counter() - started, "teacher/retries": retries}

    async def _score_same(
        self, batch: TrainBatch, finished: Sequence[FinishedRollout]
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Return the batch with the log-probs of a teacher with the same tokens."""
        rows = [ScoredRow(row.token_ids, row.prompt_length, row.temperature) for row in batch.rows]
        metrics: dict[str, float] = {}
        if self._prompt is not None:
            rows, metrics = await self._change(batch.rows, rows, await self._changes(batch.rows, finished))
        lengths, top_k = [len(row.ids) for row in rows], self._top_k
        if top_k is None:
            batch = replace(batch, teacher_logprobs=await self._send("token_logprobs", rows, lengths))
        else:
            batch = replace(batch, teacher_tops=await self._send("top_logprobs", rows, lengths, top_k))
        return batch, metrics

    async def _changes(
        self, rows: list[Trajectory], finished: Sequence[FinishedRollout]
    ) -> list[ChangedPrompt | None]:
        """Return the changed prompt of each row, from the user's function."""
        try:
            async with asyncio.timeout(self._timeout_s):
                aligned = self._aligner is not None
                return await run_plain(changed_prompts, rows, finished, self._prompt, aligned)
        except TimeoutError:
            raise TeacherPromptError(
                f"the teacher's prompt function did not return within {self._timeout_s:g} s for all of "
                f"{len(rows)} rows (teacher.timeout_s); put what it computes or waits for into the tasks"
            ) from None

    async def _change(
        self, rows: list[Trajectory], unchanged: list[ScoredRow], changes: list[ChangedPrompt | None]
    ) -> tuple[list[ScoredRow], dict[str, float]]:
        rendered = await self._render(
            text for change in changes if change for text in (change.own, change.teacher)
        )
        scored, differing = list(unchanged), 0
        for index, change in enumerate(changes):
            if change is None:
                continue
            differing += rendered[change.own] != change.tokens.tolist()
            row = rows[index]
            replaced = replace_prompt(row, change.tokens, rendered[change.teacher])
            scored[index] = ScoredRow(*replaced, row.temperature)
            self._check_length(change.rollout_id, len(scored[index].ids))
        if differing and not self._noted:
            self._noted = True
            self._show_stage(
                f"the teacher's chat template renders the messages of {differing} rows otherwise than the "
                "model read them (teacher/other_renderings counts them); give both the same template"
            )
        added = sum(len(after.ids) - len(before.ids) for after, before in zip(scored, unchanged, strict=True))
        changed = sum(change is not None for change in changes)
        return scored, {
            "teacher/changed_prompts": float(changed),
            "teacher/added_tokens": float(added),
            "teacher/other_renderings": float(differing),
        }

    def _check_length(self, rollout_id: str, length: int) -> None:
        if length > self._most_tokens:
            raise RowTooLongError(
                f"with the teacher's prompt, a row of rollout {rollout_id} has {length} tokens, "
                f"and the teacher takes {self._most_tokens}; return shorter messages, raise the "
                "max_model_len of the teacher, or lower the engine's"
            )

    async def _score_aligned(
        self, batch: TrainBatch, finished: Sequence[FinishedRollout], aligner: TokenAligner
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Return the batch with the log-probs of a teacher with other tokens, at the ends of spans."""
        changes = await self._changes(batch.rows, finished)
        rendered = await self._render(change.teacher for change in changes if change)
        prompts = [
            (len(change.tokens), rendered[change.teacher]) if change else (0, []) for change in changes
        ]
        aligned = await asyncio.to_thread(_align, aligner, batch.rows, [own for own, _ in prompts])
        rows = []
        for row, one, (own, prompt) in zip(batch.rows, aligned, prompts, strict=True):
            ids = np.array(prompt + one.ids, np.int32)
            self._check_length(row.rollout_id, len(ids))
            rows.append(ScoredRow(ids, len(prompt) + one.place(row.prompt_length - own), row.temperature))
        found = await self._send("token_logprobs", rows, [len(row.ids) for row in rows])
        logprobs = [
            span_logprobs(one, values, row.start - len(prompt))[original.prompt_length - own :]
            for original, one, row, values, (own, prompt) in zip(
                batch.rows, aligned, rows, found, prompts, strict=True
            )
        ]
        totals = {
            "teacher/tokens_per_span": float(sum(one.spans[-1][0] for one in aligned)),
            "spans": float(sum(len(one.spans) for one in aligned)),
        }
        return replace(batch, teacher_logprobs=logprobs), totals

    async def _render(self, requests: Iterable[str]) -> dict[str, list[int]]:
        """Return the tokens of chat requests, by request."""
        texts = sorted(set(requests))
        tokens = await self._send("render_chats", texts, list(map(len, texts)))
        return dict(zip(texts, tokens, strict=True))

    async def _send(
        self, method: str, items: list[Any], lengths: Sequence[int], *arguments: object
    ) -> list[Any]:
        """Have the replicas answer for items, which are divided among them by their lengths."""

        async def ask(part: range) -> list[object]:
            sent = items[part.start : part.stop]
            return await self.service.ask(method, f"{len(sent)} rows", sent, *arguments)

        async with task_group() as tasks:
            asked = [tasks.create_task(ask(part)) for part in split_rows(lengths, self.service.slots)]
        return [answer for task in asked for answer in task.result()]


class Teachers(Component):
    """The teachers of a run, of which each row has one, chosen by its task.

    Args:
        context: the run.
        settings: the teachers by name; all on the learners' ranks, or all in engines.
        choice: key or function that gives a task's teacher; None for a single teacher.
    """

    def __init__(
        self,
        context: ServingContext,
        settings: Mapping[str, TeacherSettings],
        choice: TeacherChoice | None,
    ) -> None:
        self._names, self._choice = list(settings), choice
        self._served = [Teacher(context, one) for one in settings.values() if isinstance(one, ServedTeacher)]

    async def open(self, stack: AsyncExitStack) -> None:
        """Start the deployments of the teachers, which the stack ends."""
        for teacher in self._served:
            await teacher.service.open(stack)

    async def start(self) -> None:
        """Wait until all deployments are up."""
        for teacher in self._served:
            await teacher.service.start()

    async def counts(self) -> dict[str, int]:
        """Return the number of repeated requests."""
        return {"teacher_retries": sum(teacher.service.retries for teacher in self._served)}

    async def score(
        self, batch: TrainBatch, finished: Sequence[FinishedRollout]
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Return a batch with what its teachers say of each row, and metrics; see `Teacher.score`.

        Raises:
            ConfigError: a task has no teacher.
        """
        if self._choice is None:
            batch, totals = await self._served[0].score(batch, finished)
            return batch, _describe([totals])
        numbers = await run_plain(choose_teachers, batch.rows, finished, self._names, self._choice)
        parts = [[i for i, one in enumerate(numbers) if one == number] for number in range(len(self._names))]
        counts = {
            f"teacher/rows/{name}": float(len(part)) for name, part in zip(self._names, parts, strict=True)
        }
        if not self._served:
            return replace(batch, teacher_numbers=numbers), counts
        async with task_group() as tasks:
            asked = [
                tasks.create_task(teacher.score(replace(batch, rows=[batch.rows[i] for i in part]), finished))
                for teacher, part in zip(self._served, parts, strict=True)
                if part
            ]
        scored = [task.result() for task in asked]
        order = np.argsort([i for part in parts for i in part]).tolist()
        return _merge(batch, [part for part, _ in scored], order), _describe([m for _, m in scored]) | counts


def _align(aligner: TokenAligner, rows: list[Trajectory], prompts: list[int]) -> list[AlignedTokens]:
    """Return the tokens of rows after prompts of these lengths in the teacher's tokens."""
    return [
        aligner.align(row.token_ids[own:], row.mask[own:]) for row, own in zip(rows, prompts, strict=True)
    ]


def _merge(batch: TrainBatch, parts: list[TrainBatch], order: list[int]) -> TrainBatch:
    """Return a batch with the scores of its parts.

    Args:
        order: place of each row of the batch in the parts.
    """
    for name in ("teacher_logprobs", "teacher_tops"):
        values = [value for part in parts for value in getattr(part, name) or ()]
        if values:
            chosen: dict[str, Any] = {name: [values[place] for place in order]}
            batch = replace(batch, **chosen)
    return batch


def _describe(totals: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of all teachers, which have scored at the same time, from those of each."""
    names = {name for found in totals for name in found}
    metrics = {name: math.fsum(found.get(name, 0.0) for found in totals) for name in names}
    metrics["time/teacher_s"] = max((found["time/teacher_s"] for found in totals), default=0.0)
    for mean in metrics.keys() & MEANS.keys():
        metrics[mean] /= max(metrics[MEANS[mean]], 1)
    return {name: value for name, value in metrics.items() if name != "spans"}


def split_rows(lengths: Sequence[int], parts: int) -> Iterator[range]:
    """Yield ranges of rows for one request each: at least so many requests, if there are as many rows.

    Args:
        lengths: tokens of each row.
        parts: requests at the same time.
    """
    most = min(MOST_TOKENS, math.ceil(sum(lengths) / parts))
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > most:
            yield range(start, index)
            start, tokens = index, 0
        tokens += length
    if lengths:
        yield range(start, len(lengths))
