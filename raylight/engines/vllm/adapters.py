"""LoRA adapters in vLLM: immutable versions under a name, each removed when the last request that began with
it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest

from raylight.engines.protocol import LoraAdapter, UpdateMode
from raylight.engines.vllm.capture import Capture
from raylight.errors import WeightSyncError

logger = logging.getLogger(__name__)


@dataclass
class AdapterVersion:
    """One version of an adapter."""

    request: LoRARequest
    version: int
    folder: Path
    in_flight: int = 0
    retired: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """It is retired, and no request uses it any more."""


class VllmAdapters:
    """The adapters of one engine.

    Args:
        client: an `AsyncLLM`. Its `generate` is replaced, to see when requests of an adapter end.
    """

    def __init__(self, client: Any, capture: Capture) -> None:
        self.served: dict[str, LoRARequest] = {}
        """What vLLM's application looks a model's name up in."""
        self._client, self._capture = client, capture
        self._loaded: dict[int, AdapterVersion] = {}
        self._last_version: dict[str, int] = {}
        self._ids = itertools.count(1)
        self._removals: set[asyncio.Task[None]] = set()
        self._generate, client.generate = client.generate, self._follow

    async def load(self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode) -> None:
        if self._client.vllm_config.lora_config is None:
            raise WeightSyncError(
                "this engine takes no adapters; start it with enable_lora=True among its arguments"
            )
        if version <= (last := self._last_version.get(name, -1)):
            raise WeightSyncError(f"adapter {name!r} has version {last} already; {version} must be higher")
        folder = await asyncio.to_thread(write_peft, adapter)
        request = LoRARequest(name, next(self._ids), str(folder))
        try:
            await self._client.add_lora(request)
        except Exception as error:  # vLLM tells of an unfit adapter by a plain Exception
            shutil.rmtree(folder)
            raise WeightSyncError(f"vLLM does not take adapter {name!r}: {_last_line(error)}") from None
        self._last_version[name] = self._capture.adapter_versions[request.lora_int_id] = version
        self._loaded[request.lora_int_id] = AdapterVersion(request, version, folder)
        before = self.served.get(name)
        self.served[name] = request
        if before is not None:
            await self._retire(self._loaded[before.lora_int_id], mode)

    async def drop(self, name: str) -> None:
        request = self.served.pop(name, None)
        if request is not None:
            await self._retire(self._loaded[request.lora_int_id], "keep")

    def find(self, name: str) -> LoRARequest:
        """The adapter served as `name`."""
        if name not in self.served:
            raise WeightSyncError(
                f"there is no adapter {name!r}; there are: {', '.join(self.served) or 'none'}"
            )
        return self.served[name]

    def close(self) -> None:
        """Remove the files of every version."""
        for loaded in self._loaded.values():
            shutil.rmtree(loaded.folder, ignore_errors=True)

    async def _retire(self, loaded: AdapterVersion, mode: UpdateMode) -> None:
        loaded.retired = True
        if not loaded.in_flight:
            await self._remove(loaded)
            return
        if mode == "abort":
            states = self._client.output_processor.request_states.items()
            adapter = loaded.request.lora_int_id
            ids = [
                id for id, state in states if state.lora_request and state.lora_request.lora_int_id == adapter
            ]
            await self._client.abort(ids, internal=True)
        if mode != "keep":
            await loaded.ended.wait()

    async def _remove(self, loaded: AdapterVersion) -> None:
        del self._loaded[loaded.request.lora_int_id]
        await self._client.remove_lora(loaded.request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, loaded.folder)
        loaded.ended.set()

    def _follow(
        self, *args: Any, lora_request: LoRARequest | None = None, **named: Any
    ) -> AsyncIterator[Any]:
        """In place of the client's `generate`."""
        if lora_request is None:
            return self._generate(*args, **named)
        return self._generate_with(lora_request, *args, **named)

    async def _generate_with(self, request: LoRARequest, *args: Any, **named: Any) -> AsyncIterator[Any]:
        loaded = self._loaded.get(request.lora_int_id)
        if loaded is None or loaded.retired:  # replaced, or dropped, since the request's model was looked up
            if request.lora_name not in self.served:
                raise GracefulHTTPError(
                    f"the model `{request.lora_name}` is served no longer", HTTPStatus.NOT_FOUND
                )
            loaded = self._loaded[self.served[request.lora_name].lora_int_id]
        loaded.in_flight += 1
        try:
            async with contextlib.aclosing(
                self._generate(*args, lora_request=loaded.request, **named)
            ) as outputs:
                async for output in outputs:
                    yield output
        finally:
            loaded.in_flight -= 1
            if loaded.retired and not loaded.in_flight:
                removal = asyncio.ensure_future(self._remove(loaded))
                self._removals.add(removal)
                removal.add_done_callback(self._removed)

    def _removed(self, removal: asyncio.Task[None]) -> None:
        self._removals.discard(removal)
        if not removal.cancelled() and (error := removal.exception()) is not None:  # nobody awaits it
            logger.error("an adapter that no request uses any more could not be removed", exc_info=error)


def write_peft(adapter: LoraAdapter) -> Path:
    """A folder as peft saves it; vLLM reads it again when it needs an adapter that it dropped from its
    memory."""
    import torch
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp(prefix="raylight-adapter-"))
    (folder / "adapter_config.json").write_text(json.dumps(dict(adapter.config)))
    save_file(
        {name: torch.as_tensor(array).contiguous() for name, array in adapter.weights.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
