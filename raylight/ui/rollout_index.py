"""Index of a run's rollouts, for lists, filters, order and full-text search.

The index is a SQLite file that follows the run's store. A rollout enters it in two passes: its line (status,
reward, tokens) at once, its texts and the age of its tokens once it is decided.

Laws:
- The store is only read. An index of another store, or of another version of this module, is built again.
- `refresh` takes a bounded time, so that a server answers in between, until `is_complete`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from raylight._utils.printable import encodable
from raylight.errors import QueryError
from raylight.store.overview import RolloutLine, RolloutOverview
from raylight.types import JsonObject, StepGroups

INDEX_FILE = "ui-index.db"
LINES_PER_BATCH = 1_000
TEXTS_PER_BATCH = 50
MAX_TEXT = 20_000
"""Characters of a rollout's messages that are searched: the first and the last half."""
TASK_CHARS = 200
"""Characters of a task that a card has."""
MARK_START, MARK_END = "\ue000", "\ue001"
"""Marks of a match in a snippet."""
SORTS = ("position", "reward", "tokens", "calls", "age", "seconds", "step")
VERSION = 3
MAX_TASK = 2_000
"""Characters of a task that are searched."""
_TRAIN_ID = re.compile(r"^(?P<lineage>.*)-train-(?P<group>\d+)-\w+$")
_VAL_ID = re.compile(r"^(?P<lineage>.*)-val-(?P<step>\d+)-\d+-\d+$")
SCHEMA = """
CREATE TABLE meta (store TEXT NOT NULL, span INTEGER);
CREATE TABLE rollouts (
    position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, attempt TEXT, mode TEXT, step INTEGER,
    lineage TEXT, number INTEGER, group_id TEXT, status TEXT NOT NULL, reward REAL, tokens INTEGER,
    calls INTEGER, version INTEGER, seconds REAL, started REAL, kind TEXT, error TEXT,
    task TEXT NOT NULL, task_key TEXT NOT NULL, has_texts INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX rollouts_group ON rollouts(group_id);
CREATE INDEX rollouts_step ON rollouts(step);
CREATE INDEX rollouts_task ON rollouts(task_key);
CREATE INDEX rollouts_number ON rollouts(lineage, number);
CREATE INDEX rollouts_waiting ON rollouts(has_texts, position) WHERE has_texts = 0;
CREATE INDEX rollouts_reward ON rollouts(reward, position);
CREATE INDEX rollouts_tokens ON rollouts(tokens, position);
CREATE INDEX rollouts_seconds ON rollouts(seconds, position);
CREATE TABLE versions (step INTEGER PRIMARY KEY, version INTEGER NOT NULL);
CREATE VIEW cards AS SELECT r.*, iif(r.mode = 'train', v.version - r.version, NULL) AS age FROM rollouts r
    LEFT JOIN versions v ON v.step = r.step;
CREATE VIRTUAL TABLE texts USING fts5(task, messages, error, tokenize = 'unicode61');
"""
"""`span` is the store's last one at a refresh; `number` is the number of a training group; `seconds` is NULL
until the rollout is decided; `version` is the oldest one that sampled a token of a rollout, and the learners'
before the update of a step."""
_FIELDS = (
    "position, id, attempt, mode, step, lineage, number, group_id, status, reward, tokens, calls, seconds, "
    "started, kind, error, task, task_key"
)
_UPDATED = ("attempt", "status", "reward", "tokens", "calls", "seconds", "started", "kind", "error")
UPSERT = (
    f"INSERT INTO rollouts ({_FIELDS}) VALUES ({', '.join('?' * len(_FIELDS.split(', ')))}) ON CONFLICT "
    f"(position) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _UPDATED)}, has_texts = 0"
)


