"""The engine `transformers`: continuous batching on plain transformers, for a CPU or one small GPU.

transformers' own continuous batching is not used: on a CPU it is slower than this engine, it has no seed per
request, and it shares cached prefixes across weight updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from starlette.types import ASGIApp

from raylight.config import cpu_threads
from raylight.engines.protocol import EngineLoad, EngineSettings, LoraAdapter, UpdateMode
from raylight.engines.transformers.app import build_app
from raylight.engines.transformers.linear import use_fast_linear
from raylight.engines.transformers.sampler import Sampler
from raylight.engines.transformers.worker import CLOSED
from raylight.errors import ConfigError, WeightSyncError
from raylight.http.errors import RequestError
from raylight.weights.transports import make_receiver

T = TypeVar("T")
NO_SLEEP = "sleep frees memory only on a GPU; nothing was done"


def build_engine(settings: EngineSettings, **args: Any) -> TransformersEngine:
    """Make the engine of a replica.

    Args:
        args: `tool_parser`, `reasoning` and `max_new_tokens` of the engine.

    Raises:
        ConfigError: `max_new_tokens` is no positive integer.
    """
    limit = args.get("max_new_tokens")
    if limit is not None and not (type(limit) is int and limit > 0):
        raise ConfigError(f"engine.args['max_new_tokens'] is {limit!r:.80}; give a positive integer")
    config = settings.config
    torch.set_num_threads(cpu_threads(config))
    return TransformersEngine(
        settings.model_path,
        settings.model,
        dtype=config.dtype,
        slots=config.max_concurrent,
        max_waiting=config.max_waiting,
        max_model_len=config.max_model_len,
        seed=settings.seed,
        device=settings.device,
        transport=config.weight_transfer,
        **args,
    )


class TransformersEngine(Sampler):
    """`Engine` on `AutoModelForCausalLM`.

    Weights, adapters and sleep change between two decoding steps, on the engine's thread.

    Args:
        transport: name of the transport of weights.
    """

    workers = 1
    fast_linear = True
    """Compute linear layers by the faster kernels of `linear.py`, where they are."""

    def __init__(self, path: str, model: str, *, transport: str = "auto", **settings: Any) -> None:
        super().__init__(path, model, **settings)
        if self.fast_linear and self._decoder.device.type == "cpu":
            use_fast_linear(self._decoder.module)
        self._receiver = make_receiver(transport)
        self._incomplete = False
        """True once an update has loaded weights, until it is complete."""

    async def app(self) -> ASGIApp:
        return build_app(self)

    @property
    def version(self) -> int:
        """Version of the weights that it samples with."""
        return self._worker.version

    # weights and adapters

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        await asyncio.to_thread(self._receiver.init, info)

    async def start_weight_update(self, mode: UpdateMode = "keep") -> None:
        def start() -> None:
            self._worker.updating = True
            if mode == "abort":
                self._worker.abort(None)

        try:
            await self._run(start, mode)
        except BaseException:
            self._receiver.close()  # so that the sender does not wait for this engine
            raise

    async def update_weights(self, info: Any) -> None:
        def receive() -> None:
            try:
                self._decoder.check_weights(dict(zip(info["names"], info["shapes"], strict=True)))
                for group in self._receiver.receive(info):
                    self._incomplete = True
                    self._decoder.load(group)
            except BaseException:
                self._receiver.close()  # so that the sender does not wait for this engine
                raise

        await self._run(receive)

    async def finish_weight_update(self, version: int) -> None:
        """Sample with the new weights.

        Under "keep" the cache of the sequences in flight is recomputed, so that each later token is sampled
        from exactly the new weights.
        """

        def finish() -> None:
            self._worker.version = version
            self._worker.recompute()
            self._worker.updating = self._incomplete = False

        await self._run(finish)

    async def abort_weight_update(self) -> None:
        def abort() -> None:
            self._receiver.close()
            self._worker.updating = self._incomplete

        await self._run(abort)

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        def load() -> None:
            self._decoder.adapters.load(name, version, adapter)
            if mode == "abort":
                self._worker.abort(name)
            self._worker.unload_unused()

        await self._run(load, mode)

    async def drop_adapter(self, name: str) -> None:
        def drop() -> None:
            self._decoder.adapters.drop(name)
            self._worker.unload_unused()

        await self._run(drop)

    async def logprobs(
        self, ids: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> list[float]:
        if not 2 <= len(ids) <= self.max_model_len or min(ids) < 0 or max(ids) >= self.vocab_size:
            raise WeightSyncError(
                f"log-probs need 2 to {self.max_model_len} token ids from 0 to {self.vocab_size - 1}"
            )

        def compute() -> list[float]:
            loaded = self._decoder.adapters.find(adapter) if adapter is not None else None
            if adapter is not None and loaded is None:
                raise WeightSyncError(f"there is no adapter {adapter!r}")
            if self._worker.asleep:
                raise WeightSyncError("the engine is asleep; wake it first")
            if self._incomplete:
                raise WeightSyncError("an update of the weights was broken off; publish a new version")
            return self._decoder.logprobs(ids, loaded, temperature)

        return await self._run(compute)

    async def _run(self, action: Callable[[], T], mode: UpdateMode = "keep") -> T:
        """Run an action between two decoding steps; under "wait", when nothing is in flight."""
        try:
            return await self._worker.run(action, when_idle=mode == "wait")
        except RequestError as error:
            raise WeightSyncError(str(error)) from error

    # life cycle

    async def sleep(self, level: int = 1) -> str | None:
        if self._decoder.device.type == "cpu":
            return NO_SLEEP

        def sleep() -> None:
            self._worker.recompute()
            self._decoder.offload()
            self._worker.asleep = True

        await self._run(sleep)
        return None

    async def wake(self) -> None:
        def wake() -> None:
            self._decoder.reload()
            self._worker.asleep = False

        await self._run(wake)

    def load(self) -> EngineLoad:
        """Return the current load. A sequence has a slot for as long as it runs, so none is preempted."""
        worker, decoder = self._worker, self._decoder
        active = list(decoder.active)
        capacity = decoder.slots * self.max_model_len
        return EngineLoad(
            kv_use=sum(sequence.length for sequence in active) / capacity,
            running=len(active),
            waiting=max(self._in_flight - len(active), 0),
            capacity=capacity,
            paused=worker.asleep or worker.updating,
        )

    async def check_health(self) -> None:
        if self._worker.closed or not self._worker.thread.is_alive():
            reason = CLOSED if self._worker.closed else "the engine's thread has died"
            raise RequestError(reason, 503, "overloaded_error")

    def close(self) -> None:
        self._worker.close()
        self._receiver.close()
