"""Training states in a folder or an object store: named by their step, complete or absent, kept by count. No torch.

A state is complete when its marker `COMPLETE` is there, which is written last, replaces the one before it at once, and names the
file of the content. So a state that is written again is the former one until it is the new one, wherever a kill comes between.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import fsspec

from raylight.errors import CheckpointError, ConfigError
from raylight.files import atomic_file, sync_folder

COMPLETE = "COMPLETE"
CONTENT = "content"
"""What the marker calls the name of the content's file."""
NAME = re.compile(r"step-(\d+)$")

Dump = Callable[[IO[bytes]], None]


class States:
    """The states of a run.

    Args:
        url: a folder, or a URL that fsspec knows.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"checkpoint.path {url!r} cannot be opened: {error}") from None
        self.url = url
        protocol = self._fs.protocol
        self._local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def steps(self) -> list[int]:
        """Steps with a complete state, in order."""
        return [step for step in self._folders() if self._fs.exists(f"{self._folder(step)}/{COMPLETE}")]

    def about(self, step: int) -> dict[str, Any]:
        """What was written about a state."""
        return {name: value for name, value in self._marker(step).items() if name != CONTENT}

    def open(self, step: int) -> IO[bytes]:
        """The content of a state.

        Raises:
            CheckpointError: it is not there.
        """
        try:
            return self._fs.open(f"{self._folder(step)}/{self._marker(step)[CONTENT]}", "rb")
        except OSError as error:
            raise CheckpointError(
                f"the training state of step {step} in {self.url} cannot be read here: {error}; use a folder that every learner "
                "can reach, or a URL"
            ) from None

    def write(self, step: int, about: dict[str, Any], dump: Dump | None = None) -> None:
        """Write a state; whatever interrupts this, the ones before it stay as they are.

        Args:
            about: JSON, for `about`.
            dump: writes the content; without one the state is that of the model's own files.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            self._write(step, about, dump)
        except OSError as error:
            raise CheckpointError(
                f"the training state of step {step} cannot be written to {self.url}: {error}"
            ) from error

    def prune(self, keep: int) -> None:
        """Remove all but the last `keep` states, and what writes that were killed left."""
        whole = self.steps()
        for step in self._folders():
            if step not in whole[-keep:]:
                self._remove(step)

    def remove_after(self, step: int) -> None:
        """Remove the states of later steps."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _folder(self, step: int) -> str:
        return f"{self._root}/step-{step}"

    def _folders(self) -> list[int]:
        """Steps of which there is anything, in order."""
        self._fs.invalidate_cache()
        try:
            found = [NAME.search(name.rstrip("/")) for name in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(int(name.group(1)) for name in found if name)

    def _marker(self, step: int) -> dict[str, Any]:
        with self._fs.open(f"{self._folder(step)}/{COMPLETE}", "rb") as file:
            return json.loads(file.read())

    def _remove(self, step: int) -> None:
        """The marker goes first, so that what is left of an interrupted removal is no state."""
        marker = f"{self._folder(step)}/{COMPLETE}"
        if self._fs.exists(marker):
            self._fs.rm_file(marker)
        if self._fs.exists(self._folder(step)):  # an object store has no empty folders
            self._fs.rm(self._folder(step), recursive=True)

    def _write(self, step: int, about: dict[str, Any], dump: Dump | None) -> None:
        folder = self._folder(step)
        self._fs.makedirs(folder, exist_ok=True)
        content = f"training-{secrets.token_hex(4)}.pt" if dump is not None else None
        if dump is not None:
            self._put(f"{folder}/{content}", dump)
        marker = json.dumps({CONTENT: content, **about}).encode()
        self._put(f"{folder}/{COMPLETE}", lambda file: _write_all(file, marker))
        self._fs.invalidate_cache()
        for name in self._fs.ls(folder, detail=False):
            if name.rpartition("/")[2] not in (
                COMPLETE,
                content,
            ):  # of the state that was here before, or a write that was killed
                self._fs.rm_file(name)

    def _put(self, path: str, dump: Dump) -> None:
        """Write a file atomically; an object store does so by itself."""
        if not self._local:
            with self._fs.open(path, "wb") as file:
                dump(file)
            return
        with atomic_file(path) as file:
            dump(file)
        sync_folder(self._root)


class BackgroundWriter:
    """Writes on a thread, one thing at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin to write. `wait` comes first: it tells whether what was begun before was written."""
        assert self._last is None
        self._last = self._thread.submit(work)

    def wait(self) -> None:
        """Wait until what was begun is written; raises what it raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


def step_of(url: str) -> int | None:
    """The step that a URL names a state of; None where it names none."""
    found = NAME.search(url.rstrip("/"))
    return int(found.group(1)) if found else None


def locate(given: str) -> tuple[str, int | None]:
    """The folder of states, and which one, of a state's path, the folder's itself, or a run directory."""
    step = step_of(given)
    if "://" in given:
        return (given.rstrip("/").rpartition("/")[0], step) if step is not None else (given, None)
    path = Path(given).expanduser().absolute()
    if step is not None:
        return str(path.parent), step
    return str(path / "state" if (path / "state").is_dir() else path), None


def _write_all(file: IO[bytes], data: bytes) -> None:
    file.write(data)
