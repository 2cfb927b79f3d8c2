"""Exceptions of an agent: its own fault, or the fault of a service that it called."""

import asyncio
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import anthropic
import httpx
import httpx2
import openai
import pytest
import requests

from raylight.errors import RewardError
from raylight.runner.outcome import classify
from raylight.semconv import REPLICA_HEADER

REQUEST = httpx.Request("POST", "http://engine/v1/chat/completions")
OWN = "rollout/ro-1/attempt/at-1"


def answer_error(cls: type[openai.APIStatusError], code: int) -> openai.APIStatusError:
    return cls("no", response=httpx.Response(code, request=REQUEST), body=None)


def caused(outer: BaseException, inner: BaseException) -> BaseException:
    try:
        raise outer from inner
    except type(outer) as error:
        return error


class OwnConnectError(Exception):
    pass


CONNECTION = openai.APIConnectionError(request=REQUEST)


@pytest.mark.parametrize(
    "error",
    [
        CONNECTION,
        openai.APITimeoutError(request=REQUEST),
        answer_error(openai.InternalServerError, 500),
        answer_error(openai.InternalServerError, 503),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("cut"),
        httpx2.ConnectError("refused"),
        httpx2.ReadTimeout("slow"),
        caused(RuntimeError("my tool"), CONNECTION),
        caused(
            ValueError("outer"), caused(KeyError("middle"), answer_error(openai.InternalServerError, 502))
        ),
        httpx.HTTPStatusError("503", request=REQUEST, response=httpx.Response(503, request=REQUEST)),
        ExceptionGroup(
            "unhandled errors in a TaskGroup", [CONNECTION, ExceptionGroup("inner", [CONNECTION])]
        ),
    ],
    ids=lambda error: f"{type(error).__name__}-{error}"[:40],
)
def test_a_service_that_is_down_is_the_infrastructure(error: BaseException) -> None:
    assert classify(error) == "infrastructure"


@pytest.mark.parametrize(
    "error",
    [
        answer_error(openai.BadRequestError, 400),
        answer_error(openai.AuthenticationError, 401),
        answer_error(openai.NotFoundError, 404),
        answer_error(openai.RateLimitError, 429),
        ValueError("no"),
        TimeoutError("mine"),
        KeyError("x"),
        OwnConnectError("not of a client library"),
        KeyboardInterrupt(),
        SystemExit(2),
        BaseException("odd"),
        caused(RuntimeError("outer"), answer_error(openai.BadRequestError, 400)),
        caused(RuntimeError("outer"), ValueError("inner")),
        httpx.HTTPStatusError("404", request=REQUEST, response=httpx.Response(404, request=REQUEST)),
        ExceptionGroup("mixed", [CONNECTION, ValueError("mine")]),
        BaseExceptionGroup("base", [KeyboardInterrupt()]),
    ],
    ids=lambda error: f"{type(error).__name__}-{error}"[:40],
)
def test_what_the_agent_did_wrong_is_the_agent(error: BaseException) -> None:
    assert classify(error) == "agent"


def test_a_wrong_reward_is_found_below_another_error() -> None:
    assert classify(caused(RuntimeError("outer"), RewardError("nan"))) == "reward"
    assert classify(ExceptionGroup("group", [RewardError("nan")])) == "reward"


def test_an_exception_that_is_its_own_cause_is_no_endless_search() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) == "agent"


# answers of the ingress


class Ingress(BaseHTTPRequestHandler):
    """Answers `/STATUS/...`, with the mark of a replica below `/marked`."""

    def do_POST(self) -> None:
        marked, _, rest = self.path.strip("/").partition("/")
        self.send_response(int(rest.partition("/")[0]))
        if marked == "marked":
            self.send_header(REPLICA_HEADER.title(), "r-1")
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def ingress() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Ingress)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


MESSAGES: Any = [{"role": "user", "content": "hi"}]


def call_openai(url: str, stream: bool = False) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)


def call_openai_stream(url: str) -> None:
    call_openai(url, stream=True)


