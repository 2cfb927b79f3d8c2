"""Checkpoints of tenants in a folder, under `tinker://` paths."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from safetensors.numpy import load_file, save_file

from raylight._utils.disk import disk_errors
from raylight._utils.files import OLD, PARTIAL, atomic_folder
from raylight.engines.protocol import LoraAdapter
from raylight.errors import CheckpointError
from raylight.http.errors import RequestError
from raylight.types import JsonObject
from raylight.weights.peft_files import ADAPTER_FILES

SCHEME = "tinker://"
Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[str, Kind] = {"weights": "weights", "sampler_weights": "sampler_weights"}
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
"""A model id or a name: no part of a path that leads elsewhere."""
CONFIG, WEIGHTS = ADAPTER_FILES
OPTIMIZER, RECORD = "optimizer.safetensors", "checkpoint.json"


@dataclass(frozen=True)
class CheckpointPath:
    """Place of a checkpoint: `tinker://MODEL/weights/NAME`, or `.../sampler_weights/NAME` for sampling."""

    model_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, path: str) -> Self:
        """Read a path.

        Raises:
            RequestError: it is not of this form.
        """
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise RequestError(
                f"path: {path!r:.200} is not of the form tinker://MODEL/weights/NAME or "
                "tinker://MODEL/sampler_weights/NAME"
            )
        return cls.of(parts[0], KINDS[parts[1]], parts[2])

    @classmethod
    def of(cls, model_id: str, kind: Kind, name: str) -> Self:
        """Return the path of a checkpoint.

        Raises:
            RequestError: a part is not a name.
        """
        for part in (model_id, name):
            if not PART.fullmatch(part) or part.endswith((PARTIAL, OLD)):
                raise RequestError(
                    f"path: {part!r:.200} is not a name: use up to 200 letters, digits and _.:-, and no "
                    f"ending {PARTIAL} or {OLD}"
                )
        return cls(model_id, kind, name)

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class CheckpointRecord:
    """Record of a checkpoint.

    Attributes:
        path: its `tinker://` path.
        created_at, expires_at: seconds since the epoch; None: it does not expire.
        lora: settings of the adapter.
        size_bytes: size of its files.
    """

    path: str
    base_model: str
    created_at: float
    expires_at: float | None
    lora: JsonObject
    size_bytes: int = 0


class Checkpoints:
    """Checkpoints in a folder. One process at a time writes there.

    Args:
        folder: made when the first checkpoint is written.
        clock: seconds since the epoch.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock

    def save(
        self,
        path: CheckpointPath,
        adapter: LoraAdapter,
        optimizer: Mapping[str, np.ndarray] | None,
        *,
        base_model: str,
        lora: JsonObject,
        ttl_s: float | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint; after a crash there is either the whole or nothing of it.

        Raises:
            CheckpointError: there is one of this name, and `overwrite` is False.
            DiskError: the disk is full.
        """
        place = self._place(path)
        if not overwrite and (place / RECORD).exists():
            raise CheckpointError(f"path: {path} exists already; choose another name, or overwrite=True")
        now = self._clock()
        with disk_errors(self._folder), atomic_folder(place) as new:
            (new / CONFIG).write_text(json.dumps(adapter.config))
            save_file(dict(adapter.weights), new / WEIGHTS)
            if optimizer is not None:
                save_file(dict(optimizer), new / OPTIMIZER)
            size = sum(file.stat().st_size for file in new.iterdir())
            expires = None if ttl_s is None else now + ttl_s
            record = CheckpointRecord(str(path), base_model, now, expires, lora, size)
            (new / RECORD).write_text(json.dumps(asdict(record)))
        self.drop_expired()

    def record(self, path: CheckpointPath) -> CheckpointRecord:
        """Return the record of a checkpoint.

        Raises:
            RequestError: 404, there is none, or it has expired.
        """
        place = self._place(path)
        if (place / RECORD).exists():
            record = _read_record(place)
            if record.expires_at is None or record.expires_at > self._clock():
                return record
        raise RequestError(f"path: there is no checkpoint {path}", 404)

    def load(self, path: CheckpointPath) -> LoraAdapter:
        """Return the adapter of a checkpoint.

        Raises:
            RequestError: as for `record`.
        """
        self.record(path)
        place = self._place(path)
        return LoraAdapter(json.loads((place / CONFIG).read_text()), load_file(place / WEIGHTS))

    def load_optimizer(self, path: CheckpointPath) -> dict[str, np.ndarray]:
        """Return the state of a checkpoint's optimizer.

        Raises:
            RequestError: as for `record`; 400, it was saved for sampling only.
        """
        self.record(path)
        file = self._place(path) / OPTIMIZER
        if not file.exists():
            raise RequestError(f"path: {path} has no optimizer; give the path that save_state returned")
        return load_file(file)

    def list(self, model_id: str | None = None) -> list[CheckpointRecord]:
        """Return the records of the checkpoints of a model, or of all models, oldest first."""
        now = self._clock()
        records = [_read_record(place) for place in self._places(model_id)]
        alive = [r for r in records if r.expires_at is None or r.expires_at > now]
        return sorted(alive, key=lambda record: record.created_at)

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint; unknown ones are ignored."""
        shutil.rmtree(self._place(path), ignore_errors=True)

    def drop_expired(self) -> None:
        """Delete the checkpoints whose time is over."""
        now = self._clock()
        for place in self._places(None):
            record = _read_record(place)
            if record.expires_at is not None and record.expires_at <= now:
                shutil.rmtree(place, ignore_errors=True)

    def _place(self, path: CheckpointPath) -> Path:
        return self._folder / path.model_id / path.kind / path.name

    def _places(self, model_id: str | None) -> Iterator[Path]:
        for file in self._folder.glob(f"{model_id or '*'}/*/*/{RECORD}"):
            if file.parent.parent.name in KINDS and file.parent.suffix not in (PARTIAL, OLD):
                yield file.parent


def _read_record(place: Path) -> CheckpointRecord:
    return CheckpointRecord(**json.loads((place / RECORD).read_text()))
