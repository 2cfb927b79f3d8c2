"""OpenEnv agents against a server that follows the protocol, or breaks it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

import raylight as rl
from raylight.environments import openenv
from raylight.environments.openenv import action_parser, is_tool_schema, observation_text
from raylight.environments.tool_loop import CONTEXT_LENGTH, MAX_RESULT
from raylight.errors import (
    ConfigError,
    DatasetError,
    EnvironmentServerError,
    EnvironmentUnavailableError,
)
from raylight.runner.outcome import classify

TEXT_SCHEMA = {
    "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}},
    "required": ["message"],
}
TOOL_SCHEMA = {
    "properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {}},
    "required": ["tool_name"],
}
TOO_LONG = {"message": "too long", "type": "invalid_request_error", "code": CONTEXT_LENGTH}
"""Error of a conversation that is longer than the model's context."""
PINGED = "after a ping"
"""Answer that the model gives after a ping."""
Handle = Callable[[dict[str, Any]], Any]
"""Answer of the server to a message: a dict, a text or bytes as they are, "silence", or None for its end."""


def observation(text: Any, reward: Any = None, done: bool = False) -> dict[str, Any]:
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str = "no", **further: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **further}}


class Server:
    """Server that answers messages of an episode with a function, and model that answers with texts.

    Attributes:
        messages: messages of all episodes, in order.
        requests: bodies of model calls.
        over: set when the connection of an episode has ended.
        pinged: set by a ping, which is not answered.
    """

    def __init__(self, handle: Handle, answers: list[Any], schema: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.over, self.pinged = asyncio.Event(), asyncio.Event()
        self._handle = handle
        self._answers = answers
        self._schema = schema

    async def episode(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        async for frame in socket:
            if frame.type == web.WSMsgType.PING:
                self.pinged.set()
                continue
            message = json.loads(frame.data)
            self.messages.append(message)
            answer = None if message["type"] == "close" else self._handle(message)
            if answer is None:
                break
            if answer == "silence":
                continue
            if isinstance(answer, bytes):
                await socket.send_bytes(answer)
            else:
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        self.over.set()
        await socket.close()
        return socket

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self._schema} if self._schema else {})

    async def chat(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        answer = self._answers[len(self.requests) - 1]
        if answer == PINGED:
            await self.pinged.wait()
        if answer == TOO_LONG:
            return web.json_response({"error": TOO_LONG}, status=400)
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
            | {"choices": [choice], "usage": usage}
        )

    @property
    def said(self) -> list[tuple[str, Any]]:
        """Roles and contents of the last model call."""
        return [(message["role"], message.get("content")) for message in self.requests[-1]["messages"]]


@contextlib.asynccontextmanager
async def serving(
    handle: Handle, *answers: Any, schema: Any = TEXT_SCHEMA
) -> AsyncIterator[tuple[Server, str]]:
    server = Server(handle, list(answers), schema)
    app = web.Application()
    app.add_routes(
        [
            web.get("/ws", server.episode),
            web.get("/schema", server.schema),
            web.post("/v1/chat/completions", server.chat),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield server, f"ws://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def play(url: str, task: Any = None, **options: Any) -> float:
    agent: Any = rl.environments.openenv_agent(url, **options)
    llm = rl.LLM(endpoint=url.replace("ws", "http", 1) + "/v1", model="m")
    return await agent({} if task is None else task, llm)


def guessing(message: dict[str, Any]) -> Any:
    """Game of two steps with a reward each."""
    if message["type"] == "reset":
        return observation("begin")
    if message["type"] == "state":
        return {"type": "state", "data": {"score": 7.0}}
    if message["data"] == {"message": "one"}:
        return observation("go on", 0.25)
    return observation("end", 0.5, done=True)


async def test_the_model_answers_observations_until_the_episode_is_done() -> None:
    async with serving(guessing, "one", "two") as (server, url):
        assert await play(url, {"seed": 3}, system="Play.") == 0.75
        assert server.said == [
            ("system", "Play."),
            ("user", "begin"),
            ("assistant", "one"),
            ("user", "go on"),
        ]
        assert server.messages == [
            {"type": "reset", "data": {"seed": 3}},
            {"type": "step", "data": {"message": "one"}},
            {"type": "step", "data": {"message": "two"}},
            {"type": "close"},
        ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"reward": "last"}, 0.5), ({"reward": lambda state: state["score"]}, 7.0), ({"max_turns": 1}, 0.25)],
)
async def test_the_reward_is_of_the_steps_or_of_the_state(options: dict[str, Any], expected: float) -> None:
    async with serving(guessing, "one", "two") as (_, url):
        assert await play(url, **options) == expected


