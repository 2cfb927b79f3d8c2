"""Images of SDKs and frameworks, unmodified, through the gateway and the transformers engine to the store."""

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import anthropic
import openai
import pytest
from engine_server import SECRET, EngineServer
from image_helpers import make_image
from PIL import Image as pillow
from tiny_vlms import build_vlm

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.images.messages import image_urls, recorded_url
from raylight.semconv import INPUT_MESSAGES
from raylight.types import FinishedRollout

RED, BLUE = make_image("red"), make_image("blue")
LIMIT = 4
"""Tokens of an answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    server = EngineServer("transformers", build_vlm("qwen3_vl", tmp_path_factory.mktemp("vlm")))
    yield server
    server.close()


class Attempt:
    """An attempt whose agent calls the server."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        rollout = server.call(server.store.start_rollout(input={}))
        assert rollout.attempt is not None
        self.ids = rollout.rollout_id, rollout.attempt.attempt_id
        self.key = attempt_key(SECRET, *self.ids)
        self.base = f"http://127.0.0.1:{server.port}{attempt_path(*self.ids)}"
        self.endpoint = f"{self.base}/v1"

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.endpoint, api_key=self.key, max_retries=0)

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.base, api_key=self.key, max_retries=0)

    def finished(self) -> FinishedRollout:
        """Return what the store has, once all calls are recorded."""
        server = self._server
        attempt = self.ids[1]
        assert server.call(server._service.wait_for_records(attempt, 30.0))
        return server.call(server.store.collect([self.ids[0]], with_spans=True))[0]


def chat(attempt: Attempt, stream: bool = False) -> None:
    parts: Any = [
        {"type": "text", "text": "which color?"},
        {"type": "image_url", "image_url": {"url": RED.data_url}},
    ]
    messages: Any = [{"role": "user", "content": parts}]
    with attempt.openai() as client:
        answer: Any = client.chat.completions.create(
            model="gpt-4o", messages=messages, max_tokens=LIMIT, stream=stream
        )
        assert list(answer) if stream else answer.choices[0].message.role == "assistant"


def responses(attempt: Attempt, stream: bool = False) -> None:
    parts: Any = [
        {"type": "input_text", "text": "which color?"},
        {"type": "input_image", "image_url": RED.data_url, "detail": "auto"},
    ]
    with attempt.openai() as client:
        answer: Any = client.responses.create(
            model="gpt-4o",
            input=[{"role": "user", "content": parts}],
            max_output_tokens=16,
            stream=stream,
        )
        assert list(answer) if stream else answer.output


def messages(attempt: Attempt, stream: bool = False) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED.data).decode()}
    parts: Any = [{"type": "text", "text": "which color?"}, {"type": "image", "source": source}]
    with attempt.anthropic() as client:
        answer: Any = client.messages.create(
            model="claude", max_tokens=LIMIT, messages=[{"role": "user", "content": parts}], stream=stream
        )
        assert list(answer) if stream else answer.role == "assistant"


def langchain(attempt: Attempt) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=attempt.endpoint, api_key=attempt.key, model="gpt-4o", max_tokens=LIMIT)  # type: ignore[arg-type, call-arg]
    image = {"type": "image", "base64": base64.b64encode(RED.data).decode(), "mime_type": "image/png"}
    model.invoke([HumanMessage(content=[{"type": "text", "text": "which color?"}, image])])


def pydantic_ai(attempt: Attempt) -> None:
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=attempt.endpoint, api_key=attempt.key)
    agent = Agent(OpenAIChatModel("gpt-4o", provider=provider), model_settings={"max_tokens": LIMIT})
    agent.run_sync(["which color?", BinaryContent(data=RED.data, media_type="image/png")])


def smolagents(attempt: Attempt) -> None:
    from smolagents import CodeAgent, LogLevel, OpenAIModel

    model = OpenAIModel("gpt-4o", api_base=attempt.endpoint, api_key=attempt.key, max_tokens=LIMIT)
    templates = {
        "system_prompt": "Look.",
        "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
        "managed_agent": {"task": "", "report": ""},
        "final_answer": {"pre_messages": "Look.", "post_messages": "{{task}}"},
    }
    agent = CodeAgent([], model, max_steps=1, verbosity_level=LogLevel.OFF, prompt_templates=templates)
    agent.run("which color?", images=[pillow.open(BytesIO(RED.data))])


def openai_agents(attempt: Attempt) -> None:
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
    from agents.exceptions import ModelBehaviorError

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=attempt.endpoint, api_key=attempt.key, max_retries=0)
    model = OpenAIResponsesModel("gpt-4o", client)
    agent = Agent("looker", model=model, model_settings=ModelSettings(max_tokens=16))
    parts = [
        {"type": "input_text", "text": "which color?"},
        {"type": "input_image", "image_url": RED.data_url, "detail": "auto"},
    ]
    with contextlib.suppress(ModelBehaviorError):  # the answer of a random model may not end
        Runner.run_sync(agent, [{"role": "user", "content": parts}])  # type: ignore[list-item, misc]


