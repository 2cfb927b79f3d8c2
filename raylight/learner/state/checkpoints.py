"""Training states in a folder or an object store: named by step, complete or absent, pruned by count.

A state is a folder with the marker `COMPLETE` and a content folder, to which every learner writes its part.

Law: a state is complete if its marker exists. The marker names the content folder, is written when all
learners have written, and replaces a former marker atomically. A state that is written again stays the former
one until the new one is complete, wherever processes are killed in between.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fsspec

from raylight._utils.disk import disk_errors
from raylight._utils.files import sync_folder, write_atomic
from raylight.errors import CheckpointError, ConfigError
from raylight.types import JsonObject

COMPLETE = "COMPLETE"
CONTENT = "content"
"""Key in the marker for the name of the content folder."""
OLD_SUFFIX = ".pt"
"""Suffix of the content of states that earlier versions of raylight wrote."""
STATE_NAME = re.compile(r"(?:^|/)step-(\d+)$")


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

    def metadata(self, step: int) -> JsonObject:
        return {name: value for name, value in self._marker(step).items() if name != CONTENT}

    def new_content(self, step: int) -> str:
        """Return a new folder or URL for the content of a state."""
        return f"{self.url.rstrip('/')}/step-{step}/training-{secrets.token_hex(4)}"

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[str]:
        """Yield the folder or URL of a state's content, and raise errors of reading as typed errors.

        Raises:
            CheckpointError: the content cannot be read, or an earlier version of raylight wrote it.
        """
        try:
            content = self._marker(step)[CONTENT]
            if content.endswith(OLD_SUFFIX):
                raise CheckpointError(
                    f"the training state of step {step} in {self.url} was written by an earlier version of "
                    "raylight, as a single file; resume with that version, or start fresh in another "
                    "output_dir"
                )
            yield f"{self.url.rstrip('/')}/step-{step}/{content}"
        except OSError as error:
            raise CheckpointError(
                f"the training state of step {step} in {self.url} cannot be read here: {error}; use a "
                "folder that every learner can reach, or a URL"
            ) from None

    @contextlib.contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """Raise errors of writing a state as typed errors.

        Raises:
            DiskError: the disk is full, read-only or gone.
            CheckpointError: the state cannot be written for another reason.
        """
        try:
            with disk_errors(self.url):
                yield
        except OSError as error:
            raise CheckpointError(
                f"the training state of step {step} cannot be written to {self.url}: {error}; check "
                "permissions and free space, or choose another checkpoint.path"
            ) from error

    def complete(self, step: int, metadata: JsonObject, content: str | None = None) -> None:
        """Mark a state as complete, and remove a former state of this step and remains of interrupted writes.

        Args:
            metadata: JSON values, returned by `metadata`.
            content: what `new_content` returned, with the content in it; None for a state without content,
                which stands for the model's own files.

        Raises:
            DiskError, CheckpointError: as for `writing`.
        """
        with self.writing(step):
            folder, name = self._folder(step), content.rpartition("/")[2] if content else None
            self._fs.makedirs(folder, exist_ok=True)
            if self._local and name is not None:
                sync_folder(f"{folder}/{name}")
            self._write_marker(step, {CONTENT: name, **metadata})
            self._fs.invalidate_cache()
            for path in self._fs.ls(folder, detail=False):
                # some object stores list a folder's own marker in it
                if path.rstrip("/").rpartition("/")[2] not in (COMPLETE, name, f"step-{step}"):
                    self._fs.rm(path, recursive=True)

    def prune(self, keep: int) -> None:
        """Remove all but the last `keep` states, and the remains of interrupted writes."""
        complete = self.steps()
        for step in self._all_steps():
            if step not in complete[-keep:]:
                self._remove(step)

    def remove_after(self, step: int) -> None:
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

    def _marker(self, step: int) -> JsonObject:
        with self._fs.open(f"{self._folder(step)}/{COMPLETE}", "rb") as file:
            text = file.read()
        try:
            return json.loads(text)
        except ValueError:
            raise CheckpointError(
                f"{self._folder(step)}/{COMPLETE} is damaged; remove the folder step-{step} to continue from "
                "the state before it"
            ) from None

    def _remove(self, step: int) -> None:
        """Remove a state, its marker first, so that an interrupted removal leaves an incomplete state."""
        marker = f"{self._folder(step)}/{COMPLETE}"
        if self._fs.exists(marker):
            self._fs.rm_file(marker)
        if self._fs.exists(self._folder(step)):  # an object store has no empty folders
            self._fs.rm(self._folder(step), recursive=True)

    def _write_marker(self, step: int, marker: JsonObject) -> None:
        """Write the marker atomically; an object store does so by itself."""
        path, text = f"{self._folder(step)}/{COMPLETE}", json.dumps(marker)
        if not self._local:
            self._fs.pipe_file(path, text.encode())
            return
        write_atomic(path, text)
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

    def wait(self, timeout_s: float) -> None:
        """Wait until the pending write is done, and raise its error.

        Raises:
            CheckpointError: it was not done within `timeout_s` seconds. It is still pending.
        """
        if self._pending is None:
            return
        _, late = futures.wait([self._pending], timeout_s)
        if late:
            raise CheckpointError(
                f"a training state was not written within {timeout_s:g} s: the storage is too slow or does "
                "not respond; use another checkpoint.path, save less often (checkpoint.every), or raise "
                "checkpoint.write_timeout_s"
            )
        pending, self._pending = self._pending, None
        pending.result()


def locate_state(source: str) -> tuple[str, int | None]:
    """Return the URL of the training states and the step that `source` names.

    Args:
        source: path or URL of a state, of the folder of states, or of a run directory. The step is None
            unless it names a state.
    """
    is_url, path = "://" in source, Path(source).expanduser().absolute()
    if not is_url and (path / "state").is_dir():  # a run directory, whatever its name
        return str(path / "state"), None
    url = source.rstrip("/") if is_url else str(path)
    if (match := STATE_NAME.search(url)) is None:
        return (source if is_url else url), None
    return url.rpartition("/")[0], int(match[1])
