"""Toy transport: weights travel through files, one for each layer group, in a folder all processes share."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from raylight.weights.protocol import SenderSettings, SyncClient, WeightStream
from raylight.weights.transports import Transport


class FileSender:
    def __init__(self, settings: SenderSettings, client: SyncClient, source: WeightStream) -> None:
        self._is_first, self._client, self._source = settings.rank == 0, client, source

    def send_weights(self) -> None:
        names, shapes = zip(*((p.name, list(p.shape)) for p in self._source.metadata()), strict=True)
        with tempfile.TemporaryDirectory() as folder:
            for i, group in enumerate(self._source.iter_groups()):  # a collective of all ranks
                if self._is_first:
                    torch.save(list(zip(*group, strict=True)), Path(folder, f"{i:05}.pt"))
            if self._is_first:
                self._client.send({"names": names, "shapes": shapes, "folder": folder})

    def shutdown(self) -> None: ...


class FileReceiver:
    def init(self, info: Mapping[str, Any], worker: int = 0) -> None: ...

    def receive(self, info: Mapping[str, Any]) -> Iterator[list[tuple[str, Any]]]:
        for path in sorted(Path(info["folder"]).iterdir()):
            yield torch.load(path)

    def close(self) -> None: ...


transport = Transport(f"{__name__}:FileSender", "files", f"{__name__}:FileReceiver", needs_gpu=False)
