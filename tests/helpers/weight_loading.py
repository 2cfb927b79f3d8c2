"""Loading of named arrays into an engine as learners do it: by a transfer over gloo from a thread."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from raylight.weights.gloo import GlooSender
from raylight.weights.protocol import SenderSettings

TIMEOUT_S = 60.0


class DictSource:
    """A `WeightSource` of named arrays, in groups of `size`. After `lost_after` groups the stream breaks."""

    def __init__(self, weights: Mapping[str, Any], size: int = 4, lost_after: int | None = None) -> None:
        self._lost_after = lost_after
        self._pairs = [(name, torch.as_tensor(array).detach()) for name, array in weights.items()]
        self._size = size

    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=n, dtype=t.dtype, shape=tuple(t.shape)) for n, t in self._pairs]

    def groups(self) -> list[list[str]]:
        names = [name for name, _ in self._pairs]
        return [names[i : i + self._size] for i in range(0, len(names), self._size)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        tensors = [tensor for _, tensor in self._pairs]
        for i, names in enumerate(self.groups()):
            if i == self._lost_after:
                raise ConnectionError("another process was lost")
            yield list(names), tensors[i * self._size : (i + 1) * self._size]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._pairs)


Weights = Mapping[str, Any] | DictSource


class EngineClient:
    """A `SyncClient` that drives one engine, whose event loop is another thread's."""

    def __init__(self, engine: Any, version: int, mode: str, started: asyncio.Event) -> None:
        self._engine, self._version, self._mode, self._started = engine, version, mode, started
        self._loop = asyncio.get_running_loop()

    def _run(self, call: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._run(self._engine.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._run(self._start())

    async def _start(self) -> None:
        starting = asyncio.ensure_future(self._engine.start_weight_update(self._mode))
        await asyncio.sleep(0)
        self._started.set()
        await starting

    def update_weights(self, update_info: Any) -> None:
        self._run(self._engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run(self._engine.finish_weight_update(self._version))

    def send(self, update_info: Any) -> None:
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()


async def load_weights(
    engine: Any, version: int, weights: Weights, mode: str = "keep", timeout_s: float = TIMEOUT_S
) -> None:
    """Send weights to an engine. If that fails, the engine aborts the update."""
    await _load(engine, version, weights, mode, timeout_s, asyncio.Event())


async def begin_loading(
    engine: Any, version: int, weights: Weights, mode: str = "keep"
) -> asyncio.Task[None]:
    """Begin `load_weights`; return when the engine has been told to start the update."""
    started = asyncio.Event()
    loading = asyncio.create_task(_load(engine, version, weights, mode, TIMEOUT_S, started))
    starting = asyncio.create_task(started.wait())
    await asyncio.wait([loading, starting], return_when=asyncio.FIRST_COMPLETED)
    starting.cancel()
    return loading


async def _load(
    engine: Any,
    version: int,
    weights: Weights,
    mode: str,
    timeout_s: float,
    started: asyncio.Event,
) -> None:
    client = EngineClient(engine, version, mode, started)
    settings = SenderSettings(0, "127.0.0.1", (engine.workers,), timeout_s)

    def send() -> None:
        sender = GlooSender(
            settings, client, weights if isinstance(weights, DictSource) else DictSource(weights)
        )
        try:
            sender.send_weights()
        finally:
            sender.shutdown()

    try:
        await asyncio.to_thread(send)
    except BaseException:
        await engine.abort_weight_update()
        raise
