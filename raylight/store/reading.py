"""Reader of the store: its queries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from raylight._utils.synonyms import accept_synonyms
from raylight.errors import QueryError, UnknownIdError
from raylight.semconv import (
    CALL_ID,
    DIALECT,
    GRADE_ERROR,
    GRADE_SPAN_ID,
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    PROMPT_TOKEN_IDS,
    REQUEST_PARAMETERS,
    RESPONSE_LOGPROBS,
    RESPONSE_TOKEN_IDS,
    TOOL_DEFINITIONS,
    WEIGHT_VERSIONS,
)
from raylight.store.call_batcher import Channel
from raylight.store.call_rows import generations_from_rows
from raylight.store.queries import Page
from raylight.store.rows import (
    ATTEMPT_ID,
    BASE,
    SPAN_ID,
    Row,
    attempt_from_row,
    resources_from_row,
    rollout_from_row,
    spans_from_rows,
    state_from_row,
    step_groups_from_json,
    worker_from_row,
)
from raylight.traces.reward_spans import get_rewards_from_span
from raylight.types import (
    ATTEMPT_FINISHED,
    Attempt,
    FinishedRollout,
    Generation,
    IntArray,
    JsonObject,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutState,
    RolloutStatus,
    RolloutTokens,
    Span,
    StepGroups,
    TokenTotals,
    Worker,
    WorkerStatus,
)

Item = TypeVar("Item")
Logic = Literal["and", "or"]
Order = Literal["asc", "desc"]


COLLECT_BATCH = 16
"""Rollouts that are read at a time, so that long ones do not block the event loop."""


class ChatTurn(NamedTuple):
    """A chat call and its response."""

    agent: str | None
    request: JsonObject
    """Request as the engine received it, without the token ids of the prompt."""
    answer: JsonObject
    """Message of the assistant."""
    tokens: IntArray
    """Token ids of the prompt and the response."""
    prompt_length: int
    """Number of tokens of the prompt."""


class StoreReader:
    """Client of a store that only reads. A `limit` of -1 means all; an unknown id raises UnknownIdError.

    A result is a list with the number of results on all pages as `total`.

    Args:
        target: a StoreActor's handle, or a StoreService in this process.
    """

    def __init__(self, target: object) -> None:
        self._channel = Channel(target)

    @property
    def is_in_process(self) -> bool:
        """True if the store runs in this process, where other processes cannot reach it."""
        from raylight.store.service import StoreService

        return isinstance(self._channel.target, StoreService)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._channel.target,)

    @accept_synonyms(status="status_in", rollout_ids="rollout_id_in")
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: Logic = "and",
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Rollout]:
        """Return rollouts with their latest attempts; without `sort_by` in the order of enqueueing."""
        page = Page(sort_by, sort_order, limit, offset)
        args = (
            _checked_list(status_in),
            _checked_list(rollout_id_in),
            rollout_id_contains,
            filter_logic,
            page,
        )
        return await self._query(rollout_from_row, page, "rollouts", *args)

    async def get_rollout_states(self, rollout_ids: Sequence[str]) -> list[RolloutState]:
        """Return the states, without inputs, of these rollouts, if they exist, in order of enqueueing."""
        return [state_from_row(row) for row in await self._channel.send("query", "states", list(rollout_ids))]

    async def count_sampled_tokens(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTokens]:
        """Return the tokens that decided rollouts sampled, by id."""
        rows = await self._channel.send("query", "sampled_tokens", list(rollout_ids))
        return {rollout_id: RolloutTokens(*counts) for rollout_id, *counts in rows}

    async def token_totals(
        self, prefix: str, next_group: int = 0, open_groups: Sequence[int] = ()
    ) -> TokenTotals:
        """Return the numbers of tokens that all rollouts of a lineage and mode sampled.

        Args:
            prefix: beginning of the rollouts' ids; the number of a group follows it.
            next_group: number from which on no training step has taken a group.
            open_groups: groups below it that no training step has taken.
        """
        totals = await self._channel.send("query", "token_totals", prefix, next_group, list(open_groups))
        return TokenTotals(*totals)

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Return all attempts of a rollout, oldest first."""
        page = Page(sort_by, sort_order, limit, offset)
        return await self._query(attempt_from_row, page, "attempts", rollout_id, page)

    async def query_steps(self, lineage: str) -> dict[int, StepGroups]:
        """Return the groups that the training steps of a lineage took, by step."""
        rows = await self._channel.send("query", "steps", lineage)
        return {step: step_groups_from_json(groups) for step, groups in rows}

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: Logic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Order = "asc",
    ) -> PaginatedResult[Span]:
        """Return spans of a rollout: of all its attempts, of one attempt, or of the "latest"."""
        equal = {"trace_id": trace_id, "span_id": span_id, "parent_id": parent_id, "name": name}
        contain = {
            "trace_id": trace_id_contains,
            "span_id": span_id_contains,
            "parent_id": parent_id_contains,
            "name": name_contains,
        }
        page = Page(sort_by, sort_order, limit, offset)
        args = (rollout_id, attempt_id, equal, contain, filter_logic, page)
        rows, total = await self._channel.send("query", "spans", *args)
        spans = await self._spans(rows)
        call_ids = [call_id for span in spans if (call_id := _call_id(span))]
        if call_ids:
            add_tokens(spans, await self._calls(rollout_id, call_ids))
        return PaginatedResult(spans, limit=limit, offset=offset, total=total)

    async def _spans(self, rows: list[Row]) -> list[Span]:
        """Spans from columns SPAN of a part of a rollout's spans."""
        known = {(row[ATTEMPT_ID], row[SPAN_ID]) for row in rows}
        wanted = {(row[ATTEMPT_ID], row[BASE]) for row in rows if row[BASE]} - known
        bases = await self._channel.send("query", "span_bases", sorted(wanted)) if wanted else []
        return spans_from_rows(rows, bases)

    async def _calls(self, rollout_id: str, call_ids: list[str]) -> list[Generation]:
        """Generations of the calls among these that have tokens."""
        rows = await self._channel.send("query", "calls", rollout_id, call_ids)
        wanted = set(call_ids)
        return [call for call in generations_from_rows(rows).values() if call.key.call_id in wanted]

    async def chat_history(self, rollout_id: str, attempt_id: str) -> list[ChatTurn]:
        """Return the chat calls of an attempt and their responses, in the order of their start."""
        rows, _ = await self._channel.send("query", "spans", rollout_id, attempt_id, {}, {}, "and", Page())
        spans = {
            call_id: span
            for span in spans_from_rows(rows)
            if (call_id := _call_id(span)) and _is_chat(span, call_id)
        }
        calls = await self._calls(rollout_id, list(spans))
        complete = [
            call for call in calls if call.key.attempt_id == attempt_id and call.finish_reason != "aborted"
        ]
        return [
            _turn(spans[call.key.call_id], call)
            for call in sorted(complete, key=lambda call: call.start_time)
        ]

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Return versions of the named resources."""
        page = Page(sort_by, sort_order, limit, offset)
        args = (resources_id, resources_id_contains, page)
        return await self._query(resources_from_row, page, "resources", *args)

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: Logic = "and",
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Return workers: busy while they have an attempt, idle without one, unknown before they poll the
        queue and after they were released."""
        page = Page(sort_by, sort_order, limit, offset)
        args = (_checked_list(status_in), worker_id_contains, filter_logic, page, None)
        return await self._query(worker_from_row, page, "workers", *args)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout:
        """Return a rollout with its latest attempt."""
        return rollout_from_row(await self._channel.send("query", "rollout", rollout_id))

    async def is_attempt_finished(self, rollout_id: str, attempt_id: str) -> bool:
        """True if nothing more can be recorded for an attempt: it is decided, or unknown."""
        try:
            attempts = await self.query_attempts(rollout_id)
        except UnknownIdError:
            return True
        return all(
            attempt.status in ATTEMPT_FINISHED for attempt in attempts if attempt.attempt_id == attempt_id
        )

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return a rollout's latest attempt; None if it has had none."""
        return (await self.get_rollout_by_id(rollout_id)).attempt

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate:
        """Return a version of the named resources."""
        return resources_from_row(await self._channel.send("query", "resources_by_id", resources_id))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the version that was added or updated last; None if there is none."""
        row = await self._channel.send("query", "latest_resources")
        return None if row is None else resources_from_row(row)

    async def get_worker_by_id(self, worker_id: str) -> Worker:
        """Return a worker and what it executes."""
        args = (None, None, "and", Page(), [worker_id])
        workers = await self._query(worker_from_row, Page(), "workers", *args)
        if not workers:
            raise UnknownIdError(f"no worker {worker_id!r} in the store")
        return workers[0]

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[Rollout]:
        """Wait until rollouts are decided, or for `timeout` seconds; return the decided ones in order."""
        ids = await self.wait_until_decided(rollout_ids=rollout_ids, timeout=timeout)
        found = {rollout.rollout_id: rollout for rollout in await self.query_rollouts(rollout_id_in=ids)}
        return [found[rollout_id] for rollout_id in ids]

    async def wait_until_decided(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, at_least: int | None = None
    ) -> list[str]:
        """Wait until `at_least` of these rollouts are decided (default: all), or for `timeout` seconds;
        returns the ids of the decided ones, without reading the rollouts."""
        return await self._channel.send("wait_until_decided", list(rollout_ids), at_least, timeout)

    async def collect(
        self, rollout_ids: Sequence[str], with_spans: bool = False, with_span_tokens: bool = True
    ) -> list[FinishedRollout]:
        """Return each rollout with the reward and generations of its latest attempt, and spans on request.

        Args:
            with_span_tokens: add the tokens of the generations to the spans of their calls too, as lists, as
                adapters read them. For a conversation of many calls these are many times its tokens.
        """
        finished: list[FinishedRollout] = []
        for start in range(0, len(rollout_ids), COLLECT_BATCH):
            ids = list(rollout_ids[start : start + COLLECT_BATCH])
            answer = await self._channel.send("query", "collect", ids, with_spans)
            for item in (_finished(*columns) for columns in answer):
                if with_span_tokens:
                    add_tokens(item.spans, item.generations)
                finished.append(item)
        return finished

    async def read_images(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return the files of images by their digests.

        Raises:
            ImageError: one is missing, or no digest.
        """
        return await self._channel.send("read_images", list(dict.fromkeys(digests)))

    async def lease_s(self) -> float:
        """Return the seconds without activity after which an attempt goes back to the queue."""
        return await self._channel.send("lease_s")

    async def statistics(self) -> JsonObject:
        """Return the name of the client's class, the `uptime` of the store in seconds, and counters: by
        status (`rollouts_succeeded`), totals (`total_spans`), and of retried, late, lost or duplicate
        records."""
        return {"name": type(self).__name__, **await self._channel.send("query", "statistics")}

    async def _query(
        self, convert: Callable[[Row], Item], page: Page, method: str, *args: object
    ) -> PaginatedResult[Item]:
        rows, total = await self._channel.send("query", method, *args)
        return PaginatedResult(map(convert, rows), limit=page.limit, offset=page.offset, total=total)


