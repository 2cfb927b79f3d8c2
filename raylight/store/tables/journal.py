"""The store's state on disk: one SQLite file in the run directory.

Laws:
- The file is the only copy of the state, so that a store that was killed continues where it was, and memory
  does not grow with the run.
- The changes of a transaction are stored completely or not at all.
- Acknowledged changes are committed to the operating system: they survive the death of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raylight._utils.disk import disk_error, disk_errors, find_disk_error
from raylight.errors import DiskError, StoreError

_ADD_TO_COUNTER = "INSERT INTO counts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value"
SCHEMA = Path(__file__).with_name("schema.sql").read_text()
VERSION = 8
"""Version of the schema. A file with another version, or of another program, is refused."""
PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "temp_store = MEMORY",
    "cache_size = -32768",
    "wal_autocheckpoint = 4000",
)
TEMPORARY_PRAGMAS = ("synchronous = OFF", *(pragma for pragma in PRAGMAS if pragma != "synchronous = NORMAL"))
UNSTORABLE = (
    UnicodeEncodeError,
    OverflowError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    sqlite3.IntegrityError,
)
"""Errors of SQLite about values that it cannot store. All its other errors are about the file."""


DISK_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
"""Primary error codes of SQLite that are about the disk."""


class JournalError(StoreError):
    """The file itself failed, and the whole transaction was undone."""


def _is_about_the_disk(error: BaseException) -> bool:
    """True for an error of SQLite that a full, failing or read-only disk causes."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DISK_CODES


