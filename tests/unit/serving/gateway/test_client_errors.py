"""Every client raises its own class for every error, streamed or not, and retries those that pass."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from dialect_helpers import Say, listening
from gateway_helpers import KEY, MINE, Replica

from raylight.http.errors import ContextLengthError, RequestError, UnknownModelError, error_body
from raylight.serving.capture.call_budgets import RolloutTruncatedError
from raylight.serving.capture.recorder import AttemptFinishedError, OverloadedError

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network for prices
HI: Any = [{"role": "user", "content": "hi"}]


def vllm(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Return an error as vLLM 0.29 sends it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def openai_error(
    message: str, kind: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Case:
    """An engine's error and what clients make of it.

    Attributes:
        code: `code` in OpenAI's shape.
        clients: names of the classes of OpenAI's SDK, Anthropic's SDK, LiteLLM with either, and LangChain.
        type: `type` in Anthropic's shape.
        retried: True if the SDKs send the request again.
    """

    status: int
    body: Any
    code: str | None
    clients: tuple[str, str, str, str, str]
    type: str
    retried: bool = False


BAD = (
    "BadRequestError",
    "BadRequestError",
    "BadRequestError",
    "BadRequestError",
    "OpenAIInvalidRequestError",
)
LONG = (
    "BadRequestError",
    "BadRequestError",
    "ContextWindowExceededError",
    "ContextWindowExceededError",
    "OpenAIContextOverflowError",
)
MISSING = ("NotFoundError", "NotFoundError", "NotFoundError", "NotFoundError", "OpenAIModelNotFoundError")
DENIED = (*["AuthenticationError"] * 4, "OpenAIAuthenticationError")
LIMITED = (*["RateLimitError"] * 4, "OpenAIRateLimitError")
AWAY = (
    "InternalServerError",
    "OverloadedError",
    "ServiceUnavailableError",
    "InternalServerError",
    "OpenAIAPIError",
)
BROKEN = ("InternalServerError",) * 4 + ("OpenAIAPIError",)
LATE = ("InternalServerError", "GatewayTimeoutError", "Timeout", "Timeout", "OpenAIAPIError")
GATEWAY = (
    "InternalServerError",
    "InternalServerError",
    "BadGatewayError",
    "BadGatewayError",
    "OpenAIAPIError",
)
VLLM_LONG = (
    "This model's maximum context length is 64 tokens. However, you requested {output} output tokens and "
    "your prompt contains {prompt} input tokens, for a total of 99 tokens. Please reduce the length of the "
    "input prompt or the number of requested output tokens. (parameter=input_tokens, value=70)"
)
CASES = {
    "context": Case(
        400, error_body(ContextLengthError(64, 70)), "context_length_exceeded", LONG, "invalid_request_error"
    ),
    "context, vLLM": Case(
        400,
        vllm(VLLM_LONG.format(output=1, prompt="at least 70"), "BadRequestError", 400, "input_tokens"),
        "context_length_exceeded",
        LONG,
        "invalid_request_error",
    ),
    "model": Case(
        404, error_body(UnknownModelError("gpt", "policy")), "model_not_found", MISSING, "not_found_error"
    ),
    "model, vLLM": Case(
        404,
        vllm("The model `gpt` does not exist.", "NotFoundError", 404),
        "model_not_found",
        MISSING,
        "not_found_error",
    ),
    "finished attempt": Case(
        401, error_body(AttemptFinishedError()), "invalid_api_key", DENIED, "authentication_error"
    ),
    "truncated rollout": Case(
        400,
        error_body(RolloutTruncatedError("max_turns")),
        "rollout_truncated",
        BAD,
        "invalid_request_error",
    ),
    "field": Case(400, error_body(RequestError("n: it must be 1")), None, BAD, "invalid_request_error"),
    "field, vLLM": Case(
        400, vllm("bad n (parameter=n, value=0)", "BadRequestError", 400), None, BAD, "invalid_request_error"
    ),
    "rate limit": Case(
        429,
        openai_error("Rate limit reached", "requests", "rate_limit_exceeded"),
        "rate_limit_exceeded",
        LIMITED,
        "rate_limit_error",
        retried=True,
    ),
    "quota": Case(
        429,
        openai_error("You exceeded your quota", "insufficient_quota", "insufficient_quota"),
        "insufficient_quota",
        LIMITED,
        "rate_limit_error",
        retried=True,
    ),
    "recorder": Case(
        503,
        error_body(OverloadedError("full")),
        "server_is_overloaded",
        AWAY,
        "overloaded_error",
        retried=True,
    ),
    "queue, vLLM": Case(
        503,
        vllm("full", "Service Unavailable", 503),
        "server_is_overloaded",
        AWAY,
        "overloaded_error",
        retried=True,
    ),
    "failure": Case(500, "Internal Server Error", None, BROKEN, "api_error", retried=True),
    "failure, vLLM": Case(
        500, vllm("dead", "InternalServerError", 500), None, BROKEN, "api_error", retried=True
    ),
    "gateway": Case(
        502, error_body(RequestError("lost", 502, "api_error")), None, GATEWAY, "api_error", retried=True
    ),
    "timeout": Case(
        504, error_body(RequestError("late", 504, "timeout_error")), None, LATE, "timeout_error", retried=True
    ),
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Replica, str]]:
    replica = Replica()
    with listening(replica.app) as address:
        yield replica, address + MINE + "/v1"


def chat(base: str, stream: bool, retries: int = 0, key: str = KEY) -> None:
    with openai.OpenAI(base_url=base, api_key=key, max_retries=retries) as client:
        list(client.chat.completions.create(model="policy", messages=HI, stream=stream))


def responses(base: str, stream: bool, retries: int = 0) -> None:
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=retries) as client:
        client.responses.create(model="policy", input="hi", stream=stream)


def messages(base: str, stream: bool, retries: int = 0, key: str = KEY) -> None:
    with anthropic.Anthropic(base_url=base, api_key=key, max_retries=retries) as client:
        list(client.messages.create(model="policy", messages=HI, max_tokens=5, stream=stream))


def litellm_of(provider: str) -> Callable[[str, bool], None]:
    def ask(base: str, stream: bool) -> None:
        import litellm

        litellm.suppress_debug_info = True
        reply = litellm.completion(
            f"{provider}/policy", HI, api_base=base, api_key=KEY, max_tokens=5, stream=stream, max_retries=0
        )
        list(reply)

    return ask


def langchain_model(base: str, stream: bool) -> None:
    from langchain_openai import ChatOpenAI

    client = ChatOpenAI(base_url=base, api_key=KEY, model="policy", max_retries=0)  # type: ignore[arg-type]
    list(client.stream("hi")) if stream else client.invoke("hi")


def agents_sdk(base: str, stream: bool) -> None:
    import agents

    untraced = agents.RunConfig(tracing_disabled=True)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
            model = agents.OpenAIResponsesModel("policy", client)
            agent = agents.Agent(name="a", model=model)
            if not stream:
                await agents.Runner.run(agent, "hi", run_config=untraced)
                return
            async for _ in agents.Runner.run_streamed(agent, "hi", run_config=untraced).stream_events():
                pass

    asyncio.run(run())


ASK: dict[str, tuple[Callable[[str, bool], None], int]] = {
    "chat": (chat, 0),
    "responses": (responses, 0),
    "messages": (messages, 1),
    "LiteLLM openai": (litellm_of("openai"), 2),
    "LiteLLM anthropic": (litellm_of("anthropic"), 3),
    "LangChain": (langchain_model, 4),
    "OpenAI Agents": (agents_sdk, 0),
}
MODULES = {
    "LiteLLM openai": "litellm",
    "LiteLLM anthropic": "litellm",
    "LangChain": "langchain_openai",
    "OpenAI Agents": "agents",
}
"""Module that a client of ASK needs besides the SDKs."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "client",
    [
        pytest.param(name, marks=pytest.mark.framework(MODULES[name])) if name in MODULES else name
        for name in ASK
    ],
)
def test_a_client_raises_its_own_class(
    served: tuple[Replica, str], client: str, case: str, stream: bool
) -> None:
    (replica, base), expected, (ask, index) = served, CASES[case], ASK[client]
    replica.says[:] = [Say(status=expected.status, error=expected.body)]
    with pytest.raises(Exception) as caught:  # noqa: PT011  its class is what is tested
        ask(base, stream)
    assert type(caught.value).__name__ == expected.clients[index], str(caught.value)
    if client in ("chat", "responses"):
        assert caught.value.code == expected.code  # type: ignore[attr-defined]
    if client == "messages":
        body = caught.value.body  # type: ignore[attr-defined]
        assert body["error"]["type"] == expected.type
        assert body["request_id"] == caught.value.request_id  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_what_passes_is_retried_and_nothing_else(
    served: tuple[Replica, str], ask: Callable[..., None], case: str
) -> None:
    (replica, base), expected = served, CASES[case]
    say = Say(status=expected.status, error=expected.body, headers={"retry-after-ms": "1"})
    replica.says[:] = [say] * 3
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
        ask(base, False, 2)
    assert len(replica.says) == (0 if expected.retried else 2)


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("70", 1, "prompt is too long: 70 tokens > 63 maximum"),
        ("at least 64", 1, "prompt is too long: 64 tokens > 63 maximum"),
        ("50", 20, "prompt is too long: 50 tokens > 44 maximum"),
    ],
)
def test_a_long_prompt_is_told_in_anthropics_words(
    served: tuple[Replica, str], prompt: str, output: int, expected: str
) -> None:
    replica, base = served
    message = VLLM_LONG.format(prompt=prompt, output=output)
    replica.says[:] = [Say(status=400, error=vllm(message, "BadRequestError", 400))]
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages(base, False)
    assert caught.value.body["error"]["message"].startswith(expected)  # type: ignore[index]


