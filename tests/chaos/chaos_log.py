"""The log that an agent under fault keeps itself, the events that it sends to the test, and the run's size.

Needs only Python's own library, so that a program can keep the same log.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from typing import Any

FOLDER_VARIABLE = "RAYLIGHT_CHAOS_FOLDER"
LOG, BATCHES, EVENTS = "agent.jsonl", "batches.jsonl", "events"
TASKS, SAMPLES = 8, 4
"""Groups of each step, and rollouts of each group."""
HOLD_VARIABLE = "RAYLIGHT_CHAOS_HOLD"
HELD_UPDATE, HELD_ROLLOUTS = 3, ("-train-33-0", "-train-36-0")
"""With HOLD_VARIABLE in the environment, an update and the agents of some rollouts after it last until the
driver is killed. Meanwhile the other groups that may be dispatched finish."""
QUESTIONS = 3
"""Questions of one attempt, in one conversation."""


def send_event(kind: str, **fields: Any) -> None:
    """Send an event to the test, in one write to its named pipe."""
    line = json.dumps({"event": kind, **fields}) + "\n"
    with contextlib.suppress(OSError):  # the test has ended
        pipe = os.open(os.path.join(os.environ[FOLDER_VARIABLE], EVENTS), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, line.encode())
        finally:
            os.close(pipe)


def append_line(name: str, **fields: Any) -> None:
    """Append a JSON line to a file of the test's folder, and write it to disk."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    file = os.open(os.path.join(os.environ[FOLDER_VARIABLE], name), flags, 0o644)
    try:
        os.write(file, (json.dumps(fields) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def questions(task: dict[str, int]) -> list[str]:
    return [f"{task['a'] + i}+{task['b']}=" for i in range(QUESTIONS)]


def reward_of(answers: list[str]) -> float:
    """Return a number between 0 and 1 that depends on every letter of the answers.

    Nearly every rollout has another reward, so that a mix-up shows.
    """
    return zlib.crc32("\n".join(answers).encode()) / 2**32


class AttemptLog:
    """One attempt: the events `begun` and `finished` or `raised`, and its end as a line of the log."""

    def __init__(self, rollout_id: str, attempt_id: str, mode: str) -> None:
        self._ids = {"rollout": rollout_id, "attempt": attempt_id, "mode": mode}
        self.answers: list[str] = []

    def __enter__(self) -> AttemptLog:
        self._began = time.monotonic()
        send_event("begun", **self._ids, pid=os.getpid())
        return self

    def finish(self) -> float:
        """Write the answers and their reward to the log; return the reward."""
        reward = reward_of(self.answers)
        self._append(reward=reward)
        send_event("finished", **self._ids)
        return reward

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            text = f"{type(error).__name__}: {error}"[:300]
            self._append(raised=text)
            send_event("raised", **self._ids)

    def _append(self, **end: Any) -> None:
        append_line(LOG, **self._ids, began=self._began, at=time.monotonic(), answers=self.answers, **end)
