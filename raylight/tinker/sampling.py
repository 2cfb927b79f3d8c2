"""Clients that sample: from the model itself, from saved weights, or from weights without a name."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from raylight._utils.aio import cancel_all
from raylight.http.errors import RequestError
from raylight.tinker.checkpoints import CheckpointPath, Checkpoints
from raylight.tinker.datums import check_tokens
from raylight.tinker.promises import Promises, ResultBody
from raylight.tinker.requests import CreateSamplingSession, SampleBody, SamplingOptions
from raylight.tinker.settings import TinkerSettings
from raylight.tinker.wire import PROTOBUF, Sampled, write_samples


class SamplingEngines(Protocol):
    """The engines; `Samplers` documents the methods."""

    async def sample(
        self, path: str | None, prompt: list[int], count: int, max_tokens: int, options: SamplingOptions
    ) -> list[Sampled]: ...

    async def prompt_logprobs(self, path: str | None, prompt: list[int]) -> list[float | None]: ...

    async def drop(self, path: str) -> None: ...


@dataclass(frozen=True)
class SamplingSession:
    """A client that samples.

    Attributes:
        path: `tinker://` path of its weights; None: it samples from the model itself.
        model_id: model whose weights without a name these are; None: the weights stay.
    """

    session_id: str
    path: str | None
    model_id: str | None = None


class SamplingClients:
    """The clients that sample, and their requests."""

    def __init__(
        self, settings: TinkerSettings, engines: SamplingEngines, checkpoints: Checkpoints, promises: Promises
    ) -> None:
        self._settings, self._engines = settings, engines
        self._checkpoints, self._promises = checkpoints, promises
        self._clients: dict[str, SamplingSession] = {}
        self._sampling = 0
        """Responses that wait or are sampled."""
        self._tasks: dict[str, asyncio.Task[ResultBody]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def ids_of(self, session_id: str) -> list[str]:
        """Return the ids of a session's clients, oldest first."""
        return [name for name, client in self._clients.items() if client.session_id == session_id]

    def get(self, sampler_id: str) -> SamplingSession:
        """Return a client.

        Raises:
            RequestError: 404, there is none of this id.
        """
        if (client := self._clients.get(sampler_id)) is None:
            raise RequestError(
                f"sampling_session_id: there is no sampler {sampler_id!r:.200}: its session has ended, or "
                f"its weights were followed by {self._settings.kept_samplers} newer ones without a name",
                404,
            )
        return client

    def create(self, body: CreateSamplingSession) -> str:
        """Add a client of the model itself or of saved weights; return its id."""
        sampler_id = _sampler_id(body.session_id, body.sampling_session_seq_id)
        path = self._path(body.model_path, body.base_model)
        self._clients[sampler_id] = SamplingSession(body.session_id, path)
        return sampler_id

    async def add_ephemeral(self, session_id: str, number: int | None, path: str, model_id: str) -> str:
        """Add a client of weights without a name; return its id. The oldest such weights of the model are
        dropped."""
        sampler_id = _sampler_id(session_id, number)
        self._clients[sampler_id] = SamplingSession(session_id, path, model_id)
        own = [name for name, client in self._clients.items() if client.model_id == model_id]
        await self._remove(own[: -self._settings.kept_samplers])
        return sampler_id

    def sample(self, body: SampleBody) -> str:
        """Sample responses to a prompt; return the request's id."""
        if body.record_stability_info:
            self._settings.check_stability_info()
        if body.sampling_session_id is not None:
            path = self.get(body.sampling_session_id).path
        else:
            path = self._path(body.model_path, body.base_model)
        request_id = f"sample:{uuid.uuid4()}"
        if body.sampling_session_id is not None and body.seq_id is not None:
            request_id = f"{body.sampling_session_id}:{body.seq_id}"
            if request_id in self._promises:  # a repeated request
                return request_id
        prompt, limit = body.prompt.tokens, self._settings.max_model_len
        check_tokens("prompt", np.asarray(prompt), self._settings.vocabulary, limit - 1)
        if self._sampling and self._sampling + body.num_samples > self._settings.max_samples:
            raise RequestError(f"{self._sampling} responses wait or are sampled; send this one later", 429)
        self._sampling += body.num_samples
        task = self._tasks[request_id] = asyncio.create_task(self._sample(path, prompt, body))
        task.add_done_callback(lambda task: self._finish(request_id, body.num_samples))
        self._promises.add(request_id, task)
        return request_id

    async def drop(self, path: str) -> None:
        """Take weights from the engines, because others get their name."""
        await self._engines.drop(path)

    async def end_session(self, session_id: str) -> None:
        """Remove a session's clients, and their weights without a name."""
        await self._remove(self.ids_of(session_id))

    async def close(self) -> None:
        """Cancel all requests."""
        await cancel_all(self._tasks.values())

    async def _remove(self, sampler_ids: list[str]) -> None:
        for client in [self._clients.pop(name) for name in sampler_ids]:
            if client.model_id is not None and client.path is not None:
                await self._engines.drop(client.path)
                await asyncio.to_thread(self._checkpoints.delete, CheckpointPath.parse(client.path))

    async def _sample(self, path: str | None, prompt: list[int], body: SampleBody) -> ResultBody:
        room = self._settings.max_model_len - len(prompt)
        max_tokens = min(body.sampling_params.max_tokens or room, room)
        calls: list[Coroutine[Any, Any, Any]] = [
            self._engines.sample(path, prompt, body.num_samples, max_tokens, body.sampling_params)
        ]
        if body.prompt_logprobs:
            calls.append(self._engines.prompt_logprobs(path, prompt))
        samples, *logprobs = await asyncio.gather(*calls)
        return ResultBody(write_samples(samples, logprobs[0] if logprobs else None), PROTOBUF)

    def _finish(self, request_id: str, count: int) -> None:
        del self._tasks[request_id]
        self._sampling -= count

    def _path(self, path: str | None, base_model: str | None) -> str | None:
        """Return the path of the weights that a client asks for; None for the model itself.

        Raises:
            RequestError: there are no such weights, or no such model.
        """
        if path is not None:
            record = self._checkpoints.record(CheckpointPath.parse(path))
            self._settings.check_base_model(record.base_model)
            return path
        if base_model is None:
            raise RequestError("model_path: give it, or base_model")
        self._settings.check_base_model(base_model)
        return None


def _sampler_id(session_id: str, number: int | None) -> str:
    return f"{session_id}:sample:{uuid.uuid4().hex if number is None else number}"
