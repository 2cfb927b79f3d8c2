"""The barest capture, the bound of `capture.py --bound`: a middleware that records calls, and their store.

A call is a decoded body and a row of its tokens and texts, which travels with others in one message to an
actor that commits them to SQLite, as durably as raylight's store. There are no keys, attempts, announcements,
retries, dialects, conversations or spans, and no bound on what waits.
"""

import asyncio
import secrets
import sqlite3
import time
from typing import Any

import msgpack
import msgspec
import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight.engines.capture_context import CURRENT, AttemptScope, CaptureContext
from raylight.types import CallKey

INTERVAL_S = 0.01
"""Time between two messages, the same as in raylight's recorder."""
Row = tuple[str, str, bytes, bytes, bytes]
"""Id, path, body, answer, and the tokens."""


class BareStore:
    """Actor that commits the rows of a message together."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(
            "CREATE TABLE calls (id TEXT UNIQUE, path TEXT, body TEXT, answer TEXT, tokens BLOB)"
        )

    async def add(self, rows: list[Row]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")


class BareCapture:
    """ASGI middleware that hands the tokens of each call to a `BareStore`; no answer waits for it."""

    def __init__(self, app: ASGIApp, store: Any) -> None:
        self._app = app
        self._store = store
        self._rows: list[Row] = []
        self._sender: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        key = CallKey("rollout", "attempt", secrets.token_hex(16))
        context = CaptureContext(
            AttemptScope(key.rollout_id, key.attempt_id),
            "chat",
            msgspec.json.decode(body),
            time.time(),
            [key],
        )
        answer = bytearray()

        async def replay() -> Message:
            return {"type": "http.request", "body": body}

        async def keep(message: Message) -> None:
            answer.extend(message.get("body", b""))
            await send(message)

        token = CURRENT.set(context)
        try:
            await self._app(scope, replay, keep)
        finally:
            CURRENT.reset(token)
        self._rows.append((key.call_id, scope["path"], body, bytes(answer), _tokens(context)))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._rows:
            rows, self._rows = self._rows, []
            await self._store.add.remote(rows)
            await asyncio.sleep(INTERVAL_S)


def _tokens(context: CaptureContext) -> bytes:
    """Return the tokens of a call's only choice."""
    sample = context.samples[0]
    arrays = [
        np.asarray(values, dtype).tobytes()
        for values, dtype in (
            (sample.prompt_ids, np.int32),
            (sample.output_ids, np.int32),
            (sample.logprobs, np.float32),
            (sample.weight_versions, np.int64),
        )
    ]
    return msgpack.packb([*arrays, sample.finish_reason, dict(sample.sampling)])