@pytest.mark.parametrize("reward", [True, 1])
async def test_a_reward_may_be_a_boolean_or_whole(reward: Any) -> None:
    def handle(message: dict[str, Any]) -> Any:
        return observation("begin") if message["type"] == "reset" else observation("end", reward, done=True)

    async with serving(handle, "42") as (_, url):
        total = await play(url)
    assert total == 1.0
    assert type(total) is float


async def test_a_conversation_longer_than_the_context_ends_with_the_rewards_so_far() -> None:
    async with serving(guessing, "one", TOO_LONG) as (_, url):
        assert await play(url) == 0.25


async def test_functions_of_the_user_format_and_parse() -> None:
    async with serving(guessing, "ONE", "TWO") as (server, url):
        reward = await play(
            url,
            prompt=lambda shown: f"<{shown['text']}>",
            parse=lambda text: {"message": text.lower()},
        )
        assert reward == 0.75
        assert server.said[0] == ("user", "<begin>")


async def test_mistakes_are_messages_to_the_model() -> None:
    def handle(message: dict[str, Any]) -> Any:
        if message.get("data") == {"message": "bad"}:
            errors = [{"loc": ["message"], "msg": "too bad"}]
            return error("VALIDATION_ERROR", "Invalid message", errors=errors)
        return guessing(message)

    def parse(text: str) -> dict[str, str]:
        if text == "?":
            raise ValueError("no question")
        return {"message": text}

    async with serving(handle, "?", "bad", "two") as (server, url):
        assert await play(url, parse=parse) == 0.5
        assert [text for role, text in server.said if role == "user"] == [
            "begin",
            "error: no question",
            "error: Invalid message; ['message']: too bad",
        ]


async def test_tools_of_the_environment_are_the_models() -> None:
    def call(number: int) -> dict[str, Any]:
        function = {"name": "add", "arguments": json.dumps({"n": number})}
        return {"id": f"c{number}", "type": "function", "function": function}

    def handle(message: dict[str, Any]) -> Any:
        action = message.get("data", {})
        if message["type"] == "reset":
            return observation("count to 3")
        if action.get("type") == "list_tools":
            tools = [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}]
            return {"type": "observation", "data": {"observation": {"tools": tools}, "reward": None}}
        number = action["arguments"]["n"]
        result = {"tool_name": "add", "result": {"content": [], "data": number}, "error": None}
        if number == 9:
            result["error"] = {"error_type": "execution_error", "message": "too much"}
        return {"type": "observation", "data": {"observation": result, "reward": 0.1, "done": number == 3}}

    asked = {"role": "assistant", "content": None, "tool_calls": [call(1), call(9)]}
    last = {"role": "assistant", "content": None, "tool_calls": [call(3), call(4)]}
    async with serving(handle, asked, last, "done", schema=TOOL_SCHEMA) as (server, url):
        assert await play(url) == pytest.approx(0.3)
        assert [tool["function"]["name"] for tool in server.requests[0]["tools"]] == ["add"]
        assert [text for role, text in server.said if role == "tool"] == ["1", "error: too much"]
        assert [message["type"] for message in server.messages].count("step") == 4


@pytest.mark.parametrize(
    ("answer", "expected", "match"),
    [
        (None, EnvironmentUnavailableError, "closed the connection in an episode"),
        ("silence", EnvironmentUnavailableError, r"did not answer within 0\.2 s"),
        (error("CAPACITY_REACHED"), EnvironmentUnavailableError, "max_concurrent_envs"),
        (error("EXECUTION_ERROR", "zero"), EnvironmentServerError, "EXECUTION_ERROR: zero"),
        ("<html>", EnvironmentServerError, "openenv 0.10"),
        ("[" * 100_000, EnvironmentServerError, "openenv 0.10"),
        (b"\x00\x01", EnvironmentServerError, "a frame BINARY"),
        ({"type": "hello", "data": {}}, EnvironmentServerError, "and not with 'observation'"),
        ({"type": "observation", "data": []}, EnvironmentServerError, "and not with 'observation'"),
        ({"type": "observation", "data": {"observation": "x"}}, EnvironmentServerError, "no observation"),
        (
            {"type": "observation", "data": {"observation": {}, "done": 1}},
            EnvironmentServerError,
            "no observation",
        ),
        (observation("x", "much"), EnvironmentServerError, "no observation with reward"),
        (observation("x", float("nan")), EnvironmentServerError, "no observation with reward"),
    ],
)
@pytest.mark.parametrize("kind", ["reset", "step"])
async def test_a_server_that_breaks_is_a_typed_error(
    kind: str, answer: Any, expected: type[Exception], match: str
) -> None:
    def handle(message: dict[str, Any]) -> Any:
        return answer if message["type"] == kind else guessing(message)

    async with serving(handle, "one") as (_, url):
        with pytest.raises(expected, match=match) as caught:
            await play(url, timeout_s=0.2 if answer == "silence" else 60)
        assert type(caught.value) is expected
        retried = expected is EnvironmentUnavailableError
        assert classify(caught.value) == ("infrastructure" if retried else "agent")


