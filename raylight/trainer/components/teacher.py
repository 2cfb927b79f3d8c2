"""The teacher of a run that distils: a fixed model in engines of its own, which scores sampled tokens."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylight.aio import pause, task_group
from raylight.errors import RowTooLongError, ServingLostError, TeacherPromptError, summarize_ray_error
from raylight.experience.batch import TrainBatch
from raylight.experience.teacher_prompts import (
    ChangedPrompt,
    TeacherPrompt,
    changed_prompts,
    replace_prompt,
)
from raylight.rewards.group import run_plain
from raylight.serving.deploy.replica import ScoredRow
from raylight.trainer.components.serving import Serving
from raylight.trainer.settings import ServingSettings
from raylight.trainer.teacher_settings import longest_row
from raylight.types import FinishedRollout, Trajectory

MOST_TOKENS = 16_384
"""Tokens of one request; a longer row is a request of its own."""
REQUESTS_PER_REPLICA = 2
"""Requests in flight for each replica, so that none waits for the next one to arrive."""
RETRY_DELAY_S = 0.5


class TeacherClient:
    """An actor that divides requests among the replicas.

    Serve's client polls the controller in a thread for as long as its process lives. The driver must not have
    such a thread: Ray ends a process that uses it after the connection was closed.
    """

    def __init__(self, app_name: str) -> None:
        self._handle = serve.get_app_handle(app_name)

    async def ask(self, method: str, items: list[Any]) -> list[Any]:
        """Call a method of a replica."""
        try:
            return await getattr(self._handle, method).remote(items)
        except RayTaskError as error:  # of the engine
            raise error.cause from None


class Teacher:
    """The teacher's deployment, and the requests to it.

    Args:
        run_name: name of the run.
        model: the teacher's model.
        timeout_s: seconds within which a request must be answered, the replacement of lost replicas included.
        secret: secret without which its HTTP address answers nobody.
        show_stage: shows what the run is doing now.
        owns_cluster: True if the Ray cluster ends with this run.
        prompt: function that changes the messages that the teacher reads; None: it reads the model's prompts.
    """

    def __init__(
        self,
        run_name: str,
        model: ServingSettings,
        timeout_s: float,
        secret: str | None,
        show_stage: Callable[[str], None],
        owns_cluster: bool,
        prompt: TeacherPrompt | None = None,
    ) -> None:
        self._name, self._timeout_s, self._show_stage = f"{run_name}-{model.name}", timeout_s, show_stage
        self._replicas, self._prompt, self._noted = model.engine.replicas, prompt, False
        self._most_tokens = longest_row(model.engine)
        self._serving = Serving(self._name, model, secret, None, show_stage, owns_cluster)
        self._client: Any = None
        self.retries = 0
        """Requests that were sent again because a replica was lost."""

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the coordinator of the replicas, and define their deployment."""
        self._stack = stack
        await self._serving.open(stack)
        self._serving.prepare(0)

    async def start(self) -> None:
        """Start the replicas. Not beside the start of another model: only one can start Serve.

        Raises:
            EngineStartError: the replicas did not start in time.
        """
        await self._serving.start()
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._client = (
            ray.remote(TeacherClient)
            .options(
                name="teacher-client",
                namespace=self._name,
                num_cpus=0,
                max_concurrency=2 * self._slots,
                max_restarts=-1,
                scheduling_strategy=this_node,
            )
            .remote(self._name)
        )
        self._stack.callback(ray.kill, self._client)

    def watches(self) -> list[Coroutine[Any, Any, object]]:
        """Return nothing: a request finds a lost teacher."""
        return []

    async def counts(self) -> dict[str, int]:
        """Return the number of repeated requests."""
        return {"teacher_retries": self.retries}

    async def score(
        self, batch: TrainBatch, finished: Sequence[FinishedRollout]
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Return a batch with the teacher's log-probs, and metrics.

        Args:
            finished: the rollouts of the batch; with spans if the teacher has a prompt function.

        Raises:
            ServingLostError: the teacher did not answer in time.
            TeacherPromptError: the prompt function fails, or its messages cannot be rendered.
            RowTooLongError: a row is too long with the teacher's prompt.
        """
        started = time.perf_counter()
        rows = [ScoredRow(row.token_ids, row.prompt_length) for row in batch.rows]
        metrics: dict[str, float] = {}
        if self._prompt is not None:
            rows, metrics = await self._change(batch.rows, rows, await self._changes(batch.rows, finished))
        logprobs = await self._send("token_logprobs", rows, [len(row.ids) for row in rows])
        metrics |= {"time/teacher_s": time.perf_counter() - started, "teacher/retries": float(self.retries)}
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
            scored[index] = ScoredRow(*replace_prompt(rows[index], change.tokens, rendered[change.teacher]))
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

    @property
    def _slots(self) -> int:
        return REQUESTS_PER_REPLICA * self._replicas

    async def _send(self, method: str, items: list[Any], lengths: Sequence[int]) -> list[Any]:
        """Have the replicas answer for items, which are divided among them by their lengths."""
        free = asyncio.Semaphore(self._slots)

        async def ask(part: range) -> list[Any]:
            async with free:
                return await self._ask(method, items[part.start : part.stop])

        async with task_group() as tasks:
            sent = [tasks.create_task(ask(part)) for part in split_rows(lengths, self._slots)]
        return [answer for task in sent for answer in task.result()]

    async def _ask(self, method: str, items: list[Any]) -> list[Any]:
        """Have a replica answer; if it is lost meanwhile, another one."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._client.ask.remote(method, items)
                    except (RayTaskError, RayActorError) as error:
                        cause = error.cause if isinstance(error, RayTaskError) else error
                        if not isinstance(cause, RayActorError):
                            raise cause from None
                        self.retries += 1
                        self._show_stage(f"a replica of the teacher was lost: {summarize_ray_error(cause)}")
                        await pause(RETRY_DELAY_S)
        except TimeoutError:
            raise ServingLostError(
                f"the teacher did not score or render {len(items)} rows within {self._timeout_s:g} s "
                "(teacher.timeout_s), the replacement of lost replicas included; see the replicas' logs with "
                "`ray logs`, give it more replicas, or raise timeout_s. The run can be resumed"
            ) from None


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
