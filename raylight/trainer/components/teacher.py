"""The teacher of a run that distils: a fixed model in engines of its own, which scores sampled tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from raylight._utils.aio import task_group
from raylight.errors import RowTooLongError, TeacherPromptError
from raylight.experience.batch import TrainBatch
from raylight.experience.teacher_prompts import (
    ChangedPrompt,
    changed_prompts,
    replace_prompt,
)
from raylight.rewards.group import run_plain
from raylight.serving.deploy.replica import ScoredRow
from raylight.trainer.cluster_fit.scoring_models import longest_row
from raylight.trainer.components import Component
from raylight.trainer.components.model_service import ModelService
from raylight.trainer.spec.settings import TeacherSettings
from raylight.types import FinishedRollout, Trajectory

MOST_TOKENS = 16_384
"""Tokens of one request; a longer row is a request of its own."""
REQUESTS_PER_REPLICA = 2
"""Requests in flight for each replica, so that none waits for the next one to arrive."""


class Teacher(Component):
    """The teacher's deployment, and the requests to it, which find a lost teacher.

    Args:
        run_name: name of the run.
        settings: the model, its engine and the user's settings.
        secret: secret without which its HTTP address answers nobody.
        show_stage: shows what the run is doing now.
        owns_cluster: True if the Ray cluster ends with this run.
    """

    def __init__(
        self,
        run_name: str,
        settings: TeacherSettings,
        secret: str | None,
        show_stage: Callable[[str], None],
        owns_cluster: bool,
    ) -> None:
        model, self._timeout_s = settings.serving, settings.config.timeout_s
        self._show_stage = show_stage
        self._prompt, self._noted = settings.config.prompt, False
        self._most_tokens = longest_row(model.engine)
        self.service = ModelService(
            f"{run_name}-{model.name}",
            model,
            title="the teacher",
            setting="teacher.timeout_s",
            timeout_s=self._timeout_s,
            requests=REQUESTS_PER_REPLICA,
            secret=secret,
            show_stage=show_stage,
            owns_cluster=owns_cluster,
        )

    async def counts(self) -> dict[str, int]:
        """Return the number of repeated requests."""
        return {"teacher_retries": self.service.retries}

    async def score(
        self, batch: TrainBatch, finished: Sequence[FinishedRollout]
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Return a batch with the teacher's log-probs at each row's sampling temperature, and metrics.

        Args:
            finished: the rollouts of the batch; with spans if the teacher has a prompt function.

        Raises:
            ServingLostError: the teacher did not answer in time.
            TeacherPromptError: the prompt function fails, or its messages cannot be rendered.
            RowTooLongError: a row is too long with the teacher's prompt.
        """
        started = time.perf_counter()
        rows = [ScoredRow(row.token_ids, row.prompt_length, row.temperature) for row in batch.rows]
        metrics: dict[str, float] = {}
        if self._prompt is not None:
            rows, metrics = await self._change(batch.rows, rows, await self._changes(batch.rows, finished))
        logprobs = await self._send("token_logprobs", rows, [len(row.ids) for row in rows])
        retries = float(self.service.retries)
        metrics |= {"time/teacher_s": time.perf_counter() - started, "teacher/retries": retries}
        return replace(batch, teacher_logprobs=logprobs), metrics

    async def _changes(
        self, rows: list[Trajectory], finished: Sequence[FinishedRollout]
    ) -> list[ChangedPrompt | None]:
        """Return the changed prompt of each row, from the user's function."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await run_plain(changed_prompts, rows, finished, self._prompt)
        except TimeoutError:
            raise TeacherPromptError(
                f"the teacher's prompt function did not return within {self._timeout_s:g} s for all of "
                f"{len(rows)} rows (teacher.timeout_s); put what it computes or waits for into the tasks"
            ) from None

    async def _change(
        self, rows: list[Trajectory], unchanged: list[ScoredRow], changes: list[ChangedPrompt | None]
    ) -> tuple[list[ScoredRow], dict[str, float]]:
        """Return the rows with the teacher's prompts, and metrics."""
        texts = sorted({text for change in changes if change for text in (change.own, change.teacher)})
        tokens = await self._send("render_chats", texts, list(map(len, texts)))
        rendered = dict(zip(texts, tokens, strict=True))
        scored, differing = list(unchanged), 0
        for index, change in enumerate(changes):
            if change is None:
                continue
            differing += rendered[change.own] != change.tokens.tolist()
            row = rows[index]
            replaced = replace_prompt(row, change.tokens, rendered[change.teacher])
            scored[index] = ScoredRow(*replaced, row.temperature)
            if (length := len(scored[index].ids)) > self._most_tokens:
                raise RowTooLongError(
                    f"with the teacher's prompt, a row of rollout {change.rollout_id} has {length} tokens, "
                    f"and the teacher takes {self._most_tokens}; return shorter messages, raise the "
                    "max_model_len of the teacher, or lower that of the engine"
                )
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
            "teacher/added_tokens": added / max(changed, 1),
            "teacher/other_renderings": float(differing),
        }

    async def _send(self, method: str, items: list[Any], lengths: Sequence[int]) -> list[Any]:
        """Have the replicas answer for items, which are divided among them by their lengths."""

        async def ask(part: range) -> list[Any]:
            sent = items[part.start : part.stop]
            answers: list[Any] = await self.service.ask(method, f"{len(sent)} rows", sent)
            return answers

        async with task_group() as tasks:
            asked = [tasks.create_task(ask(part)) for part in split_rows(lengths, self.service.slots)]
        return [answer for task in asked for answer in task.result()]


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