async def test_a_server_need_not_answer_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "PING_S", 0.01)  # an answer was due within half of this time
    async with serving(guessing, "one", PINGED) as (server, url):
        await play(url)
    assert [message["type"] for message in server.messages] == ["reset", "step", "step", "close"]


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(EnvironmentUnavailableError, match="cannot be reached"):
        await play("ws://127.0.0.1:9")


async def test_an_address_without_a_websocket_is_named() -> None:
    async with serving(guessing) as (_, url):
        with pytest.raises(EnvironmentServerError, match=r"/elsewhere/ws is not a WebSocket \(status 404"):
            await play(f"{url}/elsewhere")


async def test_a_server_without_a_schema_needs_a_function() -> None:
    async with serving(guessing, "one", "two", schema=None) as (_, url):
        with pytest.raises(EnvironmentServerError, match=r"give openenv_agent\(parse=\.\.\.\)"):
            await play(url)
        assert await play(url, parse=lambda text: {"message": "two"}) == 0.5


async def test_rejected_parameters_of_a_reset_are_an_error_of_the_task() -> None:
    async with serving(lambda message: error("VALIDATION_ERROR")) as (_, url):
        with pytest.raises(DatasetError, match="rejects the task"):
            await play(url, {"seed": -1})
        with pytest.raises(DatasetError, match="is not a dict"):
            await play(url, "task")
        with pytest.raises(EnvironmentServerError, match="needs JSON"):
            await play(url, {"seed": {1, 2}})


async def test_an_episode_without_rewards_is_no_reward_of_0() -> None:
    async with serving(lambda message: observation("x", done=True)) as (_, url):
        with pytest.raises(EnvironmentServerError, match="gave no reward"):
            await play(url)


async def test_an_observation_of_10_megabytes_is_cut() -> None:
    def handle(message: dict[str, Any]) -> Any:
        return (
            observation("x" * 10_000_000) if message["type"] == "reset" else observation("", 1.0, done=True)
        )

    async with serving(handle, "one") as (server, url):
        assert await play(url) == 1.0
        shown = server.said[0][1]
    assert shown == "x" * MAX_RESULT + f"\n[cut: 10000000 characters, {MAX_RESULT} shown]"


async def test_a_cancelled_rollout_ends_its_episode() -> None:
    stepping = asyncio.Event()

    def handle(message: dict[str, Any]) -> Any:
        if message["type"] == "reset":
            return observation("begin")
        stepping.set()
        return "silence"

    async with serving(handle, "one") as (server, url):
        playing = asyncio.create_task(play(url))
        await stepping.wait()
        assert not server.over.is_set()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await asyncio.wait_for(server.over.wait(), 30)


@pytest.mark.parametrize(
    ("schema", "text", "action"),
    [
        (TEXT_SCHEMA, "hello", {"message": "hello"}),
        ({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, " 7\n", {"n": 7}),
        ({"properties": {"n": {"type": "array"}}}, "[1, 2]", {"n": [1, 2]}),
        ({"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}, '{"a": 1, "b": 2}', {"a": 1, "b": 2}),
    ],
)
def test_answers_become_actions_by_the_schema(schema: Any, text: str, action: Any) -> None:
    assert action_parser(schema)(text) == action


def test_answers_that_are_no_action_are_errors_for_the_model() -> None:
    with pytest.raises(ValueError, match="answer with JSON: integer"):
        action_parser({"properties": {"n": {"type": "integer"}}})("seven")
    with pytest.raises(ValueError, match="answer with JSON: object with a, b"):
        action_parser({"properties": {"a": {}, "b": {}}})("[1]")


def test_observations_become_text() -> None:
    assert observation_text({"text": "hello", "metadata": {"x": 1}}) == "hello"
    assert observation_text({"count": 3, "metadata": {}}) == '{"count": 3}'
    assert observation_text({"a": "x", "b": 1}) == '{"a": "x", "b": 1}'


def test_environments_of_tools_are_recognised() -> None:
    assert is_tool_schema(TOOL_SCHEMA)
    assert is_tool_schema({"properties": {"metadata": {}}})
    assert not is_tool_schema(TEXT_SCHEMA)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"url": "127.0.0.1:8000"}, "is not an address"),
        ({"url": None}, "is not an address"),
        ({"url": "ws://host", "reward": "mean"}, "reward='mean' is unknown"),
        ({"url": "ws://host", "max_turns": 0}, "must be positive"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rl.environments.openenv_agent(**arguments)