class RolloutIndex:
    """Index of the rollouts of one store. All methods may be called from any thread.

    Args:
        store: the run's store.
        folder: folder of the index; a temporary one if it cannot be written.
    """

    def __init__(self, store: Path, folder: Path) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._overview = RolloutOverview(store)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._db = self._open(folder)
        self._seen_version = -1
        self._known_steps: set[tuple[str, int]] = set()
        self._versions: dict[int, int] = {}
        self._lines_complete = self._texts_complete = False

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._overview.close()
            if self._temporary is not None:
                self._temporary.cleanup()

    @property
    def is_complete(self) -> bool:
        """True if the index has all that the store had at the last refresh."""
        return self._lines_complete and self._texts_complete

    def refresh(self, versions: Mapping[int, int], seconds: float = 0.25) -> None:
        """Read what is new in the store, for about so many seconds.

        Args:
            versions: weight version of the learners before the update of each step, for the age of tokens.
        """
        end = time.monotonic() + seconds
        with self._lock:
            steps = self._overview.steps()  # before the lines, so that the lines have their rollouts
            version = self._overview.data_version()
            if version != self._seen_version:
                self._seen_version, self._lines_complete, self._texts_complete = version, False, False
                self._refresh_known()
            while time.monotonic() < end and not self._lines_complete:
                self._add_lines()
            self._add_steps(versions, steps)
            while time.monotonic() < end and self._lines_complete and not self._texts_complete:
                self._add_texts()

    def counts(self) -> dict[str, int]:
        """Return the numbers of rollouts in the store (`known`), in the index (`lines`), of decided ones
        (`decided`), and of those that can be searched (`indexed`)."""
        with self._lock:
            lines, decided, indexed = self._db.execute(
                "SELECT COUNT(*), COUNT(seconds), COALESCE(SUM(has_texts = 1), 0) FROM rollouts"
            ).fetchone()
            return {"known": self._overview.count(), "lines": lines, "decided": decided, "indexed": indexed}

    # queries

    def find(
        self,
        filters: Mapping[str, object],
        *,
        sort: str = "position",
        order: str = "asc",
        limit: int = 100,
        offset: int = 0,
    ) -> tuple[int, list[JsonObject]]:
        """Return the number of rollouts that match, and a page of their cards.

        Args:
            filters: values of `mode`, `status`, `step`, `group`, `failure`, `min_reward`, `max_reward`, and
                `q`, a query of FTS5 (https://sqlite.org/fts5.html#full_text_query_syntax).

        Raises:
            QueryError: a value is out of range, or `q` is not a query.
        """
        if sort not in SORTS or order not in ("asc", "desc"):
            raise QueryError(
                f"cannot sort by {sort!r} {order!r}; choose one of {', '.join(SORTS)}, asc or desc"
            )
        where, values = _where(filters)
        source = _SEARCHED if filters.get("q") else "cards r"
        snippet = _SNIPPET if filters.get("q") else "NULL"
        by = (
            "" if sort == "position" else f"r.{sort} IS NULL, r.{sort} {order}, "
        )  # positions need no sorting
        with self._lock, _query_errors(filters):
            (total,) = self._db.execute(f"SELECT COUNT(*) FROM {source}{where}", values).fetchone()
            rows = self._db.execute(
                f"SELECT {_CARD}, {snippet} AS snippet FROM {source}{where} ORDER BY {by}r.position {order} "
                "LIMIT ? OFFSET ?",
                (*values, limit, offset),
            ).fetchall()
        return total, list(map(_card, rows))

    def points(self, filters: Mapping[str, object], limit: int) -> tuple[int, dict[str, list[object]]]:
        """Return the number of rollouts that match, and columns of at most about `limit` of them, evenly
        sampled.

        Raises:
            QueryError: as for `find`.
        """
        names = ("id", "mode", "reward", "tokens", "age", "step", "status")
        where, values = _where(filters)
        source = _SEARCHED if filters.get("q") else "cards r"
        with self._lock, _query_errors(filters):
            (total,) = self._db.execute(f"SELECT COUNT(*) FROM {source}{where}", values).fetchone()
            every = max(-(-total // limit), 1)
            chosen = ", ".join(f"r.{name}" for name in names)
            rows = self._db.execute(
                f"SELECT * FROM (SELECT {chosen}, row_number() OVER (ORDER BY r.position) AS nth FROM "
                f"{source}{where}) WHERE nth % ? = 0 ORDER BY nth",
                (*values, every),
            ).fetchall()
        return total, {name: [row[name] for row in rows] for name in names}

    def failures(self, limit: int = 100) -> list[JsonObject]:
        """Return the errors of the rollouts, the most frequent first, each with the last rollout that had
        it."""
        with self._lock:
            rows = self._db.execute(
                "SELECT kind, error, COUNT(*) AS rollouts, id AS last, MAX(position) AS position FROM "
                "rollouts WHERE kind IS NOT NULL GROUP BY kind, error ORDER BY COUNT(*) DESC, "
                "MAX(position) DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return [{name: row[name] for name in ("kind", "error", "rollouts", "last")} for row in rows]

    def card(self, rollout_id: str) -> JsonObject | None:
        """Return the card of a rollout; None if the index does not have it."""
        with self._lock:
            row = self._db.execute(
                f"SELECT {_CARD}, NULL AS snippet FROM cards r WHERE r.id = ?", (rollout_id,)
            ).fetchone()
        return None if row is None else _card(row)

    def neighbours(self, position: int) -> tuple[str | None, str | None]:
        """Return the ids of the rollouts before and after a position."""
        with self._lock:
            return tuple(
                self._db.execute(
                    "SELECT (SELECT id FROM rollouts WHERE position < ?1 ORDER BY position DESC LIMIT 1), "
                    "(SELECT id FROM rollouts WHERE position > ?1 ORDER BY position LIMIT 1)",
                    (position,),
                ).fetchone()
            )

    def same_task(self, group_id: str, limit: int = 200) -> list[JsonObject]:
        """Return the groups of an equal task, this one included, in the order of their first rollouts."""
        with self._lock:
            rows = self._db.execute(
                "SELECT group_id AS 'group', MAX(step) AS step, MAX(mode) AS mode, AVG(reward) AS "
                "reward_mean, COUNT(*) AS rollouts FROM rollouts WHERE task_key = (SELECT task_key FROM "
                "rollouts WHERE group_id = ? LIMIT 1) AND group_id IS NOT NULL GROUP BY group_id ORDER BY "
                "MIN(position) LIMIT ?",
                (group_id, limit),
            ).fetchall()
        return list(map(dict, rows))

    # building

    def _open(self, folder: Path) -> sqlite3.Connection:
        try:
            return open_index(folder / INDEX_FILE, self._store)
        except (sqlite3.Error, OSError):  # a read-only folder, or a damaged index
            self._temporary = tempfile.TemporaryDirectory(prefix="raylight-ui-")
            return open_index(Path(self._temporary.name) / INDEX_FILE, self._store)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _refresh_known(self) -> None:
        """Read the rollouts again that are, or were, not decided, or have a new grade."""
        (seen,), span = self._db.execute("SELECT span FROM meta").fetchone(), self._overview.last_span()
        known = self._db.execute("SELECT position FROM rollouts WHERE seconds IS NULL")
        positions = {position for (position,) in known}
        last = self._last_position()
        changed = [*self._overview.undecided(), *self._overview.graded_since(seen)]
        positions |= {position for position in changed if position <= last}
        for batch in _batches(sorted(positions), LINES_PER_BATCH):
            self._write(self._overview.lines_at(batch))
        self._db.execute("UPDATE meta SET span = ?", (span,))

    def _add_lines(self) -> None:
        lines = self._overview.lines_after(self._last_position(), LINES_PER_BATCH)
        self._lines_complete = len(lines) < LINES_PER_BATCH
        self._write(lines)

    def _last_position(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(position), 0) FROM rollouts").fetchone()[0])

    def _write(self, lines: Sequence[RolloutLine]) -> None:
        with self._transaction():
            self._db.executemany(UPSERT, map(index_row, lines))

    def _add_steps(self, versions: Mapping[int, int], steps: list[tuple[str, int, StepGroups]]) -> None:
        """Enter the steps that took the groups of the rollouts."""
        if versions != self._versions:
            with self._transaction():
                self._db.executemany("INSERT OR REPLACE INTO versions VALUES (?, ?)", versions.items())
            self._versions = dict(versions)
        if len(steps) == len(self._known_steps):
            return
        with self._transaction():
            for lineage, step, groups in steps:
                if (lineage, step) in self._known_steps:
                    continue
                self._db.execute(
                    "UPDATE rollouts SET step = :step WHERE lineage = :lineage AND number IN (SELECT value "
                    "FROM json_each(:numbers)) AND step IS NOT :step",
                    {"step": step, "lineage": lineage, "numbers": json.dumps(groups.all)},
                )
        if self._lines_complete:
            self._known_steps = {(lineage, step) for lineage, step, _ in steps}

    def _add_texts(self) -> None:
        waiting = self._db.execute(
            "SELECT position, attempt, task, error FROM rollouts WHERE has_texts = 0 AND seconds IS NOT NULL "
            "ORDER BY position LIMIT ?",
            (TEXTS_PER_BATCH,),
        ).fetchall()
        self._texts_complete = len(waiting) < TEXTS_PER_BATCH
        with self._transaction():
            for position, attempt, task, error in waiting:
                content = self._overview.texts(attempt) if attempt else None
                messages = encodable("\n\n".join(content.messages)) if content else ""
                oldest = content.oldest_version if content else None
                if len(messages) > MAX_TEXT:
                    messages = f"{messages[: MAX_TEXT // 2]}\n...\n{messages[-MAX_TEXT // 2 :]}"
                self._db.execute("DELETE FROM texts WHERE rowid = ?", (position,))
                self._db.execute(
                    "INSERT INTO texts (rowid, task, messages, error) VALUES (?, ?, ?, ?)",
                    (position, task, messages, error or ""),
                )
                self._db.execute(
                    "UPDATE rollouts SET has_texts = 1, version = ? WHERE position = ?", (oldest, position)
                )


_CARD = (
    "r.id, r.position, r.mode, r.step, r.group_id AS 'group', r.status, r.reward, r.tokens, r.calls, r.age, "
    f"r.seconds, r.started, r.kind, r.error, substr(r.task, 1, {TASK_CHARS}) AS task"
)
_SEARCHED = "texts JOIN cards r ON r.position = texts.rowid"
_SNIPPET = f"snippet(texts, -1, '{MARK_START}', '{MARK_END}', '…', 24)"


def _card(row: sqlite3.Row) -> JsonObject:
    card = dict(row)
    kind, error = card.pop("kind"), card.pop("error")
    return card | {"failure": {"kind": kind, "error": error} if kind else None}


def _where(filters: Mapping[str, object]) -> tuple[str, list[object]]:
    """Return a `WHERE` clause and its values."""
    conditions: list[str] = []
    values: list[object] = []
    columns = {
        "mode": "r.mode = ?",
        "status": "r.status = ?",
        "step": "r.step = ?",
        "group": "r.group_id = ?",
        "failure": "r.kind = ?",
        "min_reward": "r.reward >= ?",
        "max_reward": "r.reward <= ?",
        "q": "texts MATCH ?",
    }
    for name, value in filters.items():
        if value not in (None, ""):
            conditions.append(columns[name])
            values.append(value)
    return (f" WHERE {' AND '.join(conditions)}" if conditions else ""), values


@contextlib.contextmanager
def _query_errors(filters: Mapping[str, object]) -> Iterator[None]:
    """Turn an error in a search query into a QueryError."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if not filters.get("q"):
            raise
        raise QueryError(
            f"the search {filters['q']!r} is not a query: {error}; put words with punctuation into double "
            "quotes"
        ) from None


def _batches(items: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def open_index(file: Path, store: Path) -> sqlite3.Connection:
    """Open the index of a store, or create one.

    Raises:
        sqlite3.Error, OSError: it cannot be written.
    """
    stat = store.stat()
    identity = json.dumps([VERSION, str(store.absolute()), stat.st_dev, stat.st_ino])
    for _ in range(2):
        db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")  # it can be built again
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
                db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
                db.execute("INSERT INTO meta VALUES (?, NULL)", (identity,))
            if db.execute("SELECT store FROM meta").fetchone()[0] == identity:
                return db
        except BaseException:
            db.close()
            raise
        db.close()
        for suffix in ("", "-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
    raise sqlite3.OperationalError(f"{file} cannot be created")


def index_row(line: RolloutLine) -> tuple[object, ...]:
    """Return the values of `_FIELDS`."""
    asked = line.task
    task = encodable(asked if isinstance(asked, str) else json.dumps(asked, default=repr, ensure_ascii=False))
    trained, evaluated = _TRAIN_ID.match(line.rollout_id), _VAL_ID.match(line.rollout_id)
    found = trained or evaluated
    seconds = None
    if line.is_decided:
        begun = line.enqueued if line.started is None else line.started
        seconds = max((line.ended or begun) - begun, 0.0)
    return (
        line.position,
        line.rollout_id,
        line.attempt_id,
        line.mode,
        int(evaluated["step"]) if evaluated else None,
        found["lineage"] if found else None,
        int(trained["group"]) if trained else None,
        line.group,
        line.status,
        line.reward,
        line.tokens,
        line.calls,
        seconds,
        line.started,
        line.failure.kind if line.failure else None,
        line.failure.error if line.failure else None,
        task[:MAX_TASK],
        hashlib.blake2b(task.encode(), digest_size=8).hexdigest(),
    )
