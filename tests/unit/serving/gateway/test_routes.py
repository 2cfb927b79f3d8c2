"""Attempts in paths: any id and any agent name works, and a key is valid for its attempt alone."""

import asyncio
from typing import Any
from urllib.parse import quote, unquote

import httpx
import pytest
from app_clients import openai_client
from gateway_helpers import BODY, CHAT, SECRET, Site, within
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount

from raylight.agent.attempt_keys import attempt_key, attempt_path, key_use
from raylight.agent.resources import LLM
from raylight.serving.gateway.routes import read_path

ODD = [
    "ro.1",
    "a b",
    "a/b",
    "a/attempt/at-2",
    "ü",
    "日本語",
    "😀",
    "a%2Fb",
    "%",
    "a?b",
    "a#b",
    "a;b=c",
    "..",
    ".",
    "...",
    "a..b",
    "'\"<>",
    "+",
]


async def status(site: Site, path: str, key: str, app: Any = None) -> int:
    transport = httpx.ASGITransport(app=app or site.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client, within():
        return (await client.post(path, headers={"authorization": f"Bearer {key}"}, json=BODY)).status_code


@pytest.mark.parametrize("rollout_id", ODD)
async def test_any_rollout_id_is_called_through_the_real_sdk(site: Site, rollout_id: str) -> None:
    llm = LLM(endpoint="http://replica", model="policy", traced=True).for_attempt(rollout_id, "at-1", SECRET)
    async with openai_client(site.app, llm.get_base_url(), llm.api_key) as client, within():
        answer = await client.chat.completions.create(**BODY)
    assert answer.choices[0].message.content == "hello"
    assert site.inner.attempts == [(rollout_id, "at-1")]


@pytest.mark.parametrize(
    "agent", [name for name in ODD if name not in (".", "..")] + ["v1", "agent/v1", "/v1/"]
)
async def test_any_agents_name_is_recorded_as_it_is(site: Site, agent: str) -> None:
    llm = (
        LLM(endpoint="http://replica", model="policy", traced=True)
        .for_attempt("a/b", "at-1", SECRET)
        .for_agent(agent)
    )
    async with openai_client(site.app, llm.get_base_url(), llm.api_key) as client, within():
        await client.chat.completions.create(**BODY)
    ((_, scope, _, _),) = site.inner.seen
    assert (scope.rollout_id, scope.agent) == ("a/b", agent)


def joined(*parts: str, max_size: int = 4) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(parts), min_size=1, max_size=max_size).map("".join)


IDS = joined("a", "b", "/", "%", "2", "F", ".", " ", "é", "/attempt/", "/rollout/", "/v1/", "/agent/")
PATHS = joined(
    "/",
    "%",
    "2f",
    ".",
    "a",
    "/rollout/",
    "/attempt/",
    "/v1/",
    "ro-2",
    "at-2",
    "%2e",
    "ro-1",
    "at-1",
    max_size=10,
)


@given(mine=st.tuples(IDS, IDS), other=st.tuples(IDS, IDS))
@settings(max_examples=5 * settings.default.max_examples)
@example(mine=("a/b", "c"), other=("a", "b/c"))
@example(mine=("a", "b"), other=("a%2Fattempt%2Fb", "c"))
def test_a_key_opens_its_own_attempt_and_no_other(mine: tuple[str, str], other: tuple[str, str]) -> None:
    site = Site()
    key = attempt_key(SECRET, *mine)
    assert (key_use(key, SECRET, *other) is not None) == (mine == other)
    assert asyncio.run(status(site, attempt_path(*mine) + CHAT, key)) == 200
    assert site.inner.attempts == [mine]
    if mine != other:
        assert asyncio.run(status(site, attempt_path(*other) + CHAT, key)) == 401
        assert len(site.inner.seen) == 1


