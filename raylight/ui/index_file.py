"""The file of a search index: its tables, and the row of a rollout."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

from raylight.store.overview import RolloutLine

VERSION = 2
MAX_TASK = 2_000
"""Characters of a task that are searched."""
_TRAIN_ID = re.compile(r"^(?P<lineage>.*)-train-(?P<group>\d+)-\w+$")
_VAL_ID = re.compile(r"^(?P<lineage>.*)-val-(?P<step>\d+)-\d+-\d+$")
SCHEMA = """
CREATE TABLE meta (store TEXT NOT NULL);
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
"""`number` is the number of a training group; `seconds` is NULL until the rollout is decided; `version` is
the oldest one that sampled a token of a rollout, and that of the learners before the update of a step."""
_FIELDS = (
    "position, id, attempt, mode, step, lineage, number, group_id, status, reward, tokens, calls, seconds, "
    "started, kind, error, task, task_key"
)
_UPDATED = ("attempt", "status", "reward", "tokens", "calls", "seconds", "started", "kind", "error")
UPSERT = (
    f"INSERT INTO rollouts ({_FIELDS}) VALUES ({', '.join('?' * len(_FIELDS.split(', ')))}) ON CONFLICT "
    f"(position) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _UPDATED)}, has_texts = 0"
)


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
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")  # it can be built again
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
                db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
                db.execute("INSERT INTO meta VALUES (?)", (identity,))
            if db.execute("SELECT store FROM meta").fetchone() == (identity,):
                return db
        except BaseException:
            db.close()
            raise
        db.close()
        for suffix in ("", "-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
    raise sqlite3.OperationalError(f"{file} cannot be created")


def index_row(line: RolloutLine) -> tuple[Any, ...]:
    """Return the values of `_FIELDS`."""
    task = (
        line.task if isinstance(line.task, str) else json.dumps(line.task, default=repr, ensure_ascii=False)
    )
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
        hashlib.blake2b(task.encode(errors="surrogatepass"), digest_size=8).hexdigest(),
    )
