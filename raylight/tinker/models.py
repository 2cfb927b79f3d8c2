"""Models in training, and the order of their requests.

The requests of one model run in the order of their numbers, and the models take turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from raylight._utils.aio import BroadcastCondition, cancel_all
from raylight.http.errors import RequestError
from raylight.tinker.promises import ResultBody
from raylight.tinker.requests import AdamParams, LoraSpec
from raylight.types import JsonObject

if TYPE_CHECKING:
    from raylight.engines.protocol import LoraAdapter
    from raylight.tinker.datums import Batch

Work = Callable[[], Awaitable[ResultBody]]
GAP_S = 330.0
"""Seconds for which requests wait for an earlier one of their model. The SDK retries for 300 s."""


class ModelTurns:
    """The requests of one model, one after another by their numbers, from 0 on.

    A model has at most one request that waits for the trainer. So the models take turns: the lock is
    first in, first out.

    Args:
        trainer: lock of the trainer, which all models share.
        limit: requests that may wait.
    """

    def __init__(self, trainer: asyncio.Lock, limit: int, gap_s: float = GAP_S) -> None:
        self._trainer, self._limit, self._gap_s = trainer, limit, gap_s
        self._waiting: dict[int, tuple[Work | None, asyncio.Future[ResultBody]]] = {}
        self._next = 0
        self._changed = BroadcastCondition()
        self._task = asyncio.create_task(self._run())

    def submit(self, number: int | None, work: Work | None) -> asyncio.Future[ResultBody]:
        """Execute a request when its turn comes.

        Args:
            number: None for the one after all others.
            work: None for a request that was rejected; its number is used up.

        Raises:
            RequestError: 429, too many requests wait; 400, the number was used.
        """
        if number is None:
            number = max(self._waiting, default=self._next - 1) + 1
        if number < self._next or number in self._waiting:
            raise RequestError(f"seq_id: {number} was used before for this model")
        # the next one is always taken, since all others wait for it
        if len(self._waiting) >= self._limit and number != self._next:
            raise RequestError(
                f"{len(self._waiting)} requests of this model wait already; send this one again later", 429
            )
        future: asyncio.Future[ResultBody] = asyncio.get_running_loop().create_future()
        self._waiting[number] = work, future
        self._changed.notify_all()
        return future

    async def close(self) -> None:
        """End the requests that wait or run."""
        await cancel_all([self._task])
        for _, future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    async def _run(self) -> None:
        while True:
            await self._changed.wait_for(lambda: bool(self._waiting))
            if not await self._changed.wait_for(lambda: self._next in self._waiting, self._gap_s):
                self._fail_waiting()
                continue
            work, future = self._waiting.pop(self._next)
            self._next += 1
            if work is not None:
                await self._execute(work, future)

    async def _execute(self, work: Work, future: asyncio.Future[ResultBody]) -> None:
        try:
            async with self._trainer:
                future.set_result(await work())
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:  # of any kind: the client fetches it
            future.set_exception(error)

    def _fail_waiting(self) -> None:
        """Fail the requests after one that did not come: without it they would train something else."""
        error = RequestError(
            f"request {self._next} of this model did not arrive within {self._gap_s:g} s, and this one comes "
            "after it; send all of them again"
        )
        self._next = max(self._waiting) + 1
        for work, future in self._waiting.values():
            if work is not None:  # nobody waits for a rejected request
                future.set_exception(error)
        self._waiting.clear()


class AdapterTrainer(Protocol):
    """The methods of the trainer, which `LoraTrainer` describes."""

    def create(self, model_id: str, spec: LoraSpec) -> None: ...

    def remove(self, model_id: str) -> None: ...

    def forward_backward(
        self, model_id: str, batch: Batch, backward: bool
    ) -> tuple[float, list[np.ndarray]]: ...

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]: ...

    def export(self, model_id: str) -> LoraAdapter: ...

    def export_optimizer(self, model_id: str) -> dict[str, np.ndarray]: ...

    def load(self, model_id: str, adapter: LoraAdapter, optimizer: dict[str, np.ndarray] | None) -> None: ...


RESTARTED = "the trainer has died and was started again"
"""Reason for which adapters are lost."""


@dataclass(eq=False)
class TenantModel:
    """An adapter in training.

    Attributes:
        last_request_at: seconds since the epoch.
        loaded: path of the state from which it continued last, if it did.
        lost: reason for which its adapter is gone; None: it is there.
    """

    model_id: str
    session_id: str
    spec: LoraSpec
    user_metadata: JsonObject | None
    turns: ModelTurns
    last_request_at: float = field(default_factory=time.time)
    loaded: str | None = None
    lost: str | None = None


class Models:
    """The models in training.

    Args:
        limit: models at a time.
        max_waiting: requests of a model that may wait.
    """

    def __init__(self, limit: int, max_waiting: int) -> None:
        self._limit, self._max_waiting = limit, max_waiting
        self._models: dict[str, TenantModel] = {}
        self.trainer_lock = asyncio.Lock()
        """Lock of the trainer, which has one request at a time."""

    def add(
        self, model_id: str, session_id: str, spec: LoraSpec, user_metadata: JsonObject | None
    ) -> TenantModel:
        """Add a model.

        Raises:
            RequestError: 429, there are as many as there may be.
        """
        if len([model for model in self._models.values() if model.lost is None]) >= self._limit:
            raise RequestError(
                f"{self._limit} models are in training, as many as this server trains at a time; close "
                "another client, or start the server with a higher --max-models",
                429,
            )
        turns = ModelTurns(self.trainer_lock, self._max_waiting)
        model = TenantModel(model_id, session_id, spec, user_metadata, turns)
        self._models[model_id] = model
        return model

    def get(self, model_id: str) -> TenantModel:
        """Return a model.

        Raises:
            RequestError: 404, there is none of this id, or its adapter is lost.
        """
        if (model := self._models.get(model_id)) is None:
            raise RequestError(
                f"model_id: there is no model {model_id!r:.200} in training; it was unloaded, or its session "
                "has ended",
                404,
            )
        if model.lost is not None:
            raise RequestError(f"model_id: {model.lost}", 404)
        model.last_request_at = time.time()
        return model

    def find(self, wanted: Callable[[TenantModel], bool] = lambda model: True) -> list[TenantModel]:
        """Return the models that are wanted, oldest first."""
        return [model for model in self._models.values() if wanted(model)]

    def remove(self, model_id: str) -> None:
        """Remove a model; unknown ones are ignored."""
        self._models.pop(model_id, None)
