"""Training states in a folder or an object store: named by step, complete or absent, pruned by count.

Law: a state is complete if its marker `COMPLETE` exists. The marker names the content file, is written last,
and replaces a former marker atomically. A state that is written again stays the former one until the new one
is complete, wherever the process is killed in between.
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

from raylight.disk import disk_errors
from raylight.errors import CheckpointError, ConfigError
from raylight.files import atomic_file, sync_folder

COMPLETE = "COMPLETE"
CONTENT = "content"
"""Key in the marker for the name of the content file."""
STATE_NAME = re.compile(r"step-(\d+)$")

Dump = Callable[[IO[bytes]], object]
"""Writes the content of a state to a file."""


class TrainingStates:
    """Training states of a run.

    Args:
        url: a folder, or a URL that fsspec can open.

    Raises:
        ConfigError: fsspec cannot open the URL.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"checkpoint.path {url!r} cannot be opened: {error}; give a folder or a URL of fsspec"
            ) from None
        self.url = url
        protocol = self._fs.protocol
        self._local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def steps(self) -> list[int]:
        """Return the steps with a complete state, in ascending order."""
        return [step for step in self._all_steps() if self._fs.exists(f"{self._folder(step)}/{COMPLETE}")]

    def metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata written with a state."""
        return {name: value for name, value in self._marker(step).items() if name != CONTENT}

    def open(self, step: int) -> IO[bytes]:
        """Open the content of a state.

        Raises:
            CheckpointError: the content cannot be read.
        """
        try:
            return self._fs.open(f"{self._folder(step)}/{self._marker(step)[CONTENT]}", "rb")
        except OSError as error:
            raise CheckpointError(
                f"the training state of step {step} in {self.url} cannot be read here: {error}; use a "
                "folder that every learner can reach, or a URL"
            ) from None

    def write(self, step: int, metadata: dict[str, Any], dump: Dump | None = None) -> None:
        """Write a state. An interrupted write leaves all existing states unchanged.

        Args:
            metadata: JSON values, returned by `metadata`.
            dump: writes the content; None for a state without content, which stands for the model's own
                files.

        Raises:
            DiskError: the disk is full, read-only or gone.
            CheckpointError: the state cannot be written for another reason.
        """
        try:
            with disk_errors(self.url):
                self._write(step, metadata, dump)
        except OSError as error:
            raise CheckpointError(
                f"the training state of step {step} cannot be written to {self.url}: {error}; check "
                "permissions and free space, or choose another checkpoint.path"
            ) from error

    def prune(self, keep: int) -> None:
        """Remove all but the last `keep` states, and the remains of interrupted writes."""
        complete = self.steps()
        for step in self._all_steps():
            if step not in complete[-keep:]:
                self._remove(step)

    def remove_after(self, step: int) -> None:
        """Remove the states of later steps."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _folder(self, step: int) -> str:
        return f"{self._root}/step-{step}"

    def _all_steps(self) -> list[int]:
        """Return the steps with a state, complete or not, in ascending order."""
        self._fs.invalidate_cache()
        try:
            matches = [STATE_NAME.search(name.rstrip("/")) for name in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(int(match.group(1)) for match in matches if match)

    def _marker(self, step: int) -> dict[str, Any]:
        with self._fs.open(f"{self._folder(step)}/{COMPLETE}", "rb") as file:
            return json.loads(file.read())

    def _remove(self, step: int) -> None:
        """Remove a state, its marker first, so that an interrupted removal leaves an incomplete state."""
        marker = f"{self._folder(step)}/{COMPLETE}"
        if self._fs.exists(marker):
            self._fs.rm_file(marker)
        if self._fs.exists(self._folder(step)):  # an object store has no empty folders
            self._fs.rm(self._folder(step), recursive=True)

    def _write(self, step: int, metadata: dict[str, Any], dump: Dump | None) -> None:
        folder = self._folder(step)
        self._fs.makedirs(folder, exist_ok=True)
        content = f"training-{secrets.token_hex(4)}.pt" if dump is not None else None
        if dump is not None:
            self._write_file(f"{folder}/{content}", dump)
        marker = json.dumps({CONTENT: content, **metadata}).encode()
        self._write_file(f"{folder}/{COMPLETE}", lambda file: file.write(marker))
        self._fs.invalidate_cache()
        for name in self._fs.ls(folder, detail=False):
            # the content of the former state of this step, or the remains of an interrupted write
            if name.rpartition("/")[2] not in (COMPLETE, content):
                self._fs.rm_file(name)

    def _write_file(self, path: str, dump: Dump) -> None:
        """Write a file atomically; an object store does so by itself."""
        if not self._local:
            with self._fs.open(path, "wb") as file:
                dump(file)
            return
        with atomic_file(path) as file:
            dump(file)
        sync_folder(self._root)


class BackgroundWriter:
    """A thread that writes one state at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start a write. `wait` must be called before, since it raises the error of the previous write."""
        assert self._pending is None
        self._pending = self._thread.submit(work)

    def wait(self) -> None:
        """Wait until the pending write is done, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def parse_step(url: str) -> int | None:
    """Return the step in the name of a state's URL; None if the URL does not name a state."""
    match = STATE_NAME.search(url.rstrip("/"))
    return int(match.group(1)) if match else None


def locate_state(source: str) -> tuple[str, int | None]:
    """Return the URL of the training states and the step that `source` names.

    Args:
        source: path or URL of a state, of the folder of states, or of a run directory. The step is None
            unless it names a state.
    """
    step = parse_step(source)
    if "://" in source:
        return (source.rstrip("/").rpartition("/")[0], step) if step is not None else (source, None)
    path = Path(source).expanduser().absolute()
    if step is not None:
        return str(path.parent), step
    return str(path / "state" if (path / "state").is_dir() else path), None
