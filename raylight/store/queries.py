"""Queries of the journal: filters, order and pages, each through an index, on a separate connection."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from raylight.errors import QueryError, UnknownIdError
from raylight.store.call_rows import CALL
from raylight.store.rows import (
    ATTEMPT,
    LATEST,
    RESOURCES,
    REWARD_SPAN,
    ROLLOUT_STATE,
    ROLLOUT_WITH_INPUT,
    SPAN,
    Row,
)
from raylight.store.tables.run_clock import SAVED_AT, SECONDS_LIVED
from raylight.store.tables.workers import WORKERS
from raylight.types import JsonObject, RolloutStatus


@dataclass
class Conditions:
    """Conditions of a query: required ones, and the user's filters, which are joined by "and" or "or"."""

    required: list[str] = field(default_factory=list)
    filters: list[str] = field(default_factory=list)
    required_values: list[object] = field(default_factory=list)
    values: list[object] = field(default_factory=list)

    def require(self, column: str, value: object) -> Conditions:
        """Add a condition that holds whatever `logic` is."""
        self.required.append(f"{column} = ?")
        self.required_values.append(value)
        return self

    def equals(self, column: str, value: object) -> Conditions:
        """Filter by a value; None: no filter."""
        if value is not None:
            self.filters.append(f"{column} = ?")
            self.values.append(value)
        return self

    def contains(self, column: str, part: str | None) -> Conditions:
        """Filter by a part of a text; None: no filter."""
        if part is not None:
            self.filters.append(f"instr({column}, ?) > 0")
            self.values.append(part)
        return self

    def one_of(self, column: str, values: Sequence[object] | None) -> Conditions:
        """Filter by a list of values, of which an empty one matches nothing; None: no filter."""
        if values is None:
            return self
        # SQLite's JSON cuts a text off at a zero character, and would match another value
        values = [value for value in values if "\0" not in str(value)]
        operator = "=" if len(values) == 1 else "IN"  # with "=" an index can also provide the order
        self.filters.append(f"{column} {operator} (SELECT value FROM json_each(?))")
        self.values.append(json.dumps(values))
        return self

    def sql(self, logic: str) -> tuple[str, list[object]]:
        """The `WHERE` clause and its values.

        Raises:
            QueryError: `logic` is neither "and" nor "or".
        """
        if logic not in ("and", "or"):
            raise QueryError(f"filter_logic is 'and' or 'or', not {logic!r}")
        parts = list(self.required)
        if self.filters:
            parts.append("(" + f" {logic.upper()} ".join(self.filters) + ")")
        return (" WHERE " + " AND ".join(parts) if parts else ""), [*self.required_values, *self.values]


@dataclass(frozen=True)
class Page:
    """Order of the results, and the part that is returned.

    Attributes:
        limit: maximum number of results; -1 for all.
    """

    sort_by: str | None = None
    sort_order: str = "asc"
    limit: int = -1
    offset: int = 0

    def sql(self, columns: dict[str, str], default: str) -> str:
        """`ORDER BY` and `LIMIT`; ties, and results without an order, are in the order of their insertion.

        Args:
            columns: SQL column of each name that `sort_by` may have.
            default: SQL column of the order of insertion.

        Raises:
            QueryError: `sort_by`, `sort_order`, `limit` or `offset` is out of range.
        """
        if self.sort_order not in ("asc", "desc"):
            raise QueryError(f"sort_order is 'asc' or 'desc', not {self.sort_order!r}")
        if self.sort_by is not None and self.sort_by not in columns:
            raise QueryError(f"cannot sort by {self.sort_by!r}; choose one of: {', '.join(sorted(columns))}")
        integers = isinstance(self.limit, int) and isinstance(self.offset, int)
        if not integers or not -1 <= self.limit < 2**63 or not 0 <= self.offset < 2**63:
            raise QueryError(
                f"limit must be at least -1 (all) and offset at least 0, not {self.limit!r} and "
                f"{self.offset!r}"
            )
        first = f"{columns[self.sort_by]} {self.sort_order}, " if self.sort_by else ""
        return f" ORDER BY {first}{default} LIMIT {self.limit} OFFSET {self.offset}"


def _columns(names: str, table: str = "") -> dict[str, str]:
    return {name: f"{table}{name}" for name in names.split(", ")}