SDKS: dict[str, Callable[..., None]] = {"chat": chat, "responses": responses, "messages": messages}
FRAMEWORKS: dict[str, Callable[..., None]] = {
    "langchain_openai": langchain,
    "pydantic_ai": pydantic_ai,
    "smolagents": smolagents,
    "agents": openai_agents,
}


def check_recorded(attempt: Attempt) -> None:
    """Check that the first call has one image: in its message, among its tokens and in the store."""
    finished = attempt.finished()
    recorded = json.loads(finished.spans[0].attributes[INPUT_MESSAGES])
    (image,) = finished.generations[0].images
    assert [url for _, url in image_urls(recorded)] == [recorded_url(image.sha256)]
    assert "base64" not in json.dumps([span.attributes for span in finished.spans], default=str)
    server = attempt._server
    data = server.call(server.store.read_images([image.sha256]))[image.sha256]
    shown = pillow.open(BytesIO(data)).convert("RGB")
    assert shown.tobytes() == RED.open().tobytes()  # a client may write the file again


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sdk", SDKS)
def test_sdks(server: EngineServer, sdk: str, stream: bool) -> None:
    attempt = Attempt(server)
    SDKS[sdk](attempt, stream)
    check_recorded(attempt)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.framework(name)) for name in FRAMEWORKS]
)
def test_frameworks(server: EngineServer, name: str) -> None:
    attempt = Attempt(server)
    FRAMEWORKS[name](attempt)
    check_recorded(attempt)


def test_a_conversation_with_screenshots_is_one_row(server: EngineServer) -> None:
    """A tool returns a new screenshot in each turn, and the agent sends all of them again."""
    attempt = Attempt(server)
    history: list[Any] = [{"role": "user", "content": "look"}]
    images = [make_image((20 * turn, 90, 10), (32, 16 + 16 * (turn % 3))) for turn in range(5)]
    with attempt.openai() as client:
        for turn, image in enumerate(images):
            answer = client.chat.completions.create(
                model="policy", messages=history, max_tokens=LIMIT, extra_body={"min_tokens": 1}
            )
            text = answer.choices[0].message.content
            part = {"type": "image_url", "image_url": {"url": image.data_url}}
            history += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": [{"type": "text", "text": f"screen {turn}"}, part]},
            ]
        client.chat.completions.create(model="policy", messages=history, max_tokens=LIMIT)
    finished = attempt.finished()
    calls = finished.generations
    assert [len(call.images) for call in calls] == list(range(6))
    assert [image.sha256 for image in calls[-1].images] == [image.sha256 for image in images]
    trajectories = build_trajectories(calls)
    (row,) = trajectories.rows
    assert row.images == calls[-1].images
    assert row.token_ids.tolist() == calls[-1].token_ids.tolist()


def test_tokens_of_an_image_are_counted(server: EngineServer) -> None:
    attempt = Attempt(server)
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED.data).decode()}
    with attempt.anthropic() as client:
        counts = [
            client.messages.count_tokens(
                model="m", messages=[{"role": "user", "content": content}]
            ).input_tokens
            for content in ("x", [{"type": "text", "text": "x"}, {"type": "image", "source": source}])
        ]
    assert counts[1] >= counts[0] + 16


def test_a_response_is_continued_by_its_id(server: EngineServer) -> None:
    attempt = Attempt(server)
    shown = {"type": "input_image", "image_url": RED.data_url, "detail": "auto"}
    with attempt.openai() as client:
        first: Any = client.responses.create(
            model="m", input=[{"role": "user", "content": [shown]}], max_output_tokens=16
        )
        other = {"type": "input_image", "image_url": BLUE.data_url, "detail": "auto"}
        client.responses.create(
            model="m",
            previous_response_id=first.id,
            input=[{"role": "user", "content": [other]}],
            max_output_tokens=16,
        )
    calls = attempt.finished().generations
    assert [image.sha256 for image in calls[1].images] == [RED.sha256, BLUE.sha256]


def test_a_screenshot_of_a_tool_in_messages(server: EngineServer) -> None:
    """The template of the model shows images in tools' results."""
    attempt = Attempt(server)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(BLUE.data).decode()}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": source}]}
    messages: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    with attempt.anthropic() as client:
        client.messages.create(model="m", max_tokens=LIMIT, messages=messages)
    finished = attempt.finished()
    recorded = json.loads(finished.spans[0].attributes[INPUT_MESSAGES])
    assert [message["role"] for message in recorded] == ["user", "assistant", "tool"]
    assert [image.sha256 for image in finished.generations[0].images] == [BLUE.sha256]
