"""The events of a run for a browser, and the JSON of all answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from raylight._utils.aio import pause
from raylight.errors import RaylightError
from raylight.ui.rollout_view import plain
from raylight.ui.shown_run import REFRESH_S, ShownRun


async def run_events(run: ShownRun) -> AsyncIterator[bytes]:
    """Yield the rows of metrics that are new, and the run's card and counts when they change, until the run
    has ended and its index is complete."""
    folder, sent = run.folder, len(run.folder.metrics.rows)
    last: dict[str, Any] = {}

    def changed(kind: str, data: Any) -> list[bytes]:
        if last.get(kind) == data:
            return []
        last[kind] = data
        return [_event(kind, data)]

    yield b"retry: 2000\n\n"
    while True:
        card = await asyncio.to_thread(folder.card)
        if len(folder.metrics.rows) < sent:  # a resumed run has written its metrics again
            sent = 0
        if len(folder.metrics.rows) > sent:
            columns = folder.metrics.columns(start=sent)
            sent = len(folder.metrics.rows)
            yield _event("metrics", {"columns": columns})
        for event in changed("run", card):
            yield event
        is_complete = True
        if folder.store is not None:
            try:
                index = await run.index()
                is_complete = index.is_complete
                events = changed("rollouts", await asyncio.to_thread(index.counts))
            except RaylightError as error:
                events = changed("problem", {"error": str(error)})
            for event in events:
                yield event
        if card["status"] != "running" and is_complete:
            yield _event("end", {})
            return
        yield b": alive\n\n"
        await pause(REFRESH_S)  # files of another process raise no event


def _event(kind: str, data: Any) -> bytes:
    return f"event: {kind}\ndata: {json_text(data)}\n\n".encode()


def json_text(value: Any) -> str:
    """Return a value as ASCII JSON; what JSON lacks, such as NaN, is null."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(plain(value))
