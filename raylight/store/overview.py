"""Overview of the rollouts in a store's file: one short row for each, for lists of hundreds of thousands.

It reads the file directly, in the calling thread, even while a run writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from raylight.semconv import GRADE_SPAN_ID, INPUT_MESSAGES, OUTPUT_MESSAGES
from raylight.store.call_rows import call_versions
from raylight.store.payloads import decode_payload
from raylight.store.rows import (
    LATEST,
    REWARD_SPAN,
    SPAN,
    SharedTexts,
    failure_from_json,
    step_groups_from_json,
)
from raylight.store.tables.journal import Journal
from raylight.types import FINISHED, Failure, StepGroups
from raylight.types.chat_messages import reasoning_of

_COLUMNS = (
    "r.position, r.rollout_id, r.status, r.mode, r.group_id, r.start_time, a.attempt_id, a.start_time, "
    f"r.end_time, a.failure, (SELECT reward FROM spans WHERE rowid = {REWARD_SPAN}), "
    "(SELECT t.tokens FROM sampled t WHERE t.rollout_id = r.rollout_id AND t.attempt_id = a.attempt_id), "
    "(SELECT COUNT(*) FROM calls c WHERE c.attempt_id = a.attempt_id), r.input"
)
_FINISHED = ", ".join(f"'{status}'" for status in sorted(FINISHED))


class RolloutLine(NamedTuple):
    """A rollout with what its latest attempt recorded, in short."""

    position: int
    """Position in the order of enqueueing."""
    rollout_id: str
    status: str
    mode: str | None
    group_id: str | None
    enqueued: float
    """Seconds since the epoch, as the following."""
    attempt_id: str | None
    started: float | None
    ended: float | None
    failure: Failure | None
    reward: float | None
    tokens: int | None
    """Sampled tokens; None before the rollout is decided."""
    calls: int
    task: Any
    """The rollout's input."""

    @property
    def is_decided(self) -> bool:
        return self.status in FINISHED

    @property
    def group(self) -> str | None:
        """Result of `group_name`."""
        return group_name(self.rollout_id, self.group_id)


def group_name(rollout_id: str, group_id: str | None) -> str | None:
    """Return the name of a rollout's group, with the lineage of the run before it.

    A run that was resumed with other settings has used ids of groups again, for other tasks. The ids of its
    rollouts are LINEAGE-GROUP-SAMPLE.
    """
    lineage, found, _ = rollout_id.rpartition(f"-{group_id}-")
    return f"{lineage}-{group_id}" if found else group_id


class AttemptTexts(NamedTuple):
    """Messages of an attempt's calls, and the weights that sampled them."""

    messages: list[str]
    """Each distinct message of requests and answers, in the order of its first call."""
    oldest_version: int | None
    """Oldest weight version that sampled a token; None without tokens."""


class RolloutOverview:
    """Short rows of a store's rollouts.

    Args:
        path: the store's file.

    Raises:
        StoreError: the store does not exist, or has another version.
    """

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path, read_only=True)
        self._db = self._journal.reader

    def close(self) -> None:
        self._journal.close()

    def data_version(self) -> int:
        """Return a number that changes with every commit of another process."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def count(self) -> int:
        """Return the number of rollouts in the store."""
        return int(self._db.execute("SELECT COALESCE(MAX(position), 0) FROM rollouts").fetchone()[0])

    def lines_after(self, position: int, limit: int) -> list[RolloutLine]:
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM {LATEST} WHERE r.position > ? ORDER BY r.position LIMIT ?",
            (position, limit),
        )
        return list(map(_line, rows))

    def lines_at(self, positions: Sequence[int]) -> list[RolloutLine]:
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM {LATEST} WHERE r.position IN (SELECT value FROM json_each(?))",
            (json.dumps(list(positions)),),
        )
        return list(map(_line, rows))

    def undecided(self) -> list[int]:
        """Return the positions of the rollouts that are not decided."""
        statement = f"SELECT position FROM rollouts WHERE status NOT IN ({_FINISHED})"
        return [position for (position,) in self._db.execute(statement)]

    def last_span(self) -> int:
        """Return the row of the span that was stored last; 0 without any."""
        return int(self._db.execute("SELECT COALESCE(MAX(rowid), 0) FROM spans").fetchone()[0])

    def graded_since(self, span: int | None) -> list[int]:
        """Return the positions of the rollouts whose grade was stored with or after a span; none for None."""
        statement = (
            "SELECT r.position FROM spans s JOIN rollouts r ON r.rollout_id = s.rollout_id WHERE s.rowid >= "
            "? AND s.span_id = ?"
        )
        return [position for (position,) in self._db.execute(statement, (span, GRADE_SPAN_ID))]

    def steps(self) -> list[tuple[str, int, StepGroups]]:
        """Return lineage, number and groups of all training steps."""
        rows = self._db.execute("SELECT lineage, step, groups FROM steps ORDER BY lineage, step")
        return [(lineage, step, step_groups_from_json(groups)) for lineage, step, groups in rows]

    def texts(self, attempt_id: str) -> AttemptTexts:
        """Return the messages of an attempt and the oldest version that sampled in it."""
        spans = self._db.execute(f"SELECT {SPAN} FROM spans WHERE attempt_id = ?", (attempt_id,)).fetchall()
        complete = SharedTexts(spans)
        messages: dict[str, None] = {}
        for row in spans:
            attributes = complete.body(row).get("attributes", {})
            for name in (INPUT_MESSAGES, OUTPUT_MESSAGES):
                messages |= dict.fromkeys(_texts(attributes.get(name)))
        calls = self._db.execute(
            "SELECT generation FROM calls WHERE attempt_id = ? AND generation IS NOT NULL", (attempt_id,)
        )
        versions = [
            oldest for (call,) in calls if (oldest := min(call_versions(call), default=None)) is not None
        ]
        return AttemptTexts(list(messages), min(versions, default=None))

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads of the block see the same state."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")


def _line(row: tuple[Any, ...]) -> RolloutLine:
    *values, failure, reward, tokens, calls, task = row
    return RolloutLine._make(
        (*values, failure_from_json(failure), reward, tokens, calls, decode_payload(task))
    )


def _texts(messages: object) -> Iterator[str]:
    """Yield the text of each message in a JSON list."""
    if not isinstance(messages, str):
        return
    for message in json.loads(messages):
        if text := message_text(message):
            yield text


def message_text(message: object) -> str:
    """Return the text of a message: its content, its reasoning and its tool calls."""
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts.insert(0, reasoning_of(message))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        texts.append(f"{function.get('name')}({function.get('arguments')})")
    return "\n".join(text for text in texts if isinstance(text, str) and text)
