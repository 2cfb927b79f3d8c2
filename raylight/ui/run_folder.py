"""The directory of a run, even while the run writes it.

An open run has an index of its rollouts and a reading client of its store.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG
from typing import Any

import psutil

from raylight._utils.aio import pause
from raylight._utils.bounds import ENDLESS
from raylight._utils.files import read_bounded
from raylight.advisories import Advisor
from raylight.errors import ConfigError, StoreError
from raylight.experience.batches.token_records import TokenRecords
from raylight.experience.trajectories.row_rules import RowRules, algorithm_settings
from raylight.experience.trajectories.staleness import StaleMask
from raylight.store.reading import StoreReader
from raylight.store.service import StoreService
from raylight.trainer.output.loggers import Metrics
from raylight.trainer.output.loggers.protocol import VAL_STEP
from raylight.trainer.output.loggers.run_files import METRICS_FILE
from raylight.trainer.output.run_records import read_config
from raylight.trainer.output.stored_rollouts import STORE_FILES
from raylight.trainer.spec.resume import flatten
from raylight.types import JsonObject
from raylight.ui.rollout_index import RolloutIndex

logger = logging.getLogger(__name__)

LOCKS = Path("/proc/locks")
"""Linux's list of locked files."""
MAX_RUNS = 500
"""Run directories that are looked for in a folder."""
QUIET_S = 120.0
"""Seconds without a change after which a run on another machine counts as stopped."""
SPARK_POINTS = 60
MAX_PART, MAX_JSON = 64 * 1024 * 1024, 16 * 1024 * 1024
"""Bytes of `metrics.jsonl` that are read at once, and the largest other file of JSON."""
CARD = (
    *("agent", "model", "algorithm", "seconds", "step", "total_steps", "train_reward", "val_reward"),
    *("best", "rollouts", "rollouts_failed"),
)
"""Parts of a card that a damaged run does not have."""
HIDDEN = ("api_key", "password", "secret")
"""Ends of the names of settings that are never shown."""