@given(PATHS)
@settings(max_examples=7 * settings.default.max_examples)
def test_no_address_at_all_leads_out_of_the_keys_attempt(path: str) -> None:
    site = Site()
    key = attempt_key(SECRET, "ro-1", "at-1")
    for sent in (
        path,
        attempt_path("ro-1", "at-1") + path,
        path + CHAT,
        path + attempt_path("ro-1", "at-1") + CHAT,
    ):
        try:
            url = httpx.URL(f"http://replica{sent if sent.startswith('/') else '/' + sent}")
        except httpx.InvalidURL:
            continue
        asyncio.run(status(site, str(url), key))
    assert set(site.inner.attempts) <= {("ro-1", "at-1")}


@pytest.mark.parametrize(
    "path",
    [
        "/%72ollout/ro-2/attempt/at-2",
        "/rollout%2Fro-2%2Fattempt%2Fat-2",
        "/rollout/ro-2/%61ttempt/at-2",
        "/rollout//attempt/at-2",
        "/rollout/ro-2/attempt/",
        "/rollout/ro-2",
        "/attempt/at-2",
    ],
)
async def test_an_address_that_is_written_otherwise_names_no_attempt(site: Site, path: str) -> None:
    """The run's own secret records no call for it either."""
    assert await status(site, path + CHAT, attempt_key(SECRET, "ro-2", "at-2")) == 401
    assert await status(site, path + CHAT, SECRET) == 404
    assert site.inner.seen == []


async def test_two_attempts_in_one_address_are_none(site: Site) -> None:
    path = attempt_path("ro-1", "at-1") + "/v1" + attempt_path("ro-2", "at-2") + CHAT
    codes = {
        await status(site, path, attempt_key(SECRET, *ids)) for ids in [("ro-1", "at-1"), ("ro-2", "at-2")]
    }
    assert codes == {401, 404}
    assert site.inner.seen == []


@pytest.mark.parametrize("rollout_id", ["ro-1", "a/b c"])
async def test_the_application_may_stand_below_a_prefix(site: Site, rollout_id: str) -> None:
    """Serve mounts the application below the name of the run."""
    outer = Starlette(routes=[Mount("/the run", app=site.app)])
    path = "/the%20run" + attempt_path(rollout_id, "at-1", "x/y") + CHAT
    assert await status(site, path, attempt_key(SECRET, rollout_id, "at-1"), outer) == 200
    assert await status(site, path, attempt_key(SECRET, "ro-2", "at-1"), outer) == 401
    assert await status(site, "/the%20run" + CHAT, SECRET, outer) == 200
    assert [rollout for rollout, _ in site.inner.attempts] == [rollout_id]


def scope_of(path: str, raw_path: bytes | None = None) -> dict[str, Any]:
    return {"type": "http", "path": path} | ({} if raw_path is None else {"raw_path": raw_path})


def test_a_server_that_keeps_no_raw_path_will_do_for_plain_ids() -> None:
    inside, path = read_path(
        scope_of("/run/rollout/ro.1 x/attempt/at-1/agent/ü/v1/models") | {"root_path": "/run"}
    )
    assert (inside.rollout_id, inside.attempt_id, inside.agent, path) == (
        "ro.1 x",
        "at-1",
        "ü",
        "/v1/models",
    )


def test_a_raw_path_with_its_query_is_understood() -> None:
    inside, path = read_path(
        scope_of("/rollout/a/attempt/b/v1/models", b"/rollout/a/attempt/b/v1/models?x=/v1/y")
    )
    assert inside is not None
    assert path == "/v1/models"


@given(st.text(min_size=1), st.text(min_size=1), st.none() | st.text(min_size=1))
def test_what_an_address_is_made_of_is_found_in_it(
    rollout_id: str, attempt_id: str, agent: str | None
) -> None:
    path = attempt_path(rollout_id, attempt_id, agent)
    inside, rest = read_path(
        scope_of(unquote("/run" + path + CHAT), quote("/run").encode() + path.encode() + CHAT.encode())
        | {"root_path": "/run"}
    )
    assert (inside.rollout_id, inside.attempt_id, inside.agent, rest) == (rollout_id, attempt_id, agent, CHAT)
