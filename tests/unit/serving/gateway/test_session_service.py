"""Sessions over HTTP, on a real store and the whole application of a replica."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from app_clients import openai_client
from capture_helpers import ENGINE, FakeApp
from gateway_helpers import BODY, SECRET, within
from store_helpers import Box, open_box

from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.serving.gateway.session_service import SessionRules, SessionService
from raylight.store.reading import StoreReader
from raylight.types import EnqueueRolloutRequest, Failure, RolloutConfig

LEASE_S = 60.0
SESSIONS = "/v1/sessions"


class Server:
    """A replica with sessions, and a client with the server's key."""

    def __init__(self, box: Box, group_size: int, **config: Any) -> None:
        self.box, self.group_size = box, group_size
        self.config = RolloutConfig(unresponsive_seconds=LEASE_S, infrastructure_retries=0, **config)
        self.service = SessionService(box.store, SessionRules(group_size), SECRET, "policy", box.clock)
        self.app = build_gateway(
            FakeApp(),
            ENGINE,
            SECRET,
            Recorder(box.store.capture),
            box.store,
            sessions=self.service,
        )
        self.client = self.client_of(SECRET)

    def client_of(self, key: str | None) -> httpx.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://server:8000", headers=headers)

    async def offer(self, *groups: int) -> None:
        await self.box.store.enqueue_many_rollouts(
            [
                EnqueueRolloutRequest(
                    input=None,
                    mode="train",
                    config=self.config,
                    group_id=f"train-{group}",
                    rollout_id=f"run-train-{group}-{number}",
                )
                for group in groups
                for number in range(self.group_size)
            ]
        )

    async def post(self, path: str, **body: Any) -> httpx.Response:
        async with within():
            return await self.client.post(f"{SESSIONS}{path}", json=body)

    async def reward(self, session: dict[str, Any], **body: Any) -> httpx.Response:
        return await self.post(f"/{session['session_id']}/reward", **body)

    async def begin(self, task: Any = "t", **body: Any) -> dict[str, Any]:
        answer = await self.post("", task=task, **body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def status(self, session: dict[str, Any]) -> str:
        return (await self.client.get(f"{SESSIONS}/{session['session_id']}")).json()["status"]

    def openai(self, session: dict[str, Any]) -> openai.AsyncOpenAI:
        return openai_client(self.app, session["base_url"], session["api_key"])

    async def call(self, session: dict[str, Any]) -> str | None:
        reply = await self.openai(session).chat.completions.create(**BODY)
        return reply.choices[0].message.content


@asynccontextmanager
async def serving(group_size: int = 1, **config: Any) -> AsyncIterator[Server]:
    async with open_box() as box:
        yield Server(box, group_size, **config)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as started:
        yield started


@pytest.fixture
async def session(server: Server) -> dict[str, Any]:
    """A session that was begun on the server's only offer."""
    await server.offer(0)
    return await server.begin()


def message(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


async def test_a_session_is_begun_called_and_rewarded(server: Server) -> None:
    await server.offer(0)
    session = await server.begin({"question": "?"})
    assert session["base_url"].startswith("http://server:8000/rollout/run-train-0-0/attempt/se-")
    assert (session["model"], session["lease_s"]) == ("policy", LEASE_S)
    assert session["expires"] == server.box.clock.now + LEASE_S
    assert await server.status(session) == "open"
    assert await server.call(session) == "hello"
    rewarded = await server.reward(session, reward={"right": 1, "short": 0.5}, message="done")
    answer = rewarded.json()
    assert (rewarded.status_code, answer["status"], answer["calls"]) == (200, "rewarded", 1)
    assert (answer["task"], answer["sampled_tokens"]) == ({"question": "?"}, 5)
    (item,) = await server.box.store.collect(["run-train-0-0"], with_spans=True)
    assert (item.rollout.status, item.reward) == ("succeeded", 1.0)
    assert item.rewards == {"right": 1.0, "short": 0.5}
    assert "agentlightning.message" in {span.name for span in item.spans}


async def test_a_heartbeat_counts_calls_without_reading_their_tokens(
    server: Server, session: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        await server.call(session)
    assert await server.box.service.wait_for_records(session["session_id"], 10.0)
    monkeypatch.delattr(StoreReader, "collect")
    answer = (await server.post(f"/{session['session_id']}/heartbeat")).json()
    assert (answer["status"], answer["calls"], answer["sampled_tokens"]) == ("open", 2, 10)


async def test_without_a_place_a_client_tries_again_later(server: Server) -> None:
    await server.offer(0)
    await server.begin()
    full = await server.post("", task="t")
    assert (full.status_code, full.json()["error"]["code"]) == (429, "no_place")
    assert int(full.headers["retry-after"]) > 0
    await server.offer(1)
    assert (await server.post("", task="t")).status_code == 201


@pytest.mark.parametrize("key", [None, "wrong", "session"])
async def test_only_the_server_s_key_opens_and_rewards_sessions(server: Server, key: str | None) -> None:
    await server.offer(0, 1)
    session = await server.begin()
    given = session["api_key"] if key == "session" else key
    path = f"{SESSIONS}/{session['session_id']}"
    own = session["base_url"].removesuffix("/v1")
    async with server.client_of(given) as client:
        for method, url in (
            ("POST", SESSIONS),
            ("GET", path),
            ("DELETE", path),
            ("POST", f"{path}/reward"),
            ("POST", f"{path}/heartbeat"),
        ):
            answer = await client.request(method, url, json={"task": 1, "reward": 1.0})
            assert answer.status_code == 401, (method, url)
            below = await client.request(method, f"{own}{url}", json={"reward": 1.0})
            assert below.status_code == (404 if key == "session" else 401), "not at its address"
    assert await server.status(session) == "open"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "give either reward or failed"),
        ({"reward": 1.0, "failed": "no"}, "give either"),
        ({"reward": "1"}, "give a float"),
        ({"reward": [1.0]}, "give a float"),
        ({"reward": {}}, "is empty"),
        ({"reward": {"a": "b"}}, "give a float"),
        ({"reward": 1e10}, "magnitude"),
        ({"reward": 1.0, "rewards": 2.0}, "rewards"),
        ({"reward": {"": 1.0}}, "names of 1 to 200"),
        ({"reward": {"n" * 201: 1.0}}, "names of 1 to 200"),
        ({"reward": {f"n{i}": 1.0 for i in range(101)}}, "at most 100 named"),
        ({"failed": ""}, "failed"),
        ({"failed": " \n"}, "failed"),
        ({"failed": 3}, "failed"),
    ],
)
async def test_a_wrong_reward_is_rejected(
    server: Server, session: dict[str, Any], body: dict[str, Any], words: str
) -> None:
    answer = await server.reward(session, **body)
    assert answer.status_code == 400
    assert words in message(answer)
    assert await server.status(session) == "open"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", ""])