class MetricTable:
    """The rows of `metrics.jsonl`, read as they are appended."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._inode = 0
        self._lock = threading.Lock()
        self.rows: list[Metrics] = []
        self.advisor = Advisor()
        """It has judged all rows."""

    def refresh(self) -> int:
        """Read new rows; return the number of rows that were known before and still hold. A file that was
        written again, by a resumed run, is read from its start."""
        with self._lock:  # requests read in threads
            return self._refresh()

    def _refresh(self) -> int:
        try:
            stat = self._file.stat()
        except OSError:
            return len(self.rows)
        if not S_ISREG(stat.st_mode):
            return len(self.rows)
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._inode, self._offset = stat.st_ino, 0
            self.rows.clear()
            self.advisor = Advisor()
        known = len(self.rows)
        if stat.st_size > self._offset:
            with self._file.open("rb") as file:
                file.seek(self._offset)
                part = file.read(MAX_PART)
            complete, _, _ = part.rpartition(b"\n")
            if not complete and len(part) == MAX_PART:  # no line of a run is so long
                self._offset += MAX_PART
            if complete:
                new = [row for row in map(_row, complete.split(b"\n")) if row is not None]
                self._offset += len(complete) + 1
                self.rows += new
                for row in new:
                    self.advisor.add(row)
        return known

    def columns(self, names: Iterable[str] | None = None, start: int = 0) -> dict[str, list[float | None]]:
        """Return rows as columns, with None for a value that is absent or not finite.

        Args:
            names: metrics; all by default.
            start: first row.
        """
        rows = self.rows[start:]
        wanted = list(names) if names is not None else self.names()
        columns = dict.fromkeys(["step", VAL_STEP, *wanted])
        return {name: [_finite(row.get(name)) for row in rows] for name in columns}

    def names(self) -> list[str]:
        return sorted({name for row in self.rows for name in row} - {"step"})

    def versions(self) -> dict[int, int]:
        """Return the weight version of the learners before the update of each step."""
        return {
            int(row["step"]): int(row["weights/version"]) - 1
            for row in self.rows
            if _finite(row.get("weights/version")) is not None
        }


class RunFolder:
    """A run's directory.

    Args:
        path: the directory.
        name: name of the run in addresses.

    Raises:
        ConfigError: the directory is not one of a run.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.metrics = MetricTable(path / METRICS_FILE)
        self._config: tuple[float, JsonObject] = (-1.0, {})
        self._is_damaged = False
        if not is_run(path):
            raise ConfigError(
                f"{path} is not a run: it has neither config.yaml nor {' nor '.join(STORE_FILES)}; give a "
                "run directory, or a folder of run directories"
            )

    @property
    def store(self) -> Path | None:
        """The file of the run's store; None if it has none yet."""
        path = self.section("store").get("path")
        named = [Path(path)] if isinstance(path, str) else []
        return next(
            (file for file in [*named, *(self.path / n for n in STORE_FILES)] if file.is_file()), None
        )

    def config(self) -> JsonObject:
        """Return the content of `config.yaml`; the former one while it is being written."""
        modified = _modified(self.path / "config.yaml")
        if modified != self._config[0]:
            content = read_config(self.path)
            self._config = (modified, self._config[1] if content is None else content)
        return self._config[1]

    def section(self, name: str) -> JsonObject:
        """Return a part of `config.yaml`; empty if it does not have it."""
        content = self.config().get(name)
        return content if isinstance(content, dict) else {}

    def settings(self) -> JsonObject:
        """Return the settings by dotted name. Keys and passwords are hidden."""
        return {
            name: "***" if value is not None and name.lower().endswith(HIDDEN) else value
            for name, value in flatten(self.config()).items()
        }

    def summary(self) -> JsonObject | None:
        """Return the content of `summary.json`; None while the run goes on, or if it did not end well."""
        return _json_file(self.path / "summary.json")

    def evaluation(self) -> JsonObject | None:
        """Return the content of `eval.json`; None if the run is not an evaluation."""
        return _json_file(self.path / "eval.json")

    def status(self) -> str:
        """Return "running", "finished" or "stopped"."""
        store = self.store
        if store is not None and _is_locked(store.with_name(store.name + "-lock")):
            return "running"
        if self.summary() is not None or self.evaluation() is not None:
            return "finished"
        return "running" if time.time() - self._updated() < QUIET_S else "stopped"

    def _updated(self) -> float:
        files = [self.path / METRICS_FILE, self.path / "config.yaml"]
        if (store := self.store) is not None:
            files += [store, store.with_name(store.name + "-wal")]
        return max(map(_modified, files))

    def card(self) -> JsonObject:
        """Return the run as an entry of the list of runs; of a damaged run the entry is almost empty."""
        try:
            return self._card()
        except Exception as error:  # of any kind: the other runs are shown
            if not self._is_damaged:
                logger.warning("the run in %s is damaged", self.path, exc_info=error)
            self._is_damaged = True
            return dict.fromkeys(CARD) | {
                "id": self.name,
                "path": valid_text(self.path),
                "kind": "other",
                "status": "damaged",
                "started": _modified(self.path / "config.yaml"),
                "updated": _modified(self.path),
                "advisories": 0,
                "spark": [],
            }

    def _card(self) -> JsonObject:
        self.metrics.refresh()
        config, rows, summary = self.config(), self.metrics.rows, self.summary() or {}
        here = Path.cwd()
        algorithm, run = algorithm_settings(config), self.section("run")
        evaluation = self.evaluation()
        kind = "evaluation" if evaluation is not None or (self.path / "eval.db").exists() else None
        started = _modified(self.path / "config.yaml")
        is_endless = run.get("total_steps") == ENDLESS
        return {
            "id": self.name,
            "path": valid_text(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path),
            "kind": kind or ("training" if run.get("total_steps") else "other"),
            "status": self.status(),
            "agent": config.get("agent") or (evaluation or {}).get("agent"),
            "model": algorithm.get("model") or (evaluation or {}).get("model"),
            "algorithm": algorithm.get("name"),
            "started": started,
            "updated": self._updated(),
            "seconds": summary.get("seconds") or (rows[-1].get("time/total_s") if rows else None),
            "step": int(rows[-1]["step"]) if rows else None,
            "total_steps": None if is_endless else run.get("total_steps"),
            "train_reward": _first_and_last(rows, "train/reward"),
            "val_reward": _first_and_last(rows, "val/reward"),
            "best": (summary.get("best") or {}).get("value"),
            "rollouts": summary.get("rollouts"),
            "rollouts_failed": summary.get("rollouts_failed"),
            "advisories": sum(advisory.is_active for advisory in self.metrics.advisor.advisories),
            "spark": _thin([row["train/reward"] for row in rows if "train/reward" in row]),
        }

    def details(self) -> JsonObject:
        """Return the card with settings, token ledger, failures and summary."""
        card = self.card()
        rows, summary = self.metrics.rows, self.summary()
        ledger = next((row for row in reversed(rows) if "ledger/generated" in row), {})
        return card | {
            "settings": self.settings(),
            "advisories": [advisory.to_json() for advisory in self.metrics.advisor.advisories],
            "tokens": {
                name.removeprefix("ledger/"): int(value)
                for name, value in ledger.items()
                if name.startswith("ledger/") and math.isfinite(value)
            },
            "metric_names": self.metrics.names(),
            "summary": summary,
        }


