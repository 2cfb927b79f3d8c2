"""Calls of a rollout with budgets, through all layers and with the store: limited, then rejected in the
dialect's own shape."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from capture_helpers import ENGINE, FakeApp
from gateway_helpers import SECRET, within
from store_helpers import Box, ids_of, open_box

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.types import Rollout

HI: Any = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 50},
}


class Site:
    """A store, and replicas whose fake engines answer with five tokens."""

    def __init__(self, box: Box) -> None:
        self.box, self.app = box, FakeApp()
        self.recorders: list[Recorder] = []

    def replica(self) -> httpx.AsyncClient:
        recorder = Recorder(self.box.store.capture)
        self.recorders.append(recorder)
        app = build_gateway(self.app, ENGINE, SECRET, recorder, self.box.store)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://replica")

    @property
    def limits(self) -> list[int | None]:
        return [context and context.max_tokens for context in self.app.contexts]


@asynccontextmanager
async def opened() -> AsyncIterator[Site]:
    async with within(), open_box() as box:
        site = Site(box)
        yield site
        for recorder in site.recorders:
            await recorder.aclose()


async def post(
    client: httpx.AsyncClient, rollout: Rollout, path: str = "/v1/chat/completions", **fields: Any
) -> httpx.Response:
    ids = ids_of(rollout)
    use = "train-budgets" if rollout.config.has_budgets else "train"
    headers = {"authorization": f"Bearer {attempt_key(SECRET, *ids, use)}"}
    body = {"model": "policy"} | REQUESTS[path] | fields
    return await client.post(attempt_path(*ids) + path, headers=headers, json=body)


@pytest.mark.parametrize("path", list(REQUESTS))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_beyond_the_turns_is_rejected_in_every_dialect(path: str, stream: bool) -> None:
    async with opened() as site:
        rollout, client = await site.box.take(max_turns=2), site.replica()
        for _ in range(2):
            assert (await post(client, rollout, path, stream=stream)).status_code == 200
        answer = await post(client, rollout, path, stream=stream)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "max_turns" in error["message"]
        assert "rollout_truncated" in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "invalid_request_error"
        else:
            assert error["code"] == "rollout_truncated"
        assert len(site.app.requests) == 2
        assert await site.box.store.find_truncation(rollout) == "max_turns"
        assert (await site.box.store.finish_attempt(rollout, "succeeded")).status == "succeeded"


async def test_a_call_samples_at_most_the_tokens_that_are_left() -> None:
    async with opened() as site:
        rollout, client = await site.box.take(max_tokens=12), site.replica()
        for _ in range(2):  # the record of the first call may reach the store after the second begins
            await post(client, rollout)
        await post(client, rollout, n=2)
        assert site.limits == [12, 7, 1]
        assert (await post(client, rollout)).status_code == 400  # the fake engine has sampled more
        assert await site.box.store.find_truncation(rollout) == "max_tokens"


async def test_less_than_a_token_for_each_choice_is_nothing() -> None:
    async with opened() as site:
        rollout, client = await site.box.take(max_tokens=6), site.replica()
        await post(client, rollout)
        assert (await post(client, rollout, n=2)).status_code == 400
        assert (await post(client, rollout)).status_code == 200


async def test_tokens_in_flight_count_and_so_do_those_of_other_replicas() -> None:
    async with opened() as site:
        rollout = await site.box.take(max_tokens=100)
        one, other = site.replica(), site.replica()
        await post(one, rollout)
        await site.recorders[0]._empty.wait_for(lambda: site.recorders[0].stats.unsent == 0, 5)
        site.app.gate.clear()
        site.app.sampling.clear()
        waiting = asyncio.create_task(post(other, rollout))
        await site.app.sampling.wait()  # its first token is sampled
        second = asyncio.create_task(post(other, rollout))
        while len(site.app.contexts) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        site.app.gate.set()
        await asyncio.gather(waiting, second)
        assert site.limits == [100, 95, 94]


async def test_the_time_ends_further_calls_only() -> None:
    async with opened() as site:
        rollout, client = await site.box.take(max_seconds=30), site.replica()
        site.app.gate.clear()
        running = asyncio.create_task(post(client, rollout))
        await site.app.sampling.wait()
        site.box.clock.now += 31
        assert (await post(client, rollout)).status_code == 400
        site.app.gate.set()
        assert (await running).status_code == 200
        assert (await site.box.attempt(rollout)).truncated == "max_seconds"


async def test_rollouts_without_budgets_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as site:

        async def fail(*args: Any) -> Any:
            raise AssertionError("the store was asked")

        monkeypatch.setattr(type(site.box.store), "check_budgets", fail)
        rollout, client = await site.box.take(), site.replica()
        assert (await post(client, rollout)).status_code == 200
        assert site.limits == [None]


async def test_the_keys_differ_and_call_models_only() -> None:
    async with opened() as site:
        rollout, client = await site.box.take(max_turns=1), site.replica()
        ids = ids_of(rollout)
        keys = {
            attempt_key(SECRET, *ids, use) for use in ("model", "train", "model-budgets", "train-budgets")
        }
        assert len(keys) == 4
        limited = attempt_key(SECRET, *ids, "train-budgets")
        answer = await client.post(
            attempt_path(*ids) + "/v1/traces", headers={"authorization": f"Bearer {limited}"}
        )
        assert answer.status_code == 403  # it calls models only
