"""`raylight serve`, as a user runs it: a fresh process, a fresh local Ray, real SDKs as clients."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from ray_cluster import BIN, CLUSTER_VARIABLE, DEADLINE_S, SESSION, eventually, processes_with
from serve_command import Server, serve

from raylight.quickstart import STARTER_MODEL

LOCAL = {**os.environ, "RAY_ADDRESS": "local"}
ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "unit" / "helpers"
HI = [{"role": "user", "content": "12+30="}]


# tests/features shows the dialects in the test line
pytestmark = pytest.mark.slow(parts=4)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    shared = {CLUSTER_VARIABLE: "serve"}
    with serve("--model", STARTER_MODEL, "--name", "tiny", env=shared) as running:
        yield running
    eventually(lambda: not processes_with({**SESSION, **shared}), DEADLINE_S, "the end of the server")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="anything", max_retries=0) as client:
        yield client


def test_it_shows_how_the_engine_reads_the_model(server: Server) -> None:
    line = (
        "context length: 2048 tokens; chat template: it shows no tools to the model; "
        "tool calls: not parsed (the template shows no tools); "
    )
    assert line in server.output
    assert (
        "note: the model's chat template does not show the tools of a request to the model; " in server.output
    )


@pytest.mark.parametrize("end", ["", "/", "/v1/", "/v1//", "/v1/v1"])
def test_a_base_url_is_served_however_it_ends(server: Server, end: str) -> None:
    """Ray Serve's proxy passes every path on."""
    base = server.url + end
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0) as client:
        assert client.chat.completions.create(model="tiny", messages=HI, max_tokens=1).choices
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt", messages=HI)
    assert caught.value.code == "model_not_found"
    with anthropic.Anthropic(base_url=base, api_key="any", max_retries=0) as claude:
        assert claude.messages.create(model="tiny", messages=HI, max_tokens=1).usage.output_tokens == 1


def test_every_dialect_answers(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    settings = {"model": "tiny", "temperature": 0.0}
    chat = client.chat.completions.create(messages=HI, max_tokens=4, **settings).choices[0].message.content
    streamed = client.chat.completions.create(messages=HI, max_tokens=4, stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == chat
    assert client.responses.create(input=HI, max_output_tokens=16, **settings).output_text.startswith(
        chat or ""
    )
    greedy = {"model": "tiny", "messages": HI, "max_tokens": 4, "extra_body": {"temperature": 0.0}}
    message = claude.messages.create(**greedy)
    assert message.content[0].text == chat
    with claude.messages.stream(**greedy) as stream:
        assert "".join(stream.text_stream) == chat
    assert client.completions.create(prompt="12+30=", max_tokens=4, **settings).usage.completion_tokens > 0


def test_models_and_tokens(client: openai.OpenAI, claude: anthropic.Anthropic, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    counted = claude.messages.count_tokens(model="tiny", messages=HI).input_tokens
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": "tiny", "messages": HI}).json()
    assert counted == tokens["count"] == len(tokens["tokens"])
    back = httpx.post(f"{server.url}/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]}).json()
    assert "12+30=" in back["prompt"]


def test_errors_have_the_sdk_s_types(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.NotFoundError, match="absent"):
        client.chat.completions.create(model="absent", messages=HI)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[])
    with pytest.raises(anthropic.NotFoundError, match="absent"):
        claude.messages.create(model="absent", messages=HI, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="tiny", messages=HI, max_tokens=-1)


def test_health_and_nothing_else(server: Server, client: openai.OpenAI) -> None:
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    client.chat.completions.create(model="tiny", messages=HI, max_tokens=2)
    for path in (
        "/metrics",
        "/docs",
        "/openapi.json",
        "/v1/load_lora_adapter",
        "/pause",
        "/sleep",
        "/collective_rpc",
    ):
        for method in ("GET", "POST"):
            answer = httpx.request(method, f"{server.url}{path}")
            assert answer.status_code == 404, path
            assert json.loads(answer.text)["error"]["message"]


@pytest.mark.slow
def test_an_upstream_is_served_under_a_key_and_nothing_is_left(
    server: Server, no_processes_left: None
) -> None:
    """A second server uses the first one as its upstream."""
    args = (
        "--url",
        f"{server.url}/v1",
        "--model",
        "tiny",
        "--name",
        "passed-on",
        "--api-key",
        "sesame",
        "--num-cpus",
        "0",
    )
    with serve(*args) as front:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0).models.list()
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="sesame", max_retries=0) as client:
            settings = {"model": "passed-on", "messages": HI, "temperature": 0.0, "max_tokens": 4}
            reply = client.chat.completions.create(**settings)
            streamed = client.chat.completions.create(stream=True, **settings)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
        assert text == reply.choices[0].message.content
        with anthropic.Anthropic(base_url=front.url, api_key="sesame", max_retries=0) as claude:
            message = claude.messages.create(
                model="passed-on", messages=HI, max_tokens=4, extra_body={"temperature": 0.0}
            )
        assert message.content[0].text == text


@pytest.mark.slow
def test_an_engine_by_dotted_name_is_served(no_processes_left: None) -> None:
    args = (
        "--model",
        STARTER_MODEL,
        "--name",
        "echo",
        "--engine",
        "echo_engine:EchoEngine",
        "--num-cpus",
        "0",
    )
    with (
        serve(*args, "--set", "engine.args.suffix=_ok", env={"PYTHONPATH": f"{HELPERS}:{ROOT}"}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0) as client,
    ):
        reply = client.chat.completions.create(model="echo", messages=HI)
    assert reply.choices[0].message.content == "12+30=_ok"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "/no/such/model"), "ModelNotFoundError"),
        pytest.param(
            ("--model", STARTER_MODEL, "--set", "engine.args.no_such_argument=1"),
            "no_such_argument",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--model", STARTER_MODEL, "--engine", "vlm"), "engine 'vlm'", marks=pytest.mark.slow),
        pytest.param(("--model", STARTER_MODEL, "--engine", "upstream"), "url", marks=pytest.mark.slow),
        pytest.param(("--model", STARTER_MODEL, "--set", "nothing"), "NAME=VALUE", marks=pytest.mark.slow),
    ],
)
def test_bad_arguments_end_with_one_message(
    args: tuple[str, ...], message: str, no_processes_left: None
) -> None:
    done = subprocess.run(
        [str(BIN / "raylight"), "serve", *args], env=LOCAL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
