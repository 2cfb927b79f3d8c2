"""Every client raises its own class for every error, streamed or not, and retries those that pass."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from dialect_helpers import Say
from gateway_helpers import KEY, MINE, Replica
from sdk_clients import CLIENTS, chat, client_params, litellm_of, messages

from raylight.http.errors import ContextLengthError, RequestError, UnknownModelError, error_body
from raylight.serving.capture.attempt_limits import RolloutTruncatedError
from raylight.serving.capture.recorder import AttemptFinishedError, OverloadedError


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
        answer: the engine's body, or an error of raylight that is sent in OpenAI's shape.
        code: `code` in OpenAI's shape.
        clients: names of the classes of OpenAI's SDK, Anthropic's SDK, LiteLLM with either, and LangChain.
        type: `type` in Anthropic's shape.
        retried: True if the SDKs send the request again.
    """

    status: int
    answer: Any
    code: str | None
    clients: tuple[str, str, str, str, str]
    type: str
    retried: bool = False

    @property
    def body(self) -> Any:
        return error_body(self.answer) if isinstance(self.answer, RequestError) else self.answer


BAD = ("BadRequestError",) * 4 + ("OpenAIInvalidRequestError",)
LONG = ("BadRequestError",) * 2 + ("ContextWindowExceededError",) * 2 + ("OpenAIContextOverflowError",)
MISSING = ("NotFoundError",) * 4 + ("OpenAIModelNotFoundError",)
DENIED = ("AuthenticationError",) * 4 + ("OpenAIAuthenticationError",)
LIMITED = ("RateLimitError",) * 4 + ("OpenAIRateLimitError",)
BROKEN = ("InternalServerError",) * 4 + ("OpenAIAPIError",)
AWAY = (BROKEN[0], "OverloadedError", "ServiceUnavailableError", BROKEN[3], BROKEN[4])
LATE = (BROKEN[0], "GatewayTimeoutError", "Timeout", "Timeout", BROKEN[4])
GATEWAY = BROKEN[:2] + ("BadGatewayError",) * 2 + BROKEN[4:]


def vllm_long(prompt: str, output: int, param: str | None = None) -> dict[str, Any]:
    """Return vLLM's error for a prompt that is too long."""
    message = (
        f"This model's maximum context length is 64 tokens. However, you requested {output} output tokens "
        f"and your prompt contains {prompt} input tokens, for a total of 99 tokens. Please reduce the length "
        "of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=70)"
    )
    return vllm(message, "BadRequestError", 400, param)


INVALID, OVERLOADED = "invalid_request_error", "overloaded_error"
TOO_LONG = vllm_long("at least 70", 1, "input_tokens")
NO_MODEL = vllm("The model `gpt` does not exist.", "NotFoundError", 404)
BAD_N = vllm("bad n (parameter=n, value=0)", "BadRequestError", 400)
FULL = vllm("full", "Service Unavailable", 503)
DEAD = vllm("dead", "InternalServerError", 500)
RATE = openai_error("Rate limit reached", "requests", "rate_limit_exceeded")
QUOTA = openai_error("You exceeded your quota", "insufficient_quota", "insufficient_quota")
CASES = {
    "context": Case(400, ContextLengthError(64, 70), "context_length_exceeded", LONG, INVALID),
    "context, vLLM": Case(400, TOO_LONG, "context_length_exceeded", LONG, INVALID),
    "model": Case(404, UnknownModelError("gpt", "policy"), "model_not_found", MISSING, "not_found_error"),
    "model, vLLM": Case(404, NO_MODEL, "model_not_found", MISSING, "not_found_error"),
    "finished attempt": Case(401, AttemptFinishedError(), "invalid_api_key", DENIED, "authentication_error"),
    "truncated rollout": Case(400, RolloutTruncatedError("max_turns"), "rollout_truncated", BAD, INVALID),
    "field": Case(400, RequestError("n: it must be 1"), None, BAD, INVALID),
    "field, vLLM": Case(400, BAD_N, None, BAD, INVALID),
    "rate limit": Case(429, RATE, "rate_limit_exceeded", LIMITED, "rate_limit_error", retried=True),
    "quota": Case(429, QUOTA, "insufficient_quota", LIMITED, "rate_limit_error", retried=True),
    "recorder": Case(503, OverloadedError("full"), "server_is_overloaded", AWAY, OVERLOADED, retried=True),
    "queue, vLLM": Case(503, FULL, "server_is_overloaded", AWAY, OVERLOADED, retried=True),
    "failure": Case(500, "Internal Server Error", None, BROKEN, "api_error", retried=True),
    "failure, vLLM": Case(500, DEAD, None, BROKEN, "api_error", retried=True),
    "gateway": Case(502, RequestError("lost", 502, "api_error"), None, GATEWAY, "api_error", retried=True),
    "timeout": Case(
        504, RequestError("late", 504, "timeout_error"), None, LATE, "timeout_error", retried=True
    ),
}