def call_anthropic(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
    client.messages.create(model="m", messages=MESSAGES, max_tokens=1)


def call_httpx(url: str) -> None:
    httpx.post(url).raise_for_status()


def call_httpx2(url: str) -> None:
    httpx2.post(url).raise_for_status()


def call_requests(url: str) -> None:
    requests.post(url, timeout=10).raise_for_status()


def call_urllib(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10)


def call_aiohttp(url: str) -> None:
    async def call() -> None:
        async with aiohttp.ClientSession() as session, session.post(url) as response:
            response.raise_for_status()

    asyncio.run(call())


CALLS = [
    call_openai,
    call_openai_stream,
    call_anthropic,
    call_httpx,
    call_httpx2,
    call_requests,
    call_urllib,
    call_aiohttp,
]
Call = Callable[[str], None]


def error_of(call: Call, url: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of each library
        call(url)
    return caught.value


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("place", "statuses", "kind"),
    [
        (f"bare/{{}}/{OWN}", [400, 404, 429, 500, 502, 503, 504], "infrastructure"),
        (f"marked/{{}}/{OWN}", [400, 404, 429], "agent"),
        (f"marked/{{}}/{OWN}", [500, 503, 504], "infrastructure"),
        ("bare/{}/other", [404], "agent"),
        ("bare/{}/other", [503], "infrastructure"),
    ],
    ids=["ingress alone", "replica", "failing replica", "other service", "failing other service"],
)
def test_an_answer_follows_its_status_and_its_sender(
    call: Call, place: str, statuses: list[int], kind: str, ingress: str
) -> None:
    for status in statuses:
        assert classify(error_of(call, f"{ingress}/{place.format(status)}")) == kind, status


@pytest.mark.parametrize("call", CALLS)
def test_a_refused_connection_is_the_infrastructure(call: Call) -> None:
    assert classify(error_of(call, f"http://127.0.0.1:9/{OWN}")) == "infrastructure"


def in_handler(outer: BaseException, inner: BaseException) -> BaseException:
    try:
        try:
            raise inner
        except type(inner):
            raise outer  # noqa: B904
    except type(outer) as error:
        return error


@pytest.mark.parametrize("call", [call_openai, call_aiohttp, call_requests])
def test_frameworks_wrap_the_answer_of_the_ingress(call: Call, ingress: str) -> None:
    error = error_of(call, f"{ingress}/bare/404/{OWN}")
    assert classify(in_handler(RuntimeError("the model failed"), error)) == "infrastructure"
    assert classify(caused(RuntimeError("the model failed"), error)) == "infrastructure"
    assert classify(ExceptionGroup("mixed", [error, ValueError("mine")])) == "infrastructure"
    hidden = in_handler(RuntimeError("the model failed"), error)
    hidden.__suppress_context__ = True  # raise ... from None
    assert classify(hidden) == "infrastructure"


def test_an_error_in_a_handler_of_another_services_error_is_the_agents(ingress: str) -> None:
    error = error_of(call_openai, f"{ingress}/bare/503/other")
    assert classify(in_handler(KeyError("mine"), error)) == "agent"
    marked = error_of(call_openai, f"{ingress}/marked/404/{OWN}")
    assert classify(in_handler(KeyError("mine"), marked)) == "agent"


@pytest.mark.framework("litellm")
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (f"bare/404/{OWN}", "infrastructure"),
        (f"bare/503/{OWN}", "infrastructure"),
        (f"marked/404/{OWN}", "agent"),
        (f"marked/503/{OWN}", "infrastructure"),
    ],
)
def test_litellm_keeps_the_answer(path: str, kind: str, ingress: str) -> None:
    import litellm

    def call(url: str) -> None:
        retries = {"num_retries": 0, "max_retries": 0}
        litellm.completion("openai/m", MESSAGES, api_base=f"{url}/v1", api_key="k", **retries)

    assert classify(error_of(call, f"{ingress}/{path}")) == kind
