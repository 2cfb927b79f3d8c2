"""Gateway: keys, routes, and the requests that inner layers receive."""

import asyncio

import httpx
import pytest
from asgi_helpers import EMPTY_BODY, talk
from gateway_helpers import BODY, CHAT, KEY, MINE, POSTED, SECRET, Site, asgi_scope, is_refusal, within
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from raylight.agent.attempt_keys import attempt_key, attempt_path


async def test_a_call_in_an_attempts_scope_is_answered_within_it(site: Site) -> None:
    answer = await site.post()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    ((path, scope, body, _),) = site.inner.seen
    assert (path, scope.rollout_id, scope.attempt_id) == (CHAT, "ro-1", "at-1")
    assert body == answer.request.content


async def test_a_route_prefix_before_the_attempt_is_kept(site: Site) -> None:
    answer = await site.post("/some-run" + MINE + CHAT)
    assert answer.status_code == 404  # not mounted there, but the key was accepted
    assert site.inner.seen == []


async def test_the_runs_secret_opens_the_plain_routes_outside_of_any_attempt(site: Site) -> None:
    assert (await site.post(CHAT, SECRET)).status_code == 200
    assert (len(site.inner.seen), site.inner.attempts) == (1, [])


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (MINE + CHAT, "wrong"),
        (MINE + CHAT, ""),
        (MINE + CHAT, SECRET),
        (MINE + CHAT, attempt_key(SECRET, "ro-1", "at-2")),
        (MINE + CHAT, attempt_key(SECRET, "ro-2", "at-1")),
        (MINE + CHAT, attempt_key("other", "ro-1", "at-1")),
        (CHAT, "wrong"),
        (CHAT, KEY),
        ("/v1/models", "wrong"),
        ("/nowhere", "wrong"),
        (MINE + "/v1/health", "wrong"),
        (CHAT, "schlüssel"),
    ],
)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_key_that_does_not_fit_opens_nothing(site: Site, path: str, key: str, header: str) -> None:
    value = f"Bearer {key}" if header == "authorization" else key
    async with within():
        answer = await site.client.post(path, headers={header: value.encode("latin-1")}, json=BODY)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert site.inner.seen == []


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": KEY},
        {"authorization": f"bearer  {KEY}"},
        {"authorization": "Bearer other", "x-api-key": KEY},
        {"authorization": "Basic abc", "x-api-key": KEY},
    ],
)
async def test_a_key_is_read_from_either_header(headers: dict[str, str]) -> None:
    async with within():
        assert (await Site().client.post(MINE + CHAT, headers=headers, json=BODY)).status_code == 200


async def test_no_inner_layer_sees_a_key(site: Site) -> None:
    await site.post(headers={"x-api-key": KEY, "cookie": "a=b", "proxy-authorization": "x", "x-trace": "1"})
    headers = site.inner.seen[0][3]
    assert KEY.encode() not in b" ".join(headers.values())
    assert headers[b"x-trace"] == b"1"
    assert headers.keys().isdisjoint({b"authorization", b"x-api-key", b"cookie", b"proxy-authorization"})


async def test_without_any_key_only_health_is_open(site: Site) -> None:
    assert (await site.get("/health", key=None)).json() == {"status": "ok", "model": "policy"}
    assert (await site.get("/v1/models", key=None)).status_code == 401


async def test_an_ill_engine_is_not_healthy(site: Site) -> None:
    site.engine.ill = RuntimeError("its core died at secret place")
    answer = await site.get("/health", key=None)
    assert answer.status_code == 503
    assert "secret place" not in answer.text


async def test_a_server_without_a_secret_lets_everyone_in_and_has_no_attempts() -> None:
    site = Site(secret=None)
    headers = {"host": "127.0.0.1:8000"}
    assert (await site.client.post(CHAT, json=BODY, headers=headers)).status_code == 200
    answer = await site.client.post(MINE + CHAT, json=BODY, headers=headers)
    assert answer.status_code == 404
    assert "records no rollouts" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/nothing"])
async def test_a_server_without_a_secret_answers_no_page_that_gave_its_name_this_address(path: str) -> None:
    site = Site(secret=None)
    answer = await site.client.post(path, json=BODY, headers={"host": "evil.example"})
    assert (answer.status_code, site.inner.seen) == (403, [])
    assert "127.0.0.1 or localhost" in answer.json()["error"]["message"]
    assert (await site.client.get("/health", headers={"host": "evil.example"})).status_code == 200


async def test_without_a_recorder_attempts_have_no_addresses() -> None:
    site = Site(attempts=False)
    assert (await site.post()).status_code == 404
    assert site.inner.seen == []