def is_run(path: Path) -> bool:
    """Return True if a folder is the directory of a run."""
    return any((path / name).is_file() for name in ("config.yaml", *STORE_FILES))


def valid_text(path: Path | str) -> str:
    """Return a path as text that JSON and addresses can have, even if its bytes are not UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories among some folders and in them, the latest first. Folders that do not exist
    are left out."""
    found: dict[Path, None] = {}
    for path in filter(Path.is_dir, paths):
        own = is_run(path)
        nested = [] if own else [child for child in path.iterdir() if child.is_dir() and is_run(child)]
        found |= dict.fromkeys(folder.resolve() for folder in ([path] if own else nested))
    return sorted(found, key=lambda folder: -_modified(folder / "config.yaml"))[:MAX_RUNS]


def name_runs(folders: Iterable[Path], names: dict[Path, str]) -> None:
    """Give each run directory a unique name, and leave those that have one as they are.

    Directories of equal names are also named after their parents, and then by a hash of their paths.

    Args:
        names: the names so far, which is extended.
    """
    new = [folder for folder in folders if folder not in names]
    taken = Counter([*names.values(), *(valid_text(folder.name) for folder in new)])
    for folder in new:
        own = valid_text(folder.name)
        digest = hashlib.blake2b(os.fsencode(folder), digest_size=4).hexdigest()
        named = [own] if taken[own] == 1 else []
        named += [f"{valid_text(folder.parent.name)}~{own}", f"{own}~{digest}"]
        names[folder] = next(name for name in named if name not in names.values())


def _row(line: bytes) -> Metrics | None:
    """Return a row of metrics; None for a line that is none, such as one cut by a full disk."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or _finite(content.get("step")) is None:
        return None
    row = {name: math.nan if value is None else value for name, value in content.items()}
    if _finite(row.get(VAL_STEP)) is None:
        row.pop(VAL_STEP, None)
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**63)
    }


def _finite(value: object) -> float | None:
    """Return a number; None for what is none, or not finite."""
    if isinstance(value, int):
        return value if abs(value) <= 2**63 else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _first_and_last(rows: list[Metrics], name: str) -> list[float | None] | None:
    """Return a metric's first and last value; None for a metric that no row has."""
    values = [_finite(row[name]) for row in rows if name in row]
    return [values[0], values[-1]] if values else None


