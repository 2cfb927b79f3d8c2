"""Sampling: clients, their requests, and the adapters that the engines load on demand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from raylight._utils.aio import BroadcastCondition, cancel_all
from raylight.errors import EngineStartError, WeightSyncError
from raylight.http.errors import RequestError, read_error
from raylight.tinker.checkpoints import CheckpointPath, Checkpoints
from raylight.tinker.datums import check_tokens
from raylight.tinker.promises import Promises, ResultBody
from raylight.tinker.requests import CreateSamplingSession, SampleBody, SamplingOptions
from raylight.tinker.settings import TinkerSettings
from raylight.tinker.wire import PROTOBUF, Sampled, write_samples
from raylight.types import JsonObject
from raylight.weights.client import CoordinatorClient
from raylight.weights.orders import BoxedRef

logger = logging.getLogger(__name__)


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
        self, settings: TinkerSettings, engines: Samplers, checkpoints: Checkpoints, promises: Promises
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
        calls: list[Coroutine[object, object, Any]] = [
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


CONNECT_TIMEOUT_S = 10.0
SAMPLE_TIMEOUT_S = 1800.0
"""Longest time of one request for samples."""
PROBE_TIMEOUT_S = 60.0
"""Longest time of a pass over a prompt."""


@dataclass(eq=False)
class ServedAdapter:
    """An adapter on the engines.

    Attributes:
        name: model name under which the engines serve it.
        users: requests that sample from it.
        loading: done when all engines have it.
        dropped: its last user takes it from the engines.
    """

    name: str
    users: int
    loading: asyncio.Future[None]
    dropped: bool = False


class Samplers:
    """The engines, with a limited number of adapters. The one whose last use is longest ago makes room.

    Args:
        url: base URL of the engines, without `/v1`.
        key: their API key.
        model: name of their model.
        fetch: returns a list with the object reference of the adapter of a `tinker://` path.
        limit: adapters on the engines at a time.
        timeout_s: longest time until all engines have an adapter.
    """

    def __init__(
        self,
        url: str,
        key: str,
        model: str,
        client: CoordinatorClient,
        fetch: Callable[[str], Awaitable[BoxedRef]],
        limit: int,
        timeout_s: float,
    ) -> None:
        self._model, self._client, self._fetch = model, client, fetch
        self._limit, self._timeout_s = limit, timeout_s
        self._served: dict[str, ServedAdapter] = {}  # ordered: the longest unused first
        self._releasing: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._changed = BroadcastCondition()
        self._probing = asyncio.Lock()  # an order waits behind one probe, and not behind those of all clients
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(SAMPLE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,  # the engines are in the cluster
        )

    async def sample(
        self, path: str | None, prompt: list[int], count: int, max_tokens: int, options: SamplingOptions
    ) -> list[Sampled]:
        """Return sampled responses.

        Args:
            path: `tinker://` path of an adapter; None for the model itself.

        Raises:
            RequestError: the engine rejects the request, or the adapter does not exist.
        """
        stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
        texts = [item for item in stop if isinstance(item, str)]
        tokens = [item for item in stop if isinstance(item, int)]
        async with self._adapter(path) as model:
            body = {
                "model": model,
                "prompt": prompt,
                "n": count if options.temperature else 1,
                "max_tokens": max_tokens,
                "temperature": options.temperature,
                "top_p": options.top_p,
                "logprobs": 0,
                "return_token_ids": True,
            }
            body |= {"top_k": options.top_k} if options.top_k > 0 else {}
            body |= {"seed": options.seed} if options.seed is not None else {}
            body |= {"ignore_eos": True} if options.stop == [] else {}
            body |= {"stop": texts} if texts else {}
            body |= {"stop_token_ids": tokens} if tokens else {}
            response = await self._http.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise read_error(response.status_code, response.content)
        samples = [_sampled(choice) for choice in response.json()["choices"]]
        return samples if options.temperature else samples * count  # vLLM rejects several greedy ones

    async def prompt_logprobs(self, path: str | None, prompt: list[int]) -> list[float | None]:
        """Return the log-probs of a prompt's tokens, None for the first."""
        if len(prompt) < 2:
            return [None] * len(prompt)
        async with self._adapter(path) as model, self._probing:
            adapter = None if path is None else model
            found = await self._client.probe(prompt, PROBE_TIMEOUT_S, adapter)
        return [None, *next(iter(found.values()))]

    async def drop(self, path: str) -> None:
        """Take an adapter from the engines once no request uses it; unknown ones are ignored."""
        if (served := self._served.pop(path, None)) is not None:
            self._changed.notify_all()
            served.dropped = True
            await self._release_dropped(served)

    async def close(self) -> None:
        await cancel_all(self._releasing)
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def _adapter(self, path: str | None) -> AsyncIterator[str]:
        """A context in which the engines have an adapter, with the model name to ask for."""
        if path is None:
            yield self._model
            return
        served = self._served.get(path)
        if served is not None and served.loading.done() and served.loading.exception() is not None:
            await self.drop(path)  # some engines may have it, or load it yet
        served = self._served.pop(path, None) or await self._make_room(path)
        self._served[path] = served  # the last used one
        served.users += 1
        try:
            await asyncio.shield(served.loading)
            yield served.name
        finally:
            served.users -= 1
            self._changed.notify_all()
            await self._release_dropped(served)

    async def _release_dropped(self, served: ServedAdapter) -> None:
        if served.dropped and not served.users:
            releasing = asyncio.create_task(self._release(served))
            self._releasing.add(releasing)  # the event loop keeps only a weak reference
            releasing.add_done_callback(self._releasing.discard)
            await asyncio.shield(releasing)  # a caller that is cancelled does not end it

    async def _release(self, served: ServedAdapter) -> None:
        await asyncio.wait([served.loading])  # its requests may have been cancelled meanwhile
        try:
            await self._client.release(served.name, self._timeout_s)
        except WeightSyncError:
            logger.warning("the adapter %s stays on the engines", served.name, exc_info=True)

    async def _make_room(self, path: str) -> ServedAdapter:
        """Begin to load an adapter, in the place of an unused one if there are too many."""
        await self._changed.wait_for(lambda: path in self._served or self._has_room())
        if (served := self._served.pop(path, None)) is not None:  # another request loads it
            return served
        old = None
        if len(self._served) >= self._limit:
            old = self._served.pop(next(other for other, a in self._served.items() if not a.users))
        name = f"sampler-{(number := next(self._numbers))}"
        return ServedAdapter(name, 0, asyncio.ensure_future(self._load(path, name, number, old)))

    def _has_room(self) -> bool:
        return len(self._served) < self._limit or any(not a.users for a in self._served.values())

    async def _load(self, path: str, name: str, number: int, old: ServedAdapter | None) -> None:
        if old is not None:
            await self._release(old)
        await self._client.pin(name, number, await self._fetch(path), self._timeout_s)


def _sampled(choice: JsonObject) -> Sampled:
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise RequestError(f"the engine ended a response with {reason!r}; send the request again", 503)
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(tokens) != len(logprobs):
        raise EngineStartError(
            f"the engine returned {len(logprobs)} log-probs for {len(tokens)} tokens; use an engine of "
            "raylight, transformers or vllm"
        )
    return Sampled(tokens, logprobs, reason)
