"""Training states in a folder or an object store: named by their step, complete or absent, kept by count. No torch.

A state is complete when its marker `COMPLETE` is there, which is written last. On a local disk the whole folder has another name
until then, and everything is on the disk before it gets its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import fsspec

from raylight.errors import CheckpointError, ConfigError

COMPLETE = "COMPLETE"
CONTENT = "training.pt"
NAME = re.compile(r"step-(\d+)$")
PARTIAL = ".partial"

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
        self._fs.invalidate_cache()
        try:
            found = [NAME.search(name.rstrip("/")) for name in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        steps = sorted(int(name.group(1)) for name in found if name)
        return [step for step in steps if self._fs.exists(f"{self._folder(step)}/{COMPLETE}")]

    def about(self, step: int) -> dict[str, Any]:
        """What was written about a state."""
        return json.loads(self._read(f"{self._folder(step)}/{COMPLETE}"))

    def open(self, step: int) -> IO[bytes]:
        """The content of a state.

        Raises:
            CheckpointError: it is not there.
        """
        try:
            return self._fs.open(f"{self._folder(step)}/{CONTENT}", "rb")
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
            if self._local:
                self._write_local(step, about, dump)
            else:
                self._write_remote(step, about, dump)
        except OSError as error:
            raise CheckpointError(f"the training state of step {step} cannot be written to {self.url}: {error}") from error

    def prune(self, keep: int) -> None:
        """Remove all but the last `keep` states, and what writes that were killed left."""
        for step in self.steps()[:-keep]:
            self._remove(step)
        if self._local:
            for partial in Path(self._root).glob(f"step-*{PARTIAL}"):
                shutil.rmtree(partial, ignore_errors=True)

    def remove_after(self, step: int) -> None:
        """Remove the states of later steps."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _folder(self, step: int) -> str:
        return f"{self._root}/step-{step}"

    def _read(self, path: str) -> bytes:
        with self._fs.open(path, "rb") as file:
            return file.read()

    def _remove(self, step: int) -> None:
        """The marker goes first, so that what is left of an interrupted removal is no state."""
        self._fs.rm_file(f"{self._folder(step)}/{COMPLETE}")
        self._fs.rm(self._folder(step), recursive=True)

    def _write_remote(self, step: int, about: dict[str, Any], dump: Dump | None) -> None:
        folder = self._folder(step)
        if self._fs.exists(f"{folder}/{COMPLETE}"):
            self._remove(step)
        self._fs.makedirs(folder, exist_ok=True)
        if dump is not None:
            with self._fs.open(f"{folder}/{CONTENT}", "wb") as file:
                dump(file)
        with self._fs.open(f"{folder}/{COMPLETE}", "wb") as file:
            file.write(json.dumps(about).encode())

    def _write_local(self, step: int, about: dict[str, Any], dump: Dump | None) -> None:
        folder = Path(self._folder(step))
        partial = folder.with_name(folder.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if dump is not None:
            _write_through(partial / CONTENT, dump)
        _write_through(partial / COMPLETE, lambda file: _put(file, json.dumps(about).encode()))
        _sync_folder(partial)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
        _sync_folder(folder.parent)


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


def _put(file: IO[bytes], data: bytes) -> None:
    file.write(data)


def _write_through(path: Path, dump: Dump) -> None:
    """Write a file so that it is on the disk."""
    with path.open("wb") as file:
        dump(file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