ROLLOUT_ORDER = _columns("rollout_id, status, mode, group_id, resources_id, start_time, end_time", "r.")
ATTEMPT_ORDER = _columns(
    "attempt_id, sequence_id, status, worker_id, start_time, end_time, last_heartbeat_time"
)
SPAN_ORDER = _columns(
    "rollout_id, attempt_id, sequence_id, trace_id, span_id, parent_id, name, start_time, end_time"
)
RESOURCES_ORDER = _columns("resources_id, version, create_time, update_time")
WORKER_ORDER = _columns(
    "worker_id, status, last_heartbeat_time, last_dequeue_time, last_busy_time, last_idle_time, "
    "current_rollout_id, current_attempt_id"
)
LATEST_ATTEMPT = "(SELECT attempt_id FROM attempts WHERE rollout_id = ? ORDER BY sequence_id DESC LIMIT 1)"


PageRows = tuple[list[Row], int]
"""Rows of a page, and the number of rows on all pages."""


class Queries:
    """Queries on a read-only connection, so that a long one does not block the writer.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, reader: sqlite3.Connection, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._clock = clock
        self._start = clock()

    def run(self, method: str, args: tuple[object, ...]) -> Any:
        """Run one of the queries below in a transaction, so that it reads one consistent state."""
        self._reader.execute("BEGIN")
        try:
            return getattr(self, method)(*args)
        finally:
            if self._reader.in_transaction:
                self._reader.execute("ROLLBACK")

    def rollout(self, rollout_id: str) -> Row:
        """Columns ROLLOUT_WITH_INPUT of a rollout; raises UnknownIdError."""
        rows = self._by_id(f"SELECT {ROLLOUT_WITH_INPUT} FROM {LATEST} WHERE r.rollout_id = ?", [rollout_id])
        if not rows:
            raise UnknownIdError(f"no rollout {rollout_id!r} in the store")
        return rows[0]

    def collect(
        self, rollout_ids: list[str], with_spans: bool
    ) -> list[tuple[Row, Row | None, list[Row], list[Row]]]:
        """`(rollout, its grade or last span with a reward, calls, spans)` of each rollout's latest attempt,
        calls in the order of their start."""
        return [self._collect(rollout_id, with_spans) for rollout_id in rollout_ids]

    def _collect(self, rollout_id: str, with_spans: bool) -> tuple[Row, Row | None, list[Row], list[Row]]:
        rollout = self.rollout(rollout_id)
        attempt_id = self._fetch_all(f"SELECT {LATEST_ATTEMPT}", [rollout_id])[0][0]
        if attempt_id is None:
            return rollout, None, [], []
        rewarded = self._fetch_all(
            f"SELECT {SPAN} FROM spans WHERE rowid = (SELECT {REWARD_SPAN} FROM attempts a WHERE "
            "a.attempt_id = ?)",
            [attempt_id],
        )
        calls = self._fetch_all(
            f"SELECT {CALL} FROM calls WHERE attempt_id = ? AND generation IS NOT NULL ORDER BY start_time, "
            "rowid",
            [attempt_id],
        )
        spans: list[Row] = []
        if with_spans:
            ordered = f"SELECT {SPAN} FROM spans WHERE rollout_id = ? AND attempt_id = ? ORDER BY sequence_id"
            spans = self._fetch_all(ordered, [rollout_id, attempt_id])
        return rollout, rewarded[0] if rewarded else None, calls, spans

    def states(self, rollout_ids: list[str]) -> list[Row]:
        """Columns ROLLOUT_STATE of the existing rollouts among these, in the order of enqueueing."""
        conditions, values = Conditions().one_of("r.rollout_id", rollout_ids).sql("and")
        return self._fetch_all(
            f"SELECT {ROLLOUT_STATE} FROM {LATEST}{conditions} ORDER BY r.position", values
        )

    def latest_resources(self) -> Row | None:
        """Columns RESOURCES of the version that was added or updated last; None if there is none."""
        rows = self._fetch_all(f"SELECT {RESOURCES} FROM resources ORDER BY updated DESC LIMIT 1", [])
        return rows[0] if rows else None

    def statistics(self) -> JsonObject:
        """Seconds since the store was opened, the totals, the rollouts by status, and the other counters that
        are not 0."""
        counts = {f"total_{kind}": 0 for kind in ("rollouts", "attempts", "spans")}
        counts |= {f"rollouts_{status}": 0 for status in get_args(RolloutStatus)}
        counts |= dict(
            self._fetch_all(
                "SELECT name, value FROM counts WHERE value != 0 AND name NOT IN (?, ?)",
                [SECONDS_LIVED, SAVED_AT],
            )
        )
        for table in ("resources", "workers"):
            counts[f"total_{table}"] = self._fetch_all(f"SELECT COUNT(*) FROM {table}", [])[0][0]
        return {"uptime": self._clock() - self._start, **counts}

    def rollouts(
        self,
        statuses: list[str] | None,
        ids: list[str] | None,
        id_contains: str | None,
        logic: str,
        page: Page,
    ) -> PageRows:
        """Columns ROLLOUT_WITH_INPUT of the rollouts that match."""
        where = (
            Conditions()
            .one_of("r.status", statuses)
            .one_of("r.rollout_id", ids)
            .contains("r.rollout_id", id_contains)
        )
        conditions, values = where.sql(logic)
        statement = f"SELECT {ROLLOUT_WITH_INPUT} FROM {LATEST}{conditions}"
        rows = self._fetch_all(statement + page.sql(ROLLOUT_ORDER, "r.position"), values)
        count = f"SELECT COUNT(*) FROM rollouts r{conditions}"
        if not conditions:  # the counter costs nothing in a long run
            count = "SELECT COALESCE(SUM(value), 0) FROM counts WHERE name = 'total_rollouts'"
        return rows, self._total(rows, page, count, values)

    def attempts(self, rollout_id: str, page: Page) -> PageRows:
        """Columns ATTEMPT of a rollout's attempts; raises UnknownIdError."""
        self._check_rollout(rollout_id)
        order = page.sql(ATTEMPT_ORDER, "sequence_id")
        return self._fetch_page(ATTEMPT, "attempts WHERE rollout_id = ?", order, [rollout_id], page)

    def spans(
        self,
        rollout_id: str,
        attempt_id: str | None,
        equal: JsonObject,
        contain: dict[str, str | None],
        logic: str,
        page: Page,
    ) -> PageRows:
        """Columns SPAN of a rollout's spans that match; raises UnknownIdError."""
        self._check_rollout(rollout_id)
        if attempt_id == "latest":
            latest = self._fetch_all(f"SELECT {LATEST_ATTEMPT}", [rollout_id])[0][0]
            if latest is None:
                return [], 0
            attempt_id = latest
        where = Conditions().require("rollout_id", rollout_id)
        if attempt_id is not None:
            if not self._by_id(
                "SELECT 1 FROM attempts WHERE rollout_id = ? AND attempt_id = ?", [rollout_id, attempt_id]
            ):
                raise UnknownIdError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
            where.require("attempt_id", attempt_id)
        for column, value in equal.items():
            where.equals(column, value)
        for column, part in contain.items():
            where.contains(column, part)
        conditions, values = where.sql(logic)
        return self._fetch_page(SPAN, f"spans{conditions}", page.sql(SPAN_ORDER, "rowid"), values, page)

    def span_bases(self, spans: list[tuple[str, str]]) -> list[Row]:
        """Columns SPAN of spans `(attempt_id, span_id)`, of their bases, and of the bases' bases."""
        return self._fetch_all(
            "WITH RECURSIVE wanted(attempt_id, span_id) AS (SELECT json_extract(value, '$[0]'), "
            "json_extract(value, '$[1]') FROM json_each(?) UNION SELECT s.attempt_id, s.base FROM wanted w "
            "JOIN spans s ON s.attempt_id = w.attempt_id AND s.span_id = w.span_id WHERE s.base != '') "
            f"SELECT {SPAN} FROM wanted JOIN spans USING (attempt_id, span_id)",
            [json.dumps(spans)],
        )

    def calls(self, rollout_id: str, call_ids: list[str]) -> list[Row]:
        """Columns CALL of the calls among these that have tokens, of their bases, and of the bases' bases."""
        return self._fetch_all(
            "WITH RECURSIVE wanted(attempt_id, call_id) AS (SELECT attempt_id, call_id FROM calls WHERE "
            "generation IS NOT NULL AND attempt_id IN (SELECT attempt_id FROM attempts WHERE rollout_id = ?) "
            "AND call_id IN (SELECT value FROM json_each(?)) UNION SELECT c.attempt_id, c.base FROM wanted w "
            "JOIN calls c ON c.attempt_id = w.attempt_id AND c.call_id = w.call_id WHERE c.base IS NOT NULL) "
            f"SELECT {CALL} FROM wanted JOIN calls USING (attempt_id, call_id)",
            [rollout_id, json.dumps(call_ids)],
        )

    def sampled_tokens(self, rollout_ids: list[str]) -> list[Row]:
        """Id of each of these rollouts, with its RolloutTokens."""
        return self._fetch_all(
            "SELECT w.value, COALESCE(SUM(iif(a.attempt_id = s.attempt_id, s.tokens, 0)), 0), "
            "COALESCE(SUM(iif(a.attempt_id = s.attempt_id, 0, s.tokens)), 0), COALESCE(SUM("
            "iif(a.attempt_id = s.attempt_id, s.late, 0)), 0) FROM json_each(?) w JOIN rollouts r ON "
            "r.rollout_id = w.value LEFT JOIN attempts a ON a.rollout_id = w.value AND a.sequence_id = "
            "r.n_attempts LEFT JOIN sampled s ON s.rollout_id = w.value GROUP BY w.value",
            [json.dumps(rollout_ids)],
        )

    def token_totals(self, prefix: str, next_group: int, open_groups: list[int]) -> Row:
        """TokenTotals of the rollouts whose ids begin with a prefix, which the number of a group follows."""
        return self._fetch_all(
            "SELECT COALESCE(SUM(tokens), 0), COALESCE(SUM(iif(number >= ? OR number IN (SELECT value FROM "
            "json_each(?)), tokens, 0)), 0), COALESCE(SUM(late), 0) FROM (SELECT tokens, late, CAST(substr("
            "rollout_id, ?) AS INTEGER) AS number FROM sampled WHERE rollout_id >= ? AND rollout_id < ?)",
            [
                next_group,
                json.dumps(open_groups),
                len(prefix) + 1,
                prefix,
                prefix[:-1] + chr(ord(prefix[-1]) + 1),
            ],
        )[0]

    def resources_by_id(self, resources_id: str) -> Row:
        """Columns RESOURCES of a version; raises UnknownIdError."""
        rows = self._by_id(f"SELECT {RESOURCES} FROM resources WHERE resources_id = ?", [resources_id])
        if not rows:
            raise UnknownIdError(f"no resources {resources_id!r} in the store")
        return rows[0]

    def resources(self, resources_id: str | None, id_contains: str | None, page: Page) -> PageRows:
        """Columns RESOURCES of the versions that match."""
        conditions, values = (
            Conditions().equals("resources_id", resources_id).contains("resources_id", id_contains).sql("and")
        )
        order = page.sql(RESOURCES_ORDER, "position")
        return self._fetch_page(RESOURCES, f"resources{conditions}", order, values, page)

    def steps(self, lineage: str) -> list[Row]:
        """Step and groups, as JSON, of a lineage's training steps."""
        return self._fetch_all("SELECT step, groups FROM steps WHERE lineage = ? ORDER BY step", [lineage])

    def workers(
        self,
        statuses: list[str] | None,
        id_contains: str | None,
        logic: str,
        page: Page,
        ids: list[str] | None,
    ) -> PageRows:
        """Columns of WORKERS of the workers that match."""
        where = (
            Conditions()
            .one_of("status", statuses)
            .contains("worker_id", id_contains)
            .one_of("worker_id", ids)
        )
        conditions, values = where.sql(logic)
        order = page.sql(WORKER_ORDER, "worker_id")
        return self._fetch_page("*", f"{WORKERS}{conditions}", order, values, page)

    def _check_rollout(self, rollout_id: str) -> None:
        if not self._by_id("SELECT 1 FROM rollouts WHERE rollout_id = ?", [rollout_id]):
            raise UnknownIdError(f"no rollout {rollout_id!r} in the store")

    def _by_id(self, statement: str, ids: list[str]) -> list[Row]:
        """Rows of these ids; an id that is not Unicode matches no row."""
        try:
            return self._fetch_all(statement, ids)
        except UnicodeEncodeError:
            return []

    def _fetch_page(self, columns: str, source: str, order: str, values: list[Any], page: Page) -> PageRows:
        rows = self._fetch_all(f"SELECT {columns} FROM {source}{order}", values)
        return rows, self._total(rows, page, f"SELECT COUNT(*) FROM {source}", values)

    def _total(self, rows: list[Row], page: Page, count: str, values: list[object]) -> int:
        """Number of rows on all pages; they are counted only if the page does not tell."""
        is_last = page.limit == -1 or len(rows) < page.limit
        if is_last and (rows or not page.offset):
            return page.offset + len(rows)
        return self._fetch_all(count, values)[0][0]

    def _fetch_all(self, statement: str, values: Sequence[object]) -> list[Row]:
        return self._reader.execute(statement, values).fetchall()
