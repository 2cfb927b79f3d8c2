"""The driver of a run under fault as a child process, and the events of the run in one queue."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_log import EVENTS

DRIVER = Path(__file__).with_name("chaos_driver.py")


@dataclass(frozen=True)
class Event:
    """Something that happened: an event of the agent or the driver, a printed `line`, the driver's `exit`."""

    kind: str
    at: float
    """Time of its arrival, as of `time.monotonic`."""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The printed line; "" for other events."""
        return self.fields.get("text", "")


Predicate = Callable[[Event], bool]


class Events:
    """Events of a run, in the order of their arrival.

    Args:
        folder: folder of the test, in which the pipe for the events is created.
    """

    def __init__(self, folder: Path) -> None:
        self.seen: list[Event] = []
        self._queue: queue.Queue[Event] = queue.Queue()
        pipe = folder / EVENTS
        os.mkfifo(pipe)
        # open for writing too, so that reading never ends while no one else writes
        self._pipe = os.fdopen(os.open(pipe, os.O_RDWR), "r+b", buffering=0)
        threading.Thread(target=self._read, daemon=True).start()

    def add(self, kind: str, **fields: Any) -> None:
        """Add an event of the test's own."""
        self._queue.put(Event(kind, time.monotonic(), fields))

    def wait(self, predicates: Sequence[Predicate], deadline: float) -> Event | None:
        """Wait for one event after another; return the last, or None if the driver exits before.

        Raises:
            TimeoutError: the `deadline`, as of `time.monotonic`, has passed.
        """
        found: Event | None = None
        for predicate in predicates:
            while True:
                try:
                    event = self._queue.get(timeout=max(deadline - time.monotonic(), 0.0))
                except queue.Empty:
                    raise TimeoutError from None
                self.seen.append(event)
                if predicate(event):
                    found = event
                    break
                if event.kind == "exit":
                    return None
        return found

    def drain(self) -> None:
        """Move all that has arrived to `seen`."""
        while not self._queue.empty():
            self.seen.append(self._queue.get())

    def close(self) -> None:
        """Stop reading."""
        self._pipe.write(b"\n")

    def _read(self) -> None:
        for line in self._pipe:
            if line == b"\n":
                self._pipe.close()
                return
            event = json.loads(line)
            self.add(event.pop("event"), **event)


class Driver:
    """A driver in a new process group, as a shell starts it; its output goes to `driver.log` too.

    Args:
        folder: folder of the test; the run directory is `settings["folder"]`.
        environment: further environment variables of all processes of the run.
        settings: arguments of `chaos_driver.main`.
    """

    def __init__(
        self, folder: Path, environment: dict[str, str], settings: dict[str, Any], events: Events
    ) -> None:
        self._log = (folder / "driver.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps(settings)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self._events = events
        self.exited = threading.Event()
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._log.write(line)
            self._log.flush()
            self.lines.append(line.rstrip())
            self._events.add("line", text=line.rstrip())

    def _wait(self) -> None:
        code = self.process.wait()
        self._reader.join(2)  # its last lines; an orphan may hold the pipe open
        self._events.add("exit", code=code)
        self.exited.set()
