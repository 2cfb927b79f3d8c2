"""LoRA adapters in vLLM.

Each version is immutable, and removed when the last request that uses it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from raylight.engines.protocol import LoraAdapter, UpdateMode
from raylight.engines.vllm.adapter_files import MODEL, TEXT_PART, AdapterFiles
from raylight.engines.vllm.args import has_text_part
from raylight.engines.vllm.capture import Capture
from raylight.errors import WeightSyncError

logger = logging.getLogger(__name__)


@dataclass
class AdapterVersion:
    """One version of an adapter.

    Attributes:
        request: what vLLM's engine receives. Its name is the version's, because the cached keys and
            values of a prefix are found by this name.
    """

    request: LoRARequest
    version: int
    folder: Path
    in_flight: int = 0
    retired: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the version is retired and no request uses it."""


class VllmAdapters:
    """The adapters of one engine.

    Args:
        client: an `AsyncLLM`. Its `generate` is replaced, to track the requests of each adapter.
    """

    def __init__(self, client: AsyncLLM, capture: Capture) -> None:
        self.served: dict[str, LoRARequest] = {}
        """Model name -> adapter under this name; vLLM's application looks names up here."""
        self._client, self._capture, self._files = client, capture, AdapterFiles()
        self._loaded: dict[int, AdapterVersion] = {}
        self._last_version: dict[str, int] = {}
        model = client.vllm_config.model_config
        is_part = has_text_part(model.hf_config) and model.multimodal_config.language_model_only
        self._prefix = TEXT_PART if is_part else MODEL
        self._ids = itertools.count(1)
        self._removals: set[asyncio.Task[None]] = set()
        self._generate, client.generate = client.generate, self._tracked_generate

    async def load(self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode) -> None:
        """Serve a new version of an adapter, replacing the previous one.

        Raises:
            WeightSyncError: the adapter does not fit, the version is not new, or vLLM runs without LoRA.
        """
        if self._client.vllm_config.lora_config is None:
            raise WeightSyncError(
                "this engine was started without LoRA; set engine.max_adapters or the argument enable_lora"
            )
        if version <= (last := self._last_version.get(name, -1)):
            raise WeightSyncError(
                f"adapter {name!r}: version {version} is not newer than {last}; versions are never reused"
            )
        folder = await asyncio.to_thread(self._files.write, adapter, self._prefix)
        request = LoRARequest(f"{name}@{version}", next(self._ids), str(folder))
        try:
            await self._client.add_lora(request)
        except Exception as error:  # vLLM raises a plain Exception for an adapter that does not fit
            shutil.rmtree(folder)
            raise WeightSyncError(f"vLLM rejected adapter {name!r}: {_last_line(error)}") from None
        if unused := await self._unused_layers(request.lora_int_id):
            await self._client.remove_lora(request.lora_int_id)
            shutil.rmtree(folder)
            raise WeightSyncError(
                f"adapter {name!r} has layers that vLLM's model lacks: {', '.join(unused[:3])} "
                f"({len(unused)} in all)"
            )
        self._last_version[name] = self._capture.adapter_versions[request.lora_int_id] = version
        self._loaded[request.lora_int_id] = AdapterVersion(request, version, folder)
        previous = self.served.get(name)
        self.served[name] = LoRARequest(name, request.lora_int_id, str(folder))
        if previous is not None:
            await self._retire(self._loaded[previous.lora_int_id], mode)

    async def drop(self, name: str) -> None:
        """Stop serving an adapter; unknown names are ignored."""
        request = self.served.pop(name, None)
        if request is not None:
            await self._retire(self._loaded[request.lora_int_id], "keep")

    def find(self, name: str) -> LoRARequest:
        """Return the adapter served as `name`.

        Raises:
            WeightSyncError: there is none.
        """
        if name not in self.served:
            raise WeightSyncError(
                f"there is no adapter {name!r}; there are: {', '.join(self.served) or 'none'}"
            )
        return self.served[name]

    def close(self) -> None:
        """Delete the files of all versions."""
        self._files.close()

    async def _unused_layers(self, adapter: int) -> list[str]:
        """Return the layers of a loaded adapter that no worker's model has; vLLM ignores them silently."""
        found = await self._client.collective_rpc("raylight_unused_adapter_layers", args=(adapter,))
        return sorted(set.intersection(*map(set, found)))

    async def _retire(self, loaded: AdapterVersion, mode: UpdateMode) -> None:
        """Remove a version once its requests have ended: under "keep" later, else before this returns."""
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

    def _tracked_generate(
        self, *args: object, lora_request: LoRARequest | None = None, **kwargs: object
    ) -> AsyncIterator[object]:
        """Replacement of the client's `generate`."""
        if lora_request is None:
            return self._generate(*args, **kwargs)
        return self._generate_with(lora_request, *args, **kwargs)

    async def _generate_with(
        self, request: LoRARequest, *args: object, **kwargs: object
    ) -> AsyncIterator[object]:
        loaded = self._loaded.get(request.lora_int_id)
        if loaded is None or loaded.retired:  # replaced or dropped after the request's model was looked up
            if request.lora_name not in self.served:
                raise GracefulHTTPError(
                    f"the model `{request.lora_name}` is no longer served", HTTPStatus.NOT_FOUND
                )
            loaded = self._loaded[self.served[request.lora_name].lora_int_id]
        loaded.in_flight += 1
        try:
            async with contextlib.aclosing(
                self._generate(*args, lora_request=loaded.request, **kwargs)
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
        if not removal.cancelled() and (error := removal.exception()) is not None:  # never awaited
            logger.error("an unused adapter could not be removed", exc_info=error)


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
