"""Models in training, and the clients that sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from raylight.engines.protocol import LoraAdapter
from raylight.http.errors import RequestError
from raylight.tinker.datums import Batch
from raylight.tinker.requests import AdamParams, LoraSpec
from raylight.tinker.turns import ModelTurns

RESTARTED = "the trainer has died and was started again"
"""Reason for which adapters are lost."""


class TenantTrainer(Protocol):
    """The trainer of all adapters; `LoraTrainer` documents the methods."""

    async def wait_loss(self) -> list[str]:
        """Wait until adapters are lost with the trainer's process; return their models."""
        ...

    async def create(self, model_id: str, spec: LoraSpec) -> None: ...

    async def remove(self, model_id: str) -> None: ...

    async def forward_backward(
        self, model_id: str, batch: Batch, backward: bool
    ) -> tuple[float, list[np.ndarray]]: ...

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]: ...

    async def export(self, model_id: str) -> LoraAdapter: ...

    async def export_optimizer(self, model_id: str) -> dict[str, np.ndarray]: ...

    async def load(
        self, model_id: str, adapter: LoraAdapter, optimizer: dict[str, np.ndarray] | None
    ) -> None: ...


@dataclass(eq=False)
class TenantModel:
    """An adapter in training.

    Attributes:
        last_request_at: seconds since the epoch.
        loaded: path of the state from which it continued, if it did.
        lost: reason for which its adapter is gone; None: it is there.
    """

    model_id: str
    session_id: str
    spec: LoraSpec
    user_metadata: dict[str, Any] | None
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

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._models

    def add(
        self, model_id: str, session_id: str, spec: LoraSpec, user_metadata: dict[str, Any] | None
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

    def pop(self, model_id: str) -> TenantModel | None:
        """Remove a model; return it, if there was one."""
        return self._models.pop(model_id, None)