class Journal:
    """An open SQLite file with the store's tables.

    Args:
        path: the file; None for a file in a temporary folder, which is removed on close. Nothing waits for
            the disk there, because no other process reads it.
        read_only: open for reading, while another store may be writing.

    Raises:
        StoreError: the file cannot be opened, or is not a journal of this version.
    """

    def __init__(self, path: Path | str | None, read_only: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="raylight-store-") if path is None else None
        self.path = Path(self._folder.name, "store.db") if self._folder else Path(path or "").absolute()
        self._read_only = read_only
        self._resources = contextlib.ExitStack()  # files and connections, closed in reverse order
        self._increments: Counter[str] = Counter()
        """Changes of counters in the current transaction, which are written with its end."""
        self._counts: Counter[str] = Counter()
        """Counters at the end of the last transaction."""
        self._restores: list[Callable[[], None]] = []
        """Callbacks of `on_undo` in the current transaction."""
        if self._folder:
            self._resources.callback(self._folder.cleanup)
        try:
            if read_only and not self.path.exists():
                raise StoreError(f"there is no store at {self.path}; give the path of a run's store.db")
            self.db = self._connect()
            if read_only:
                self.db.execute("PRAGMA query_only = 1")
            else:
                self._lock()
                self._create_tables()
                self._counts.update(dict(self.db.execute("SELECT name, value FROM counts")))
            self.reader = self._connect()
            self.reader.execute("PRAGMA query_only = 1")
            self._inode = self.path.stat().st_ino
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # the last for text in a damaged file
            self.close()
            if find_disk_error(error, self.path.parent) or _is_about_the_disk(error):
                raise disk_error(self.path, error) from None
            is_locked = "locked" in str(error)
            remedy = "close the program that has locked it" if is_locked else "put it on a local disk"
            raise StoreError(f"the store's file {self.path} cannot be used: {error}; {remedy}") from None
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        """Lock the journal for writing until this process ends.

        The lock is on a separate file: closing a second handle of the SQLite file would release SQLite's
        own locks.
        """
        lock = self._resources.enter_context(self._sibling("-lock").open("ab"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"another store has {self.path} open for writing; read it with StoreService(path, "
                "read_only=True)"
            ) from None

    def _sibling(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    @classmethod
    def discard(cls, path: Path) -> None:
        """Remove a journal if it exists.

        Raises:
            StoreError: the file is not a journal, or another process has it open.
        """
        if path.exists():
            journal = cls(path)  # raises StoreError
            journal.close()
            for suffix in ("", "-wal", "-shm", "-lock"):
                journal._sibling(suffix).unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, cached_statements=256, timeout=10
        )
        try:
            self._check(db)
            for pragma in TEMPORARY_PRAGMAS if self._folder else PRAGMAS:
                db.execute(f"PRAGMA {pragma}")
            if db.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                raise sqlite3.OperationalError("its file system does not support a write-ahead log")
        except BaseException:
            db.close()
            raise
        self._resources.callback(db.close)
        return db

    def _check(self, db: sqlite3.Connection) -> None:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise StoreError(
                f"{self.path} was written by another version of raylight (schema {version}, not {VERSION}); "
                "use that version, or another output_dir"
            )
        if version == 0 and db.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise StoreError(f"{self.path} is a database of another program; give the store another file")
        if version == 0 and self._read_only:
            raise StoreError(f"there is no store at {self.path} yet; wait until the run has created it")

    def _create_tables(self) -> None:
        if self.db.execute("PRAGMA user_version").fetchone() == (0,):
            self.db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all changes of the block together, or none if it raises.

        Raises:
            DiskError: the disk is full, read-only or gone; nothing was changed.
            JournalError: the file cannot be written for another reason; nothing was changed.
        """
        self._check_present()
        try:
            self._begin()
            yield
            self.db.executemany(_ADD_TO_COUNTER, self._increments.items())
            self.db.execute("COMMIT")
            self._counts.update(self._increments)
            self._increments.clear()
        except BaseException as error:
            self._undo("ROLLBACK")
            self._restore()
            if isinstance(error, sqlite3.Error):
                raise self._failed(error) from None
            raise

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Within a transaction: undo the changes of the block if it raises."""
        self.execute("SAVEPOINT call")
        increments, n_restores = self._increments.copy(), len(self._restores)
        try:
            yield
        except BaseException:
            self._increments = increments
            self._restore(n_restores)
            self._undo("ROLLBACK TO call")
            self._undo("RELEASE call")
            raise
        self.execute("RELEASE call")

    def restart(self) -> None:
        """Within a transaction: undo its changes so far."""
        self._undo("ROLLBACK")
        self._restore()
        self._begin()

    def on_undo(self, restore: Callable[[], None]) -> None:
        """Within a transaction: call this, which must not raise, if the changes so far are undone."""
        self._restores.append(restore)

    def _restore(self, n_kept: int = 0) -> None:
        """Call the callbacks of undone changes, last first; `n_kept` belong to changes that stay."""
        while len(self._restores) > n_kept:
            self._restores.pop()()

    def _begin(self) -> None:
        self._increments.clear()
        self._restores.clear()
        self.db.execute("BEGIN IMMEDIATE")

    def _undo(self, statement: str) -> None:
        """Undo changes. SQLite may have undone them by itself, for example when the disk was full."""
        with contextlib.suppress(sqlite3.Error):
            self.db.execute(statement)

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        """Run an SQL statement.

        Raises:
            StoreError: a value cannot be stored, or the statement is wrong.
            DiskError: the disk is full, read-only or gone; the whole transaction was undone.
            JournalError: the file cannot be read or written for another reason; likewise.
        """
        try:
            return self.db.execute(statement, values)
        except UNSTORABLE as error:
            raise StoreError(
                f"a value cannot be stored: {error}; pass Unicode text and integers of up to 64 bits"
            ) from None
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # the statement is wrong, not the file
                raise StoreError(f"the store cannot execute this statement: {error}") from None
            raise self._failed(error) from None

    def _failed(self, error: sqlite3.Error) -> StoreError:
        if _is_about_the_disk(error):
            return disk_error(self.path, error)
        return JournalError(
            f"the store's file {self.path} cannot be used: {error}; nothing was changed. Check its disk"
        )

    def _check_present(self) -> None:
        """Raise a DiskError if the file was removed; SQLite would write to the removed file without an
        error."""
        try:
            is_present = self.path.stat().st_ino == self._inode
        except OSError:
            is_present = False
        if not is_present:
            raise DiskError(
                f"the store's file {self.path} was removed or replaced during the run, and with it what was "
                "recorded; start the run again"
            )

    def fetch_one(self, statement: str, values: object = ()) -> tuple[Any, ...] | None:
        """Run an SQL statement; returns its first row, or None."""
        return self.execute(statement, values).fetchone()

    def increment(self, name: str, by: Any = 1) -> None:
        """Add to a counter."""
        if by:
            self._increments[name] += by

    def counter(self, name: str) -> int:
        """Value of a counter; 0 if it was never incremented."""
        return self._counts[name] + self._increments[name]

    def sync(self) -> None:
        """Flush all commits to the disk. SQLite leaves the newest to the operating system, which keeps them
        when this process is killed, and loses them with the power.

        Raises:
            DiskError: the disk is full, read-only or gone.
        """
        if self._folder:
            return
        # SQLite locks the other files, whose second handle would release its locks when it is closed
        log = self._sibling("-wal")
        with disk_errors(self.path), contextlib.suppress(FileNotFoundError), log.open("rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the file and release the lock."""
        self._resources.close()
