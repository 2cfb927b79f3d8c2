"""An open run: its directory, its index and a reading client of its store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from pathlib import Path
from typing import Any

from raylight._utils.aio import pause
from raylight.errors import StoreError
from raylight.experience.row_rules import RowRules
from raylight.experience.staleness import StaleMask
from raylight.experience.token_records import TokenRecords
from raylight.store.reading import StoreReader
from raylight.store.service import StoreService
from raylight.ui.rollout_index import RolloutIndex
from raylight.ui.run_folder import RunFolder

logger = logging.getLogger(__name__)

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
        limit = self.folder.section("algorithm").get("max_staleness")
        version = None if step is None else self.folder.metrics.versions().get(step)
        return StaleMask(version, limit) if version is not None and isinstance(limit, int) and limit else None

    async def store(self) -> StoreReader:
        """Return a client of the run's store.

        Raises:
            StoreError: there is no store, or it is of another version.
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
        """Read what is new, for about so many seconds, and the rest beside the requests."""
        assert self._index is not None, "it is open"
        self.folder.metrics.refresh()
        await asyncio.to_thread(self._index.refresh, self.folder.metrics.versions(), seconds)
        if not self._index.is_complete and (self._indexing is None or self._indexing.done()):
            self._indexing = asyncio.create_task(self._complete(self._index))

    async def _complete(self, index: RolloutIndex) -> None:
        """Complete the index beside the requests."""
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
