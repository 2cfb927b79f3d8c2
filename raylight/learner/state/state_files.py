"""Files of a training state, by `torch.distributed.checkpoint`: every rank writes and reads its own shards.

A tensor is a shard of a distributed tensor, or a plain tensor that one of the ranks writes. Small values are
JSON documents in tensors of bytes, because torch would pickle them. The index of the tensors is a pickle of
torch's own; it is read by an unpickler that creates nothing but the classes of an index.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult

from raylight._utils.disk import find_disk_error
from raylight.errors import CheckpointError

Tensors = dict[str, torch.Tensor]

INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "float32", "float64", "float16", "bfloat16", "uint8", "int32", "int64", "strided"},
    "torch.serialization": {"_get_layout"},
    "builtins": {"set"},
}
"""Names in the index of a state, by module."""
TORCH_DAMAGE = "PytorchStreamReader"
"""Beginning of torch's errors for files that are cut off."""


class HostCopies:
    """Copies of a rank's tensors in host memory, which stay unchanged while training goes on.

    The memory is reused by the next copies, so a state must be written before the next one is copied.
    """

    def __init__(self) -> None:
        pinned = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )

    def copy(self, tensors: Tensors) -> Tensors:
        copies: Any = self._stager.stage(tensors)
        return copies


def write(tensors: Tensors, url: str, group: object = None) -> None:
    """Write a rank's tensors to a folder or URL. A collective of the group's ranks.

    Raises:
        Exception: a rank could not write; all ranks raise the error of the first one.
    """
    writer = _Writer(url, sync_files="://" not in url or url.startswith("file://"))
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise _first_failure(error) from None


class StateReader:
    """Reader of a state's tensors. Methods are collectives of the group's ranks.

    Args:
        url: folder or URL to which `write` wrote.

    Raises:
        CheckpointError: the index is damaged, or not of a state.
        OSError: the index cannot be read.
    """

    def __init__(self, url: str, group: object = None) -> None:
        self._url, self._storage, self._group = url, _IndexedReader(url), group
        stored = self._storage.index.state_dict_metadata
        self.tensors = {
            name: item for name, item in stored.items() if isinstance(item, TensorStorageMetadata)
        }
        """Properties and sizes of the tensors, by name."""

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors whose names begin with a prefix, by the rest of the name."""
        return {
            name.removeprefix(prefix): tuple(item.size)
            for name, item in self.tensors.items()
            if name.startswith(prefix)
        }

    def empty(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor to read into, sharded and placed like another one if that has its shape."""
        stored = self.tensors[name]
        if like is not None and like.shape == stored.size:
            return torch.zeros_like(like, dtype=stored.properties.dtype)
        device = "cpu" if like is None else like.device
        return torch.zeros(stored.size, dtype=stored.properties.dtype, device=device)

    def read(self, tensors: Tensors) -> None:
        """Fill `tensors` from the files. Ranks may pass different tensors.

        Raises:
            CheckpointError: a tensor is missing, or a file is damaged.
            OSError: a file cannot be read.
        """
        if missing := sorted(tensors.keys() - self.tensors.keys()):
            raise CheckpointError(
                f"the training state has no {missing[0]}; resume with the version of raylight that wrote it"
            )
        try:
            dcp.load(tensors, storage_reader=self._storage, process_group=self._group)
        except CheckpointException as error:
            failure = _first_failure(error)
            raise (_damage(self._url) if _is_damage(failure) else failure) from None

    def read_document(self, name: str) -> Any:
        """Return the JSON of a tensor that `document` made."""
        if name not in self.tensors:
            self.read({name: torch.empty(0)})
        content = self.empty(name)
        self.read({name: content})
        return parse_document(content)


def document(value: object) -> torch.Tensor:
    """Return JSON as a tensor of bytes, shape (bytes,)."""
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def parse_document(content: torch.Tensor) -> Any:
    """Return the JSON of a tensor that `document` returned."""
    return json.loads(content.numpy().tobytes())


class _Writer(FsspecWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's tensors, and raise the disk's own error.

        torch.save raises another one in its place, and only the error itself reaches the other ranks.
        """
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise find_disk_error(error, str(self.path)) or error from None


class _IndexedReader(FsspecReader):
    """A reader that reads the index once, without running what a pickle contains."""

    @functools.cached_property
    def index(self) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            content = file.read()
        try:
            return _IndexUnpickler(io.BytesIO(content)).load()
        except (EOFError, pickle.UnpicklingError):
            raise _damage(str(self.path)) from None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name not in INDEX_CLASSES.get(module, ()):
            raise CheckpointError(
                f"the index of the training state contains {module}.{name}, as no state does: the file is "
                "damaged, or was not written by raylight"
            )
        return super().find_class(module, name)


def _is_damage(error: BaseException) -> bool:
    """Return True for an error of reading a file that is cut off or has other content."""
    return isinstance(error, (EOFError, pickle.UnpicklingError)) or str(error).startswith(TORCH_DAMAGE)


def _damage(url: str) -> CheckpointError:
    return CheckpointError(
        f"the training state {url} is damaged: a file is cut off, or has other content; copy it again, or "
        "remove the folder of this step to resume from an earlier one"
    )


def _first_failure(error: CheckpointException) -> BaseException:
    """Return the error of the lowest rank that failed."""
    return error.failures[min(error.failures)][0]