async def test_a_reward_that_is_no_number_is_rejected(
    server: Server, session: dict[str, Any], text: str
) -> None:
    assert not math.isfinite(float("1e999"))
    answer = await server.client.post(
        f"{SESSIONS}/{session['session_id']}/reward",
        content=f'{{"reward": {text}}}',
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    assert await server.status(session) == "open"


async def test_a_reward_is_set_once(server: Server, session: dict[str, Any]) -> None:
    together = await asyncio.gather(*(server.reward(session, reward=value) for value in (1.0, 1.0, 0.0)))
    assert sorted(answer.status_code for answer in together) in ([200, 200, 409], [200, 409, 409])
    (item,) = await server.box.store.collect(["run-train-0-0"])
    again = await server.reward(session, reward=item.reward)
    other = await server.reward(session, reward=0.25)
    assert (again.status_code, other.status_code) == (200, 409)
    assert "a reward is set once" in message(other)
    assert (await server.reward(session, failed="no")).status_code == 409
    assert (await server.client.delete(f"{SESSIONS}/{session['session_id']}")).status_code == 409


async def test_named_rewards_in_another_order_are_another_reward(
    server: Server, session: dict[str, Any]
) -> None:
    answers = [
        await server.reward(session, reward=reward)
        for reward in ({"b": 1.0, "a": 0.0}, {"b": 1.0, "a": 0.0}, {"a": 0.0, "b": 1.0})
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 409]
    (item,) = await server.box.store.collect(["run-train-0-0"])
    assert item.reward == 1.0


async def test_a_failed_session_has_its_reason(server: Server, session: dict[str, Any]) -> None:
    answer = await server.reward(session, failed="the tool\nbroke")
    assert (answer.json()["status"], answer.json()["failure"]) == ("failed", "the tool broke")
    assert (await server.reward(session, failed="again")).status_code == 200
    late = await server.reward(session, reward=1.0)
    assert (late.status_code, "it is failed (the tool broke)" in message(late)) == (409, True)
    (item,) = await server.box.store.collect(["run-train-0-0"])
    assert item.rollout.failure.kind == "agent"


async def test_calls_after_the_end_are_rejected(server: Server) -> None:
    await server.offer(0, 1)
    rewarded, cancelled = await server.begin(), await server.begin()
    await server.reward(rewarded, reward=1.0)
    answer = await server.client.delete(f"{SESSIONS}/{cancelled['session_id']}")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    for session in (rewarded, cancelled):
        with pytest.raises(openai.APIStatusError, match="finished"):
            await server.call(session)
        beat = await server.post(f"/{session['session_id']}/heartbeat")
        assert beat.json()["status"] == await server.status(session)


async def test_a_session_expires_and_may_come_back(server: Server, session: dict[str, Any]) -> None:
    beat = f"/{session['session_id']}/heartbeat"
    await server.box.pass_time(LEASE_S - 1)
    assert (await server.post(beat)).json()["expires"] == server.box.clock.now + LEASE_S
    await server.box.pass_time(LEASE_S - 1)
    await server.call(session)
    assert await server.box.service.wait_for_records(session["session_id"], 10)
    await server.box.pass_time(LEASE_S - 1)
    assert await server.status(session) == "open"
    await server.box.pass_time(2)
    assert await server.status(session) == "expired"
    late = await server.reward(session, reward=1.0)
    assert (late.status_code, late.json()["status"]) == (200, "rewarded")


async def test_a_reward_for_a_session_that_was_given_up_is_counted(
    server: Server, session: dict[str, Any]
) -> None:
    await server.box.store.update_attempt(
        "run-train-0-0",
        session["session_id"],
        status="failed",
        failure=Failure(kind="unresponsive", error="Unresponsive: no call"),
    )
    late = await server.reward(session, reward=1.0)
    assert late.status_code == 200
    assert (late.json()["status"], late.json()["reward_used"]) == ("abandoned", False)
    again = await server.reward(session, reward=1.0)
    assert again.json() == late.json()
    assert await server.box.count("attempts_late") == 1


async def test_an_unknown_session(server: Server) -> None:
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/reward"),
        ("POST", "/heartbeat"),
    ):
        answer = await server.client.request(method, f"{SESSIONS}/se-9{path}", json={"reward": 1.0})
        assert answer.status_code == 404, path
        assert "no session 'se-9'" in message(answer)
    assert (await server.client.put(f"{SESSIONS}/se-9")).status_code == 405
    assert (await server.client.get(f"{SESSIONS}/se-9/other")).status_code == 404