def _thin(values: list[float]) -> list[float | None]:
    """Return about SPARK_POINTS of the values, the last one included."""
    every = max(-(-len(values) // SPARK_POINTS), 1)
    return [_finite(value) for value in values[::-1][::every][::-1]]


def _json_file(file: Path) -> JsonObject | None:
    try:
        content = json.loads(read_bounded(file, MAX_JSON))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _is_locked(file: Path) -> bool:
    """Return True if a process of this machine has locked a file. Asking for the lock itself could keep a
    store from starting."""
    try:
        inode = file.stat().st_ino
    except OSError:
        return False
    try:
        locks = LOCKS.read_text()
    except OSError:  # not Linux: a process locks the file for as long as it has it open
        opened = psutil.process_iter(["open_files"])
        return any(str(file) == one.path for process in opened for one in process.info["open_files"] or ())
    return any(line.split()[5].endswith(f":{inode}") for line in locks.splitlines())


REFRESH_S = 1.0
"""Interval of reading a watched run's files, in seconds."""
PART_S, PAUSE_S = 0.05, 0.02
"""Seconds of a part of the index, for which a request may wait, and between two parts."""
FIRST_PART_S = 0.25
"""Seconds of the first part, so that the first list is not short."""


class ShownRun:
    """A run that the server has opened. Use its methods in the server's event loop only."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.records = TokenRecords(folder.path)
        self._service: StoreService | None = None
        self._identity: tuple[int, int] | None = None
        """Device and inode of the store that is open."""
        self._index: RolloutIndex | None = None
        self._indexing: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    @property
    def rules(self) -> RowRules:
        """The run's choice of calls and rows to train."""
        return RowRules.from_config(self.folder.config())

    def stale_mask(self, step: int | None) -> StaleMask | None:
        """Return the mask of the tokens that were too old for a step; None for no such limit."""
        limit = algorithm_settings(self.folder.config()).get("max_staleness")
        version = None if step is None else self.folder.metrics.versions().get(step)
        return StaleMask(version, limit) if version is not None and isinstance(limit, int) and limit else None

    async def store(self) -> StoreReader:
        """Return a client of the run's store.

        Raises:
            StoreError: there is no store, or it has another version.
        """
        async with self._opening:
            await self._leave_old_store()
            if self._service is None:
                self._service = await asyncio.to_thread(_open_store, self._store_file())
        return StoreReader(self._service)

    def store_identity(self) -> tuple[int, int]:
        """Return the device and inode of the run's store, which another run in the directory replaces.

        Raises:
            StoreError: there is no store.
        """
        file = self._store_file()
        try:
            stat = file.stat()
        except OSError as error:
            raise StoreError(f"{file} cannot be read: {error}") from None
        return stat.st_dev, stat.st_ino

    async def _leave_old_store(self) -> None:
        """Close what is open of a store that another run has replaced."""
        identity = self.store_identity()
        if self._identity not in (None, identity):
            await self.close()
            self._service = self._index = self._indexing = None
        self._identity = identity

    def _store_file(self) -> Any:
        file = self.folder.store
        if file is None and not self.folder.path.is_dir():
            raise StoreError(f"the folder {self.folder.path} is gone; what it contained cannot be shown")
        if file is None:
            raise StoreError(
                f"the run {self.folder.name} has no store in {self.folder.path} yet; wait until it begins"
            )
        return file

    async def index(self) -> RolloutIndex:
        """Return the index, with the lines of the first rollouts at least; a background task adds the others.

        Raises:
            StoreError: as for `store`.
        """
        async with self._opening:
            await self._leave_old_store()
            if self._index is None:
                file = self._store_file()
                await asyncio.to_thread(_check_tables, file)
                self._index = await asyncio.to_thread(RolloutIndex, file, self.folder.path)
                await self.refresh(FIRST_PART_S)
        if self._indexing is None or self._indexing.done():
            await self.refresh()
        return self._index

    async def refresh(self, seconds: float = PART_S) -> None:
        """Index new rows for about `seconds`; a task in the background indexes the rest."""
        assert self._index is not None, "it is open"
        self.folder.metrics.refresh()
        await asyncio.to_thread(self._index.refresh, self.folder.metrics.versions(), seconds)
        if not self._index.is_complete and (self._indexing is None or self._indexing.done()):
            self._indexing = asyncio.create_task(self._complete(self._index))

    async def _complete(self, index: RolloutIndex) -> None:
        try:
            while not index.is_complete:
                await asyncio.to_thread(index.refresh, self.folder.metrics.versions(), PART_S)
                await pause(PAUSE_S)
        except Exception:
            logger.exception("the index of %s is not complete", self.folder.path)

    async def close(self) -> None:
        """Close the store and the index."""
        if self._indexing is not None:
            self._indexing.cancel()
            await asyncio.gather(self._indexing, return_exceptions=True)
        if self._index is not None:
            await asyncio.to_thread(self._index.close)
        if self._service is not None:
            await self._service.close()


def _open_store(file: Path) -> StoreService:
    """Open a store; a locked file waits 10 s."""
    _check_tables(file)
    return StoreService(file, read_only=True)


def _check_tables(file: Path) -> None:
    """Check that a store has tables of stored values only.

    A view, or a computed column, of a stranger's file could be endless, and no request for it would end.

    Raises:
        StoreError: it has others.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as db:
            found = db.execute(
                "SELECT m.name FROM sqlite_master m LEFT JOIN pragma_table_xinfo(m.name) c "
                "ON m.type = 'table' WHERE m.type NOT IN ('table', 'index') "
                "OR m.sql LIKE 'CREATE VIRTUAL%' OR c.hidden"
            ).fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"{file} cannot be read: {error}") from None
    if found is not None:
        raise StoreError(f"{file} is not as raylight writes it: {found[0]!r} is computed; it is not shown")
