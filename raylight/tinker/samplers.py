"""Sampling from the engines, with the adapters that they are given when a request needs them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2

from raylight._utils.aio import BroadcastCondition
from raylight.errors import EngineStartError
from raylight.http.errors import RequestError, read_error
from raylight.tinker.requests import SamplingOptions
from raylight.tinker.wire import Sampled
from raylight.weights.client import CoordinatorClient

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
    """

    name: str
    users: int
    loading: asyncio.Future[None]


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
        fetch: Callable[[str], Awaitable[list[Any]]],
        limit: int,
        timeout_s: float,
    ) -> None:
        self._model, self._client, self._fetch = model, client, fetch
        self._limit, self._timeout_s = limit, timeout_s
        self._served: dict[str, ServedAdapter] = {}  # ordered: the longest unused first
        self._numbers = itertools.count(1)
        self._changed = BroadcastCondition()
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
            RequestError: the engine rejects the request, or there is no such adapter.
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
        async with self._adapter(path) as model:
            adapter = None if path is None else model
            found = await self._client.probe(prompt, PROBE_TIMEOUT_S, adapter)
        return [None, *next(iter(found.values()))]

    async def drop(self, path: str) -> None:
        """Take an adapter from the engines. Requests in flight go on with it; unknown ones are ignored."""
        if (served := self._served.pop(path, None)) is not None:
            self._changed.notify_all()
            await self._client.release(served.name, self._timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def _adapter(self, path: str | None) -> AsyncIterator[str]:
        """A context in which the engines have an adapter, with the model name to ask for."""
        if path is None:
            yield self._model
            return
        served = self._served.pop(path, None)
        if served is None or (served.loading.done() and served.loading.exception() is not None):
            served = await self._make_room(path)
        self._served[path] = served  # the last used one
        served.users += 1
        try:
            await asyncio.shield(served.loading)
            yield served.name
        finally:
            served.users -= 1
            self._changed.notify_all()

    async def _make_room(self, path: str) -> ServedAdapter:
        """Begin to load an adapter, in the place of an unused one if there are too many."""
        await self._changed.wait_for(lambda: path in self._served or self._has_room())
        if (served := self._served.pop(path, None)) is not None:  # another request loads it
            return served
        unused = None
        if len(self._served) >= self._limit:
            unused = next(other for other, adapter in self._served.items() if not adapter.users)
        name = f"sampler-{(number := next(self._numbers))}"
        old = None if unused is None else self._served.pop(unused)
        return ServedAdapter(name, 0, asyncio.ensure_future(self._load(path, name, number, old)))

    def _has_room(self) -> bool:
        return len(self._served) < self._limit or any(not a.users for a in self._served.values())

    async def _load(self, path: str, name: str, number: int, old: ServedAdapter | None) -> None:
        if old is not None:
            await self._client.release(old.name, self._timeout_s)
        await self._client.pin(name, number, await self._fetch(path), self._timeout_s)


def _sampled(choice: dict[str, Any]) -> Sampled:
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