@pytest.mark.parametrize(
    ("size", "body", "words"),
    [
        (1, {}, "task: Field required"),
        (1, {"task": 1, "tasks": 2}, "tasks: there is no such field; the fields are task, group"),
        (1, {"task": 1, "kind": 2}, "kind: there is no such field"),
        (1, {"task": 1, "group": "a"}, "compares no groups"),
        (2, {"task": 1}, "group is missing: the algorithm compares groups of 2"),
        (2, {"task": 1, "group": ""}, "group"),
        (2, {"task": 1, "group": 7}, "group"),
    ],
)
async def test_a_wrong_session_is_rejected(size: int, body: dict[str, Any], words: str) -> None:
    async with serving(size) as server:
        await server.offer(0)
        answer = await server.post("", **body)
        assert answer.status_code == 400
        assert words in message(answer)


async def test_groups() -> None:
    async with serving(2) as server:
        await server.offer(0, 1)
        for group in ("a", "b", "a", "b"):
            await server.begin({"of": group}, group=group)
        found = await server.box.store.query_rollouts()
        assert [(r.group_id, r.input["of"]) for r in found] == [
            ("session:train-0:a", "a"),
            ("session:train-0:a", "a"),
            ("session:train-1:b", "b"),
            ("session:train-1:b", "b"),
        ]
        assert (await server.post("", task={"of": "a"}, group="a")).status_code == 429
        await server.offer(2)
        await server.begin("x", group="c")
        other = await server.post("", task="y", group="c")
        assert (other.status_code, "another task" in message(other)) == (409, True)


async def test_a_budget_truncates_a_session() -> None:
    async with serving(max_turns=1) as server:
        await server.offer(0)
        session = await server.begin()
        await server.call(session)
        with pytest.raises(openai.BadRequestError, match="max_turns"):
            await server.call(session)
        await server.reward(session, reward=1.0)
        (attempt,) = await server.box.store.query_attempts("run-train-0-0")
        assert (attempt.status, attempt.truncated) == ("succeeded", "max_turns")


async def test_a_run_that_gave_a_session_up_says_so(server: Server, session: dict[str, Any]) -> None:
    """A resume with other settings may give it up."""
    await server.box.store.cancel_rollout("run-train-0-0")
    answer = await server.reward(session, reward=1.0)
    assert (answer.status_code, "it is cancelled" in message(answer)) == (409, True)
    assert await server.status(session) == "cancelled"


async def test_a_server_without_sessions_says_so() -> None:
    app = build_gateway(FakeApp(), ENGINE, None, None, None)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(SESSIONS, json={"task": 1})
        assert (answer.status_code, "serve --learn" in message(answer)) == (404, True)