def _finished(rollout: Row, rewarded: Row | None, calls: list[Row], spans: list[Row]) -> FinishedRollout:
    generations = list(generations_from_rows(calls).values())
    source = spans_from_rows([rewarded])[0] if rewarded else None
    rewards = {reward.name: reward.value for reward in (get_rewards_from_span(source) if source else [])}
    graded = source is not None and source.span_id == GRADE_SPAN_ID
    return FinishedRollout(
        rollout_from_row(rollout),
        next(iter(rewards.values()), None),
        generations,
        spans_from_rows(spans),
        rewards,
        graded,
        source.attributes.get(GRADE_ERROR) if graded and source else None,
    )


def add_tokens(spans: list[Span], generations: list[Generation]) -> None:
    """Add the tokens of generations to the spans of their calls; both are stored separately.

    A response that was cut off gets none, so that it is never trained on.
    """
    by_id = {generation.key.call_id: generation for generation in generations}
    for span in spans:
        generation = by_id.get(_call_id(span))
        if generation is not None and generation.finish_reason != "aborted":
            span.attributes |= {
                PROMPT_TOKEN_IDS: generation.prompt_ids.tolist(),
                RESPONSE_TOKEN_IDS: generation.output_ids.tolist(),
                RESPONSE_LOGPROBS: generation.logprobs.tolist(),
                WEIGHT_VERSIONS: generation.weight_versions.tolist(),
            }


def _is_chat(span: Span, call_id: str) -> bool:
    """True if serving recorded the span for a chat call. An agent may write call ids too."""
    return span.span_id == call_id[:16] and span.attributes.get(DIALECT, "completions") != "completions"


def _turn(span: Span, call: Generation) -> ChatTurn:
    request = json.loads(span.attributes[REQUEST_PARAMETERS]) | {
        "messages": json.loads(span.attributes[INPUT_MESSAGES])
    }
    if tools := span.attributes.get(TOOL_DEFINITIONS):
        request["tools"] = json.loads(tools)
    (answer,) = json.loads(span.attributes[OUTPUT_MESSAGES])
    return ChatTurn(call.agent, request, answer, call.token_ids, len(call.prompt_ids))


def _call_id(span: Span) -> str:
    """Id of the captured call that a span describes, or "".

    An agent may write any value into its spans.
    """
    call_id = span.attributes.get(CALL_ID)
    return call_id if isinstance(call_id, str) else ""


def _checked_list(values: Sequence[str] | None) -> list[str] | None:
    if isinstance(values, str):
        raise QueryError(f"a filter takes a list of values, not {values!r}; write [{values!r}]")
    return None if values is None else list(values)
