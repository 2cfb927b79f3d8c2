"""Errors of every engine, as every SDK raises them, streamed or not."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import engine_server
import openai
import pytest
from engine_server import MAX_MODEL_LEN, SECRET, EngineServer

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.types import AttemptedRollout

ERRORS = (openai.APIStatusError, anthropic.APIStatusError)
TOKENS = re.compile(r"(\d+) tokens > (\d+) maximum")


class Caller:
    """Clients of one attempt."""

    def __init__(self, server: EngineServer) -> None:
        self.rollout: AttemptedRollout = server.call(server.store.start_rollout("task"))
        ids = self.rollout.rollout_id, self.rollout.attempt.attempt_id
        base = f"http://127.0.0.1:{server.port}{attempt_path(*ids)}/v1"
        options: Any = {"base_url": base, "api_key": attempt_key(SECRET, *ids), "max_retries": 0}
        self.openai = openai.OpenAI(**options)
        self.anthropic = anthropic.Anthropic(**options)

    def chat(self, text: str, **fields: Any) -> Any:
        body: Any = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return self.openai.chat.completions.create(**body | fields)

    def completions(self, text: str, **fields: Any) -> Any:
        return self.openai.completions.create(**{"model": "policy", "prompt": text, "max_tokens": 4} | fields)

    def responses(self, text: str, **fields: Any) -> Any:
        return self.openai.responses.create(
            **{"model": "policy", "input": text, "max_output_tokens": 16} | fields
        )

    def messages(self, text: str, **fields: Any) -> Any:
        body: Any = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return self.anthropic.messages.create(**body | fields)

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()


@pytest.fixture
def caller(server: EngineServer) -> Iterator[Caller]:
    caller = Caller(server)
    yield caller
    caller.close()


DIALECTS: dict[str, Callable[..., Any]] = {
    "chat": Caller.chat,
    "completions": Caller.completions,
    "responses": Caller.responses,
    "messages": Caller.messages,
}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


def rejected(caller: Caller, dialect: str, text: str = "hi", **fields: Any) -> Any:
    """Return the exception with which a request is rejected."""
    with pytest.raises(ERRORS) as caught:
        DIALECTS[dialect](caller, text, **fields)
    return caught.value


def check(
    error: Any, dialect: str, openai_type: type, anthropic_type: type, code: str | None, kind: str
) -> None:
    """Assert the class, code and type of an error."""
    if dialect == "messages":
        assert type(error) is anthropic_type
        assert error.body["error"]["type"] == kind
    else:
        assert type(error) is openai_type
        assert (error.code, error.type) == (code, "invalid_request_error")


@streamed_or_not
@every_dialect
@pytest.mark.parametrize("length", [MAX_MODEL_LEN + 10, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_prompt_that_is_too_long(caller: Caller, dialect: str, stream: bool, length: int) -> None:
    error = rejected(caller, dialect, "a" * length, stream=stream)
    check(
        error,
        dialect,
        openai.BadRequestError,
        anthropic.BadRequestError,
        "context_length_exceeded",
        "invalid_request_error",
    )
    if dialect == "messages":
        numbers = TOKENS.search(error.message)
        assert numbers is not None
        assert int(numbers[1]) > int(numbers[2]) >= MAX_MODEL_LEN - 4  # vLLM leaves room for the response
    else:
        field = {"chat": "messages", "completions": "prompt", "responses": "input"}[dialect]
        assert error.param == field
        assert f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, " in error.message


@every_dialect
def test_a_finished_attempt(server: EngineServer, caller: Caller, dialect: str) -> None:
    server.call(server.store.finish_attempt(caller.rollout, "succeeded"))
    error = rejected(caller, dialect)
    check(
        error,
        dialect,
        openai.AuthenticationError,
        anthropic.AuthenticationError,
        "invalid_api_key",
        "authentication_error",
    )
    assert "attempt already finished; its API key has been revoked" in error.message


@every_dialect
def test_a_field_with_a_wrong_value(caller: Caller, dialect: str) -> None:
    error = rejected(caller, dialect, extra_body={"temperature": "hot"})
    assert "temperature" in error.message
    assert "Traceback" not in error.message
    if dialect == "messages":
        assert error.body["error"]["type"] == "invalid_request_error"
    else:
        assert (error.type, error.param) == ("invalid_request_error", "temperature")


@pytest.fixture
def broken(tiny: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    """Caller of a separate server, whose engine samples one token and fails."""
    engine: Any = engine_server.small_engine(tiny)

    def fail() -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine._decoder, "decode", fail)
    monkeypatch.setattr(engine_server, "small_engine", lambda path: engine)
    server = EngineServer("transformers", tiny)
    caller = Caller(server)
    yield caller
    caller.close()
    server.close()


@pytest.mark.parametrize("dialect", ["chat", "completions", "messages"])
def test_an_engine_that_fails_in_the_middle_of_a_stream(broken: Caller, dialect: str) -> None:
    with pytest.raises((openai.APIError, anthropic.APIStatusError), match="out of order") as caught:
        list(DIALECTS[dialect](broken, "hi", stream=True, max_tokens=8))
    error: Any = caught.value
    if dialect == "messages":
        assert error.body["error"]["type"] == "api_error"
    else:
        assert (error.code, error.type) == (None, "server_error")