async def test_models_are_listed_and_told_by_name(site: Site) -> None:
    answer = await site.get(MINE + "/v1/models", KEY)
    assert [model["id"] for model in answer.json()["data"]] == ["policy", "org/lora 1"]
    assert (await site.get(MINE + "/v1/models/policy", KEY)).json()["id"] == "policy"
    for path in ("/v1/models/org%2Flora%201", "/v1/models/org/lora%201"):
        assert (await site.get(MINE + path, KEY)).json()["id"] == "org/lora 1"
        assert (await site.get(path)).json()["id"] == "org/lora 1"
    answer = await site.get("/v1/models/other")
    assert (answer.status_code, is_refusal(answer, "/v1/models/other")) == (404, True)


async def test_concurrent_calls_keep_their_scopes_apart(site: Site) -> None:
    names = [(f"ro-{i}", f"at-{i}") for i in range(10)]
    together = asyncio.Barrier(len(names) + 1)

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await together.wait()
        await JSONResponse({})(scope, receive, send)

    site.inner.app = wait
    calls = [site.post(attempt_path(*ids) + CHAT, attempt_key(SECRET, *ids)) for ids in names]
    assert {answer.status_code for answer in await asyncio.gather(*calls, site.post(CHAT, SECRET))} == {200}
    assert sorted(site.inner.attempts) == sorted(names)


# the list of routes


@pytest.mark.parametrize("path", POSTED)
async def test_a_route_of_the_list_is_passed_on(site: Site, path: str) -> None:
    assert (await site.post(MINE + path)).status_code == 200
    assert (await site.post(path, SECRET)).status_code == 200
    inner = path.removeprefix("/v1") if path.endswith("tokenize") else path
    assert [seen for seen, *_ in site.inner.seen] == [inner, inner]


NATIVE = [
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/finish_weight_update",
    "/weight_info",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/inference/v1/generate",
    "/abort_requests",
    "/scale_elastic_ep",
    "/server_info",
    "/start_profile",
    "/stop_profile",
    "/docs",
    "/openapi.json",
    "/redoc",
    "/load",
    "/version",
    "/metrics",
    "/ping",
    "/invocations",
    "/v1/embeddings",
    "/pooling",
    "/score",
    "/rerank",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/audio/transcriptions",
    "/tokenizer_info",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/generative_scoring",
    "/fault_tolerance/status",
    "/v1/files",
    "/",
    "",
    "/v1",
    "/v1/",
    "/v1/chat/completions/chat/completions",
]


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_no_other_route_of_an_engine_can_be_reached(site: Site, path: str, method: str) -> None:
    for prefix, key in (("", SECRET), (MINE, KEY)):
        answer = await site.get(prefix + path, key, method)
        assert (answer.status_code, is_refusal(answer, path)) == (404, True)
    assert site.inner.seen == []


TRICKS = [
    "/v1/chat/./completions",
    "/v1/../pause",
    "/v1/chat/../../pause",
    "/v1/chat%2Fcompletions",
    "/v1/%63hat/completions",
    "/%76%31/chat/completions",
    "/v1%2Fpause",
    "/%70ause",
    "/v1/chat/completions%00",
    "/v1/chat/completions%20",
    "/v1/chat/completions;x=1",
    "/V1/chat/completions",
    "/v1/chat/completions%2F..%2F..%2Fpause",
    "/health/../pause",
    "/health%2F..%2Fpause",
    "/he%61lth",
    "/%6detrics",
    "/v1/models/..%2F..%2Fpause",
    "/v1/models/../../pause",
    "/v1/chat/completions%3Fx",
    "/.%2e/pause",
    "\\pause",
]


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_another_spelling_leads_nowhere(site: Site, trick: str, method: str) -> None:
    """The application is called as a server would, because clients normalize what they send."""
    for prefix, key in (("", SECRET), (MINE, KEY), ("/x/.." + MINE, KEY)):
        raw = prefix + trick
        scope = asgi_scope(
            httpx.URL(f"http://h{raw}").path if "%" in raw else raw, method, key, raw_path=raw.encode()
        )
        sent = await talk(site.app, scope, EMPTY_BODY)
        assert sent[0]["status"] in (401, 404, 405)
    assert {path for path, *_ in site.inner.seen} <= {
        "/v1/models"
    }  # a model of an odd name, which there is not


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("HEAD", "/v1/messages", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/policy", "GET"),
        ("POST", "/health", "GET, HEAD"),
        ("GET", "/v1/traces", "POST"),
        ("GET", "/tokenize", "POST"),
    ],
)
async def test_another_method_is_said_so(method: str, path: str, allowed: str) -> None:
    answer = await Site().get(path, method=method)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert method == "HEAD" or is_refusal(answer, path)


async def test_a_web_socket_is_refused(site: Site) -> None:
    scope = asgi_scope("/v1/realtime", type="websocket")
    sent = await talk(site.app, scope, {"type": "websocket.connect"})
    assert ([message["type"] for message in sent], site.inner.seen) == (["websocket.close"], [])
