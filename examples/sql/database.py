"""The database of a task, the questions about it, and the queries that answer them."""

from __future__ import annotations

import random
import sqlite3
from typing import Any

SCHEMA = "CREATE TABLE goods (kind TEXT, price INTEGER, weight INTEGER)"
KINDS, ROWS = "abcdefghij", 100
FUNCTIONS = {"highest": "MAX", "lowest": "MIN", "total": "SUM", "average": "AVG"}
"""Functions of SQL by the words of questions."""
MAX_ROWS = 20
"""Rows of a result at most."""
MAX_BYTES = 10_000
"""Longest value, row or query."""
MAX_INSTRUCTIONS = 100_000
"""Instructions of SQLite's virtual machine after which a query is interrupted."""
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
"""Actions of a query. Others, such as attaching a file, are refused."""


def make_database(seed: int) -> sqlite3.Connection:
    """Return a database in memory, which can only be read, and only by short queries."""
    chance = random.Random(seed)
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute(SCHEMA)
    rows = [(chance.choice(KINDS), chance.randint(10, 99), chance.randint(1, 9)) for _ in range(ROWS)]
    database.executemany("INSERT INTO goods VALUES (?, ?, ?)", rows)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    database.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
    )
    database.set_progress_handler(lambda: True, MAX_INSTRUCTIONS)
    return database


def run_query(database: sqlite3.Connection, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query.

    Raises:
        sqlite3.Error: it is wrong.
    """
    return database.execute(sql).fetchmany(MAX_ROWS)


def make_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Return tasks: a question, the query that answers it, and the seed of the database."""
    return [make_task(random.Random(f"{seed} {number}")) for number in range(count)]


def make_task(chance: random.Random) -> dict[str, Any]:
    word, kind, least = chance.choice(list(FUNCTIONS)), chance.choice(KINDS), chance.randint(1, 7)
    column, other = chance.sample(["price", "weight"], 2)
    if other == "price":
        least *= 10
    return {
        "question": f"What is the {word} {column} of kind {kind} with a {other} above {least}?",
        "query": f"SELECT {FUNCTIONS[word]}({column}) FROM goods WHERE kind = '{kind}' AND {other} > {least}",
        "seed": chance.getrandbits(32),
    }
