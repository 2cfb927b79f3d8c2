"""The choice of an engine: built-in kinds, engines by dotted name, and settings that do not fit."""

import asyncio
import functools
from typing import Any

import httpx
import pytest
from app_clients import openai_client
from capture_helpers import Sink
from gateway_helpers import BODY, KEY, MINE, SECRET, within
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from raylight.config import EngineConfig
from raylight.engines.protocol import EngineSettings, InferenceOnlyEngine
from raylight.engines.registry import ENGINES, METHODS, build_engine, choose_engine, has_vllm, load_factory
from raylight.errors import ConfigError
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway

ECHO = "echo_engine:EchoEngine"


class Incomplete:
    async def app(self) -> None: ...

    async def sleep(self) -> None: ...


def factory_without_parameters() -> None: ...


def factory_of_something_else(settings: EngineSettings) -> str:
    return settings.model


@pytest.mark.parametrize("kind", [name for name in ENGINES if name != "vllm" or has_vllm()])
def test_every_built_in_factory_exists(kind: str) -> None:
    assert callable(load_factory(kind))


async def test_an_engine_by_dotted_name_is_served_and_recorded_behind_the_gateway() -> None:
    config = EngineConfig(kind=ECHO, args={"suffix": "!"})
    assert choose_engine(config) == ECHO
    engine, sink = await build_engine(EngineSettings("", "policy", config)), Sink()
    app = build_gateway(await engine.app(), engine, SECRET, Recorder(sink), None)
    async with within(), openai_client(app, f"http://replica{MINE}/v1", KEY) as client:
        answer = await client.chat.completions.create(**BODY)
        await sink.has(1, 1)
    assert (answer.model, answer.choices[0].message.content) == ("policy", "hi!")
    _, generation, _ = sink.closed[0]
    assert generation.output_ids.tolist() == [ord(c) for c in "hi!"]


class StuckEngine(InferenceOnlyEngine):
    """Answers its requests once it is released."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.released, self.arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def app(self) -> ASGIApp:
        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["method"] == "POST":
                self.arrived.release()
                await self.released.wait()
            await JSONResponse({"data": []})(scope, receive, send)

        return respond


async def test_requests_beyond_the_limit_of_a_users_engine_are_answered_with_503() -> None:
    config = EngineConfig(kind=f"{__name__}:StuckEngine", max_concurrent=1, max_waiting=2)
    engine: Any = await build_engine(EngineSettings("", "policy", config))
    app = build_gateway(await engine.app(), engine, SECRET, None, None)
    headers = {"authorization": f"Bearer {SECRET}"}
    async with (
        within(),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://replica/v1", headers=headers
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        ask = functools.partial(client.post, "/chat/completions", json=BODY)
        accepted = [group.create_task(ask()) for _ in range(3)]
        for _ in accepted:
            await engine.arrived.acquire()
        refused = await ask()
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            503,
            "2 requests are waiting already; try again later",
        )
        assert (await client.get("/models")).status_code == 200
        engine.released.set()
        assert [(await one).status_code for one in accepted] == [200] * 3
        assert (await ask()).status_code == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "sglang"},
            "no engine 'sglang'; there are: auto, transformers, vllm, upstream, or the dotted",
        ),
        ({"kind": "transfromers"}, "no engine 'transfromers'; there are: transformers, or"),
        ({"kind": "no_such_package:Engine"}, "cannot import no_such_package"),
        ({"kind": "echo_engine:EchoEngin"}, "has no 'EchoEngin'; it has: EchoEngine"),
        (
            {"kind": f"{__name__}:Incomplete"},
            "Incomplete lacks abort_weight_update, check_health, close, .*update_weights.*protocol",
        ),
        ({"kind": f"{__name__}:ECHO"}, "ECHO is not callable"),
        ({"kind": f"{__name__}:factory_without_parameters"}, "takes no arguments; its first one must be"),
        ({"kind": ECHO, "args": {"prefix": "?"}}, "no argument 'prefix'; its arguments: suffix"),
        (
            {"args": {"tool_praser": "hermes"}},
            "'tool_praser'; its arguments: max_new_tokens, reasoning",
        ),
        (
            {"url": "http://up/v1", "args": {"reasoning": True}},
            "no argument 'reasoning'; its arguments: none",
        ),
    ],
)
def test_settings_that_name_no_engine_or_do_not_fit_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_engine(EngineConfig(**settings))


async def test_a_factory_that_returns_no_engine_is_an_error() -> None:
    config = EngineConfig(kind=f"{__name__}:factory_of_something_else")
    assert choose_engine(config) == config.kind
    lacking = r"factory_of_something_else lacks abort_weight_update, app, .*update_weights"
    with pytest.raises(ConfigError, match=lacking):
        await build_engine(EngineSettings("", "policy", config))


def test_the_protocol_has_methods_to_check() -> None:
    assert {"app", "update_weights", "logprobs", "close"} <= set(METHODS)