@pytest.fixture
def replica(served: tuple[Replica, str]) -> Replica:
    return served[0]


@pytest.fixture
def base(address: str) -> str:
    return f"{address}{MINE}/v1"


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


ASK = CLIENTS | {"OpenAI Agents": agents_sdk}
INDEX = {"messages": 1, "LiteLLM openai": 2, "LiteLLM anthropic": 3, "LangChain": 4}
"""Place of a client's class in `Case.clients`; 0 for those that raise OpenAI's."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("client", client_params(ASK))
def test_a_client_raises_its_own_class(
    replica: Replica, base: str, client: str, case: str, stream: bool
) -> None:
    expected = CASES[case]
    replica.says[:] = [Say(status=expected.status, error=expected.body)]
    with pytest.raises(Exception) as caught:  # noqa: PT011  its class is what is tested
        ASK[client](base, stream)
    assert type(caught.value).__name__ == expected.clients[INDEX.get(client, 0)], str(caught.value)
    if client in ("chat", "responses"):
        assert caught.value.code == expected.code  # type: ignore[attr-defined]
    if client == "messages":
        body = caught.value.body  # type: ignore[attr-defined]
        assert body["error"]["type"] == expected.type
        assert body["request_id"] == caught.value.request_id  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ask", [chat, messages])
def test_what_passes_is_retried_and_nothing_else(
    replica: Replica, base: str, ask: Callable[..., None], case: str
) -> None:
    expected = CASES[case]
    say = Say(status=expected.status, error=expected.body, headers={"retry-after-ms": "1"})
    replica.says[:] = [say] * 3
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
        ask(base, False, 2)
    assert len(replica.says) == (0 if expected.retried else 2)


UPSTREAM_LONG = "Input tokens exceed the configured limit of 64 tokens. Your messages resulted in 70 tokens."
UPSTREAM = openai_error(UPSTREAM_LONG, "invalid_request_error", "context_length_exceeded")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (vllm_long("70", 1), "prompt is too long: 70 tokens > 63 maximum"),
        (vllm_long("at least 64", 1), "prompt is too long: 64 tokens > 63 maximum"),
        (vllm_long("50", 20), "prompt is too long: 50 tokens > 44 maximum"),
        (UPSTREAM, "prompt is too long: 70 tokens > 64 maximum"),
    ],
)
def test_a_long_prompt_is_told_in_anthropics_words(
    replica: Replica, base: str, error: Any, expected: str
) -> None:
    replica.says[:] = [Say(status=400, error=error)]
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages(base, False)
    assert caught.value.body["error"]["message"].startswith(expected)  # type: ignore[index]


def test_a_field_that_the_engine_names_is_the_param(replica: Replica, base: str) -> None:
    replica.says[:] = [Say(status=400, error=CASES["field, vLLM"].body)]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(base, False)
    assert (caught.value.param, caught.value.body["message"]) == ("n", "bad n")  # type: ignore[index]
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("ask", "error"), [(chat, openai.AuthenticationError), (messages, anthropic.AuthenticationError)]
)
def test_a_wrong_key(base: str, ask: Callable[..., None], error: type[Exception]) -> None:
    with pytest.raises(error, match="Incorrect API key provided: it is not the key of this address"):
        ask(base, False, 2, "wrong")


# in the middle of a stream

LOST = {"vllm": vllm("lost", "InternalServerError", 500), "openai": openai_error("lost", "server_error")}


@pytest.mark.parametrize("body", LOST.values(), ids=LOST)
def test_openais_sdk_in_the_middle_of_a_stream(replica: Replica, base: str, body: Any) -> None:
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
    replica: Replica, base: str, error: dict[str, Any], expected: str
) -> None:
    replica.says[:] = [Say("hel", error=error)]
    with pytest.raises(anthropic.APIStatusError, match="lost") as caught:
        messages(base, True)
    assert caught.value.body["error"]["type"] == expected  # type: ignore[index]


@pytest.mark.framework("litellm")
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_in_the_middle_of_a_stream(replica: Replica, base: str, provider: str) -> None:
    from litellm.exceptions import MidStreamFallbackError

    replica.says[:] = [Say("hel", error=LOST["vllm"]["error"])]
    with pytest.raises(MidStreamFallbackError, match="lost"):
        litellm_of(provider)(base, True)


def test_an_error_that_no_retry_changes_says_so(replica: Replica, base: str) -> None:
    body = error_body(RequestError("not here", 501, "server_error"))
    replica.says[:] = [Say(status=501, error=json.loads(json.dumps(body)))] * 2
    with pytest.raises(openai.InternalServerError):
        chat(base, False, 2)
    assert len(replica.says) == 1