def test_a_long_prompt_of_an_upstream_is_told_too(served: tuple[Replica, str]) -> None:
    replica, base = served
    message = "Input tokens exceed the configured limit of 64 tokens. Your messages resulted in 70 tokens."
    replica.says[:] = [
        Say(status=400, error=openai_error(message, "invalid_request_error", "context_length_exceeded"))
    ]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 70 tokens > 64 maximum"):
        messages(base, False)


def test_a_field_that_the_engine_names_is_the_param(served: tuple[Replica, str]) -> None:
    replica, base = served
    replica.says[:] = [Say(status=400, error=CASES["field, vLLM"].body)]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(base, False)
    assert (caught.value.param, caught.value.body["message"]) == ("n", "bad n")  # type: ignore[index]
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("ask", "error"), [(chat, openai.AuthenticationError), (messages, anthropic.AuthenticationError)]
)
def test_a_wrong_key(served: tuple[Replica, str], ask: Callable[..., None], error: type[Exception]) -> None:
    with pytest.raises(error, match="Incorrect API key provided: it is not the key of this address"):
        ask(served[1], False, 2, "wrong")


# in the middle of a stream

LOST = {"vllm": vllm("lost", "InternalServerError", 500), "openai": openai_error("lost", "server_error")}


@pytest.mark.parametrize("body", LOST.values(), ids=LOST)
def test_openais_sdk_in_the_middle_of_a_stream(served: tuple[Replica, str], body: Any) -> None:
    replica, base = served
    replica.says[:] = [Say("hel", error=body["error"])]
    with pytest.raises(openai.APIError, match="lost") as caught:
        chat(base, True)
    assert (caught.value.type, caught.value.code) == ("server_error", None)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LOST["vllm"]["error"], "api_error"),
        ({"message": "lost", "code": 503}, "overloaded_error"),
        (error_body(OverloadedError("lost"))["error"], "overloaded_error"),
        (error_body(RequestError("lost"))["error"], "invalid_request_error"),
    ],
)
def test_anthropics_sdk_in_the_middle_of_a_stream(
    served: tuple[Replica, str], error: dict[str, Any], expected: str
) -> None:
    replica, base = served
    replica.says[:] = [Say("hel", error=error)]
    with pytest.raises(anthropic.APIStatusError, match="lost") as caught:
        messages(base, True)
    assert caught.value.body["error"]["type"] == expected  # type: ignore[index]


@pytest.mark.framework("litellm")
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_in_the_middle_of_a_stream(served: tuple[Replica, str], provider: str) -> None:
    from litellm.exceptions import MidStreamFallbackError

    replica, base = served
    replica.says[:] = [Say("hel", error=LOST["vllm"]["error"])]
    with pytest.raises(MidStreamFallbackError, match="lost"):
        litellm_of(provider)(base, True)


def test_an_error_that_no_retry_changes_says_so(served: tuple[Replica, str]) -> None:
    replica, base = served
    body = error_body(RequestError("not here", 501, "server_error"))
    replica.says[:] = [Say(status=501, error=json.loads(json.dumps(body)))] * 2
    with pytest.raises(openai.InternalServerError):
        chat(base, False, 2)
    assert len(replica.says) == 1
