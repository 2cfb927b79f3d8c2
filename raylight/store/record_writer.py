"""Half of the store's client that records spans and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raylight.store.call_batcher import Channel
from raylight.store.call_deltas import CallDeltas
from raylight.store.rows import span_row
from raylight.types import CallKey, Generation, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from raylight.store.budgets import Allowance


class RecordWriter:
    """Recording of spans and of calls to the engine."""

    _channel: Channel
    _announcements: Channel
    """Separate channel for calls that begin: their response waits for it, and must not wait for the records
    of earlier calls."""
    _deltas: CallDeltas

    async def add_span(self, span: Span) -> Span | None:
        """Store a span, and assign a sequence id if it has none; None if it is stored already.

        It counts as activity of its attempt.
        """
        (sequence_id,) = await self._channel.call("add_spans", [span_row(span)])
        return None if sequence_id is None else span.model_copy(update={"sequence_id": sequence_id})

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans, all or none; returns those that were not stored before."""
        sequence_ids = await self._channel.call("add_spans", [span_row(span) for span in spans])
        return [
            span.model_copy(update={"sequence_id": sequence_id})
            for span, sequence_id in zip(spans, sequence_ids, strict=True)
            if sequence_id is not None
        ]

    async def grade(self, spans: Sequence[Span]) -> None:
        """Store spans of a group reward for decided attempts, all or none.

        Their rewards count, unlike those of other spans that come after the decision. An attempt that has a
        grade keeps it, unless that has no reward.
        """
        await self._channel.call("grade", [span_row(span) for span in spans])

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Store a span of the OpenTelemetry SDK; None if it is stored already."""
        return await self.add_span(
            Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0)
        )

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Reserve a sequence id for a span of the attempt; ids only grow."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        """Reserve a sequence id for a span of each attempt, or of the "latest". One listed twice gets two."""
        return await self._channel.call("next_sequence_ids", [tuple(ids) for ids in rollout_attempt_ids])

    async def capture(
        self,
        opened: Sequence[tuple[CallKey, float]],
        closed: Sequence[tuple[CallKey, Generation | None, Span | None]],
        recorder: str = "",
    ) -> list[CallKey]:
        """Record that calls to the engine began (each with its time) and ended (each with its generation and
        its span).

        Returns the calls that must not begin, because their attempt is decided or unknown.

        Args:
            recorder: name of the replica that will record the end of the calls that begin; see
                `lose_recorder`.
        """
        opened_rows = [
            (key.rollout_id, key.attempt_id, key.call_id, start, recorder, key.request)
            for key, start in opened
        ]
        channel = self._announcements if opened and not closed else self._channel
        try:
            closed_rows = [self._deltas.encode(*call) for call in closed]
            rejected, without_base, ignored = await channel.call("capture", opened_rows, closed_rows)
            self._deltas.forget(attempt_id for _, attempt_id, _ in ignored)
            if without_base:
                missing = {CallKey(*ids) for ids in without_base}
                complete = [self._deltas.encode_completely(*call) for call in closed if call[0] in missing]
                await channel.call("capture", [], complete)
        except BaseException:  # it is not known which calls the store has
            self._deltas.forget(key.attempt_id for key, *_ in closed)
            raise
        return [CallKey(*ids) for ids in rejected]

    async def check_budgets(
        self, rollout_id: str, attempt_id: str, unrecorded: Mapping[str, int]
    ) -> Allowance:
        """Return the budget that an attempt has spent, the tokens that are left, and those of the given calls
        that are recorded; see `Budgets.check`."""
        return await self._announcements.call("check_budgets", rollout_id, attempt_id, dict(unrecorded))

    async def lose_recorder(self, recorder: str) -> None:
        """Stop waiting for the records of a recorder that is gone.

        An attempt with a call whose end it did not record cannot succeed, and fails without waiting. A call
        that the agent retried elsewhere is dropped: the agent never received the first response.
        """
        await self._channel.call("lose_recorder", recorder)
