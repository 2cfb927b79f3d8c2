"""Clients of a model that share the connections of their event loop or process."""

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import pytest
from counting_proxy import OUTSIDE, counting_proxy

import raylight as rl
from raylight.agent import clients
from raylight.agent.clients import close_clients
from raylight.errors import ConfigError

ANSWERS = {
    "/a/v1/chat/completions": b'{"id": "1", "object": "chat.completion", "created": 1, "model": "m", '
    b'"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}]}',
    "/a/v1/messages": b'{"id": "1", "type": "message", "role": "assistant", "model": "m", '
    b'"stop_reason": "end_turn", "content": [{"type": "text", "text": "hi"}], '
    b'"usage": {"input_tokens": 1, "output_tokens": 1}}',
}
MESSAGES: Any = [{"role": "user", "content": "hi"}]


class Server:
    """Server of both APIs, which counts connections and lists the keys of its requests."""

    def __init__(self) -> None:
        self.connections = 0
        self.keys: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                server.connections += 1

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                key = self.headers.get("Authorization") or self.headers.get("x-api-key") or ""
                server.keys.append(key.removeprefix("Bearer "))
                body = ANSWERS[self.path.replace("/v1/v1", "/v1")]
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True

    def llm(self, key: str) -> rl.LLM:
        return rl.LLM(endpoint=f"http://127.0.0.1:{self.http.server_port}/a/v1", model="m", api_key=key)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()
    clients._close_sync()


async def ask(llm: rl.LLM) -> str | None:
    async with llm.client() as client:
        reply = await client.chat.completions.create(model=llm.model, messages=MESSAGES)
    return reply.choices[0].message.content


def test_attempts_share_connections_although_each_closes_its_client(server: Server) -> None:
    async def run() -> None:
        for key in "abc":
            assert await ask(server.llm(key)) == "hi"
        await close_clients()
        assert not clients._ASYNC
        assert await ask(server.llm("d")) == "hi"

    asyncio.run(run())
    assert server.keys == list("abcd")
    assert server.connections == 2


def test_an_event_loop_that_ends_closes_its_connections_without_a_warning(server: Server) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for key in "ab":
            assert asyncio.run(ask(server.llm(key))) == "hi"
            assert not clients._ASYNC
        gc.collect(1)  # the objects of this test
    assert server.connections == 2


def test_a_loop_that_was_closed_without_its_generators_is_forgotten() -> None:
    async def create() -> None:
        rl.LLM(endpoint="http://127.0.0.1:1/v1", model="m").client()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(create())
    loop.close()
    assert clients._ASYNC
    asyncio.run(create())
    assert not clients._ASYNC


async def test_anthropic(server: Server) -> None:
    reply = (
        await server.llm("k").client("anthropic").messages.create(model="m", messages=MESSAGES, max_tokens=8)
    )
    assert reply.content[0].type == "text"
    await close_clients()


def test_threads_share_connections(server: Server) -> None:
    def ask_in_thread(key: str) -> None:
        with server.llm(key).sync_client() as client:
            client.chat.completions.create(model="m", messages=MESSAGES)
        with server.llm(key).sync_client("anthropic") as client:
            client.messages.create(model="m", messages=MESSAGES, max_tokens=8)

    for key in "ab":
        thread = threading.Thread(target=ask_in_thread, args=(key,))
        thread.start()
        thread.join()
    assert server.keys == list("aabb")
    assert server.connections == 2  # one of each library


@pytest.mark.parametrize("endpoint", ["http://h/v1", "http://h/v1/", "http://h/v1?v=1", "http://h"])
def test_a_client_has_the_path_that_the_library_makes_of_the_endpoint(endpoint: str) -> None:
    import openai

    client = rl.LLM(endpoint=endpoint, model="m", api_key="k").sync_client()
    with openai.OpenAI(base_url=endpoint, api_key="k") as own:
        assert client.base_url.raw_path == own.base_url.raw_path


def test_a_forked_process_has_its_own_connections() -> None:
    rl.LLM(endpoint="http://127.0.0.1:1/v1", model="m").sync_client()
    child = os.fork()
    if not child:
        os._exit(len(clients._SYNC))
    assert os.waitpid(child, 0)[1] == 0
    assert clients._SYNC


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="outside an event loop"):
        rl.LLM(model="m").client()
    with pytest.raises(
        ConfigError, match="'mistral' is not a library of clients; give one of openai, anthropic"
    ):
        rl.LLM(model="m").sync_client("mistral")  # type: ignore[call-overload]


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_a_proxy_is_used_for_upstream_models_only(
    provider: Literal["openai", "anthropic"], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(client: Any) -> Any:
        create = client.chat.completions.create if provider == "openai" else client.messages.create
        return create(model="m", messages=MESSAGES, max_tokens=8)

    clients._close_sync()  # clients of other tests read another environment
    with counting_proxy() as proxy:
        for name, value in proxy.variables.items():
            monkeypatch.setenv(name, value)
        upstream = rl.LLM(endpoint=f"http://{OUTSIDE}/v1", model="m", api_key="k")
        for llm, seen in ((server.llm("k"), []), (upstream, [f"{OUTSIDE}:80"] * 2)):
            await call(llm.client(provider))
            await asyncio.to_thread(call, llm.sync_client(provider))
            assert proxy.seen == seen
        await close_clients()
        clients._close_sync()
    assert len(server.keys) == 2


async def test_a_model_that_raylight_serves_on_another_machine_is_called_directly() -> None:
    llm = rl.LLM(endpoint="http://head:8000/v1", model="m", traced=True)
    served = llm.for_attempt("r", "a", "secret")
    for client in (served.client(), served.sync_client()):
        assert not client._client.trust_env
    assert llm.sync_client()._client.trust_env, "an upstream model, until a run serves it"
    await close_clients()
