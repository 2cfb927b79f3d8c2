"""Images of requests in every dialect: sent unchanged to the engine, once to the store, or refused."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from app_clients import anthropic_client, openai_client
from gateway_helpers import SECRET
from image_helpers import data_url, image_file, make_image
from PIL import Image as pillow
from store_helpers import Box, open_box
from unit_helpers import within
from vision_app import TEXT_TOOLS, VISION, VisionApp, vision_engine

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.config import EngineConfig
from raylight.images.messages import recorded_url
from raylight.semconv import INPUT_MESSAGES
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway

RED, BLUE = make_image("red"), make_image("blue")
TEXT = {"type": "text", "text": "which color?"}


def chat_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def block(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


class Served:
    """A replica's whole application with a store, and one attempt that calls it."""

    def __init__(self, box: Box, template: str | None, **config: Any) -> None:
        self.box, self.app, self.settings = box, VisionApp(), (template, config)

    async def start(self) -> Served:
        template, config = self.settings
        rollout = await self.box.store.start_rollout(input={})
        self.ids = rollout.rollout_id, rollout.attempt.attempt_id
        store = self.box.store
        self.recorder = Recorder(store.capture, write_images=store.write_images)
        engine = vision_engine(template)
        self.gateway = build_gateway(self.app, engine, SECRET, self.recorder, store, EngineConfig(**config))
        self.key, self.base = attempt_key(SECRET, *self.ids), f"http://localhost{attempt_path(*self.ids)}"
        return self

    def openai(self) -> openai.AsyncOpenAI:
        return openai_client(self.gateway, f"{self.base}/v1", self.key)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic_client(self.gateway, self.base, self.key)

    async def ask(self, dialect: str, messages: list[Any]) -> None:
        async with within():
            if dialect == "messages":
                async with self.anthropic() as client:
                    await client.messages.create(model="policy", max_tokens=5, messages=messages)
                return
            async with self.openai() as other:
                if dialect == "chat":
                    await other.chat.completions.create(model="policy", messages=messages)
                else:
                    await other.responses.create(model="policy", input=messages)

    async def recorded(self) -> tuple[list[Any], list[Any], set[str]]:
        """Return the recorded messages, the generations, and the digests of the files."""
        await self.recorder.aclose()
        finished = (await self.box.store.collect([self.ids[0]], with_spans=True))[0]
        messages = [json.loads(span.attributes[INPUT_MESSAGES]) for span in finished.spans]
        folder = self.box.service._images.path
        files = {path.name for path in folder.iterdir()} if folder.exists() else set()
        return messages, finished.generations, files


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    async with open_box() as opened:
        yield opened


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CASES: dict[str, list[Any]] = {
    "chat": [{"role": "user", "content": [TEXT, chat_part(RED.data_url), chat_part(BLUE.data_url)]}],
    "responses": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "which color?"},
                {"type": "input_image", "image_url": RED.data_url, "detail": "auto"},
                {"type": "input_image", "image_url": BLUE.data_url, "detail": "auto"},
            ],
        }
    ],
    "messages": [{"role": "user", "content": [TEXT, block(RED.data), block(BLUE.data)]}],
}
TOOLS: dict[str, list[Any]] = {
    "chat": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [TEXT, chat_part(RED.data_url)]},
        {"role": "user", "content": "and?"},
    ],
    "responses": [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [
                {"type": "input_text", "text": "which color?"},
                {"type": "input_image", "image_url": RED.data_url, "detail": "auto"},
            ],
        },
        {"role": "user", "content": "and?"},
    ],
    "messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, block(RED.data)]},
                {"type": "text", "text": "and?"},
            ],
        },
    ],
}


@pytest.mark.parametrize("dialect", CASES)
async def test_images_reach_the_engine_and_are_stored_once(box: Box, dialect: str) -> None:
    served = await Served(box, TEXT_TOOLS).start()
    await served.ask(dialect, CASES[dialect])
    await served.ask(dialect, CASES[dialect])
    assert served.app.images == [[RED.sha256, BLUE.sha256]] * 2
    assert "raylight-image" not in json.dumps(served.app.asked)
    messages, generations, files = await served.recorded()
    assert files == {RED.sha256, BLUE.sha256}
    parts = [TEXT, chat_part(recorded_url(RED.sha256)), chat_part(recorded_url(BLUE.sha256))]
    assert messages == [[{"role": "user", "content": parts}]] * 2
    assert [[image.sha256 for image in call.images] for call in generations] == served.app.images


@pytest.mark.parametrize("dialect", TOOLS)
async def test_images_of_tools_stay_where_the_template_shows_them(box: Box, dialect: str) -> None:
    served = await Served(box, VISION).start()
    await served.ask(dialect, TOOLS[dialect])
    asked = served.app.asked[0]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "user"]
    assert asked[2]["content"] == [TEXT, chat_part(RED.data_url)]
    assert asked[3]["content"] == "and?"


@pytest.mark.parametrize("dialect", TOOLS)
async def test_images_of_tools_become_the_users_elsewhere(box: Box, dialect: str) -> None:
    served = await Served(box, TEXT_TOOLS).start()
    await served.ask(dialect, TOOLS[dialect])
    asked = served.app.asked[0]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "user"]
    assert asked[2]["content"] == "which color?"
    assert asked[3]["content"] == [chat_part(RED.data_url), {"type": "text", "text": "and?"}]


BAD = {
    "truncated": RED.data[:60],
    "of another type": image_file(form="BMP"),
    "large": image_file(size=(60, 60)),
    "of no bytes": b"",
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dialect", CASES)
async def test_a_bad_image_is_refused_in_the_dialect(box: Box, dialect: str, bad: str) -> None:
    served = await Served(box, TEXT_TOOLS, max_image_pixels=2000).start()
    asked = json.loads(
        json.dumps(CASES[dialect]).replace(
            base64.b64encode(BLUE.data).decode(), base64.b64encode(BAD[bad]).decode()
        )
    )
    if dialect == "messages":
        with pytest.raises(anthropic.BadRequestError) as refused:
            await served.ask(dialect, asked)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        place = "messages[0].content[2]"
    else:
        with pytest.raises(openai.BadRequestError) as other:
            await served.ask(dialect, asked)
        place = "input[0].content[2]" if dialect == "responses" else "messages[0].content[2]"
        assert (other.value.type, other.value.param) == ("invalid_request_error", place)
        refused = other  # type: ignore[assignment]
    assert f"{place}: the image " in str(refused.value)
    assert served.app.asked == []
    assert await served.recorded() == ([], [], set())


UNREAD = {
    "bmp": data_url(image_file(form="BMP"), "image/bmp"),
    "animated": data_url(
        image_file(form="GIF", save_all=True, append_images=[pillow.new("RGB", (32, 32), "blue")]),
        "image/gif",
    ),
    "large": data_url(image_file(size=(60, 60))),
    "truncated": data_url(RED.data[:60]),
}


@pytest.mark.parametrize("unread", UNREAD)
async def test_an_upstream_model_gets_what_cannot_be_read_here(box: Box, unread: str) -> None:
    served = await Served(box, None, max_image_pixels=2000).start()
    url = UNREAD[unread]
    data = base64.b64decode(url.partition(",")[2])
    digest = hashlib.sha256(data).hexdigest()
    await served.ask("chat", [{"role": "user", "content": [TEXT, chat_part(url)]}])
    assert served.app.asked[0]["messages"][0]["content"] == [TEXT, chat_part(url)]
    messages, _, files = await served.recorded()
    assert messages == [[{"role": "user", "content": [TEXT, chat_part(recorded_url(digest))]}]]
    assert files == {digest}


@pytest.mark.parametrize(
    "url",
    ["data:image/bmp;base64,Qk0", " DATA:image/png;base64," + "Qk0=" * 9, recorded_url(RED.sha256)],
)
async def test_an_upstream_model_gets_no_damaged_or_recorded_url(box: Box, url: str) -> None:
    served = await Served(box, None).start()
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]: .*(base64|data URL)"):
        await served.ask("chat", [{"role": "user", "content": [chat_part(url)]}])
    assert served.app.asked == []


async def test_an_image_that_the_model_refuses_is_not_stored(box: Box) -> None:
    served = await Served(box, TEXT_TOOLS).start()
    served.app.status = 400
    with pytest.raises(openai.BadRequestError, match="text only"):
        await served.ask("chat", CASES["chat"])
    assert await served.recorded() == ([], [], set())


@pytest.mark.parametrize("url", ["https://example.com/a.png", recorded_url(RED.sha256), "file:///etc/passwd"])
async def test_other_urls_are_refused(box: Box, url: str) -> None:
    served = await Served(box, TEXT_TOOLS).start()
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        await served.ask("chat", [{"role": "user", "content": [chat_part(url)]}])
    assert served.app.asked == []


@pytest.mark.parametrize(
    ("most", "message"),
    [
        (
            0,
            r"takes no images in this run \(engine\.max_images=0.*; send text, or give .* kind='learner'",
        ),
        (1, r"2 images, and at most 1 are allowed; send fewer, or raise engine\.max_images"),
    ],
)
async def test_a_run_that_takes_fewer_images_names_the_setting(box: Box, most: int, message: str) -> None:
    served = await Served(box, TEXT_TOOLS, max_images=most).start()
    with pytest.raises(openai.BadRequestError, match=message):
        await served.ask("chat", [{"role": "user", "content": [chat_part(RED.data_url)] * 2}])
    assert served.app.asked == []


@pytest.mark.parametrize(
    "dialect",
    [
        "messages",
        *(
            pytest.param(dialect, marks=pytest.mark.slow("messages show it, and smaller images each dialect"))
            for dialect in ("chat", "responses")
        ),
    ],
)
async def test_twenty_screenshots_of_two_megabytes_are_one_request(box: Box, dialect: str) -> None:
    """PNG files may have further data after their image. A body that is too large names the setting."""
    shots = [make_image(str(number)).data + bytes([number]) * 2_000_000 for number in range(20)]
    parts = {
        "chat": [chat_part(data_url(shot)) for shot in shots],
        "responses": [{"type": "input_image", "image_url": data_url(shot)} for shot in shots],
        "messages": [block(shot) for shot in shots],
    }[dialect]
    served = await Served(box, TEXT_TOOLS).start()
    await served.ask(dialect, [{"role": "user", "content": parts}])
    assert served.app.images == [[hashlib.sha256(shot).hexdigest() for shot in shots]]
    small = await Served(box, TEXT_TOOLS, max_body_bytes=2**20).start()
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="max_body_bytes") as no:
        await small.ask(dialect, [{"role": "user", "content": parts}])
    assert no.value.status_code == 413


async def test_private_addresses_are_refused_with_the_setting_too(box: Box) -> None:
    served = await Served(box, TEXT_TOOLS, fetch_images=True).start()
    with pytest.raises(openai.BadRequestError, match="no public address"):
        await served.ask("chat", [{"role": "user", "content": [chat_part("http://127.0.0.1:8000/a.png")]}])


async def test_an_image_is_the_same_in_another_url(box: Box) -> None:
    served = await Served(box, TEXT_TOOLS).start()
    for url in (RED.data_url, data_url(RED.data, "image/png;charset=utf-8")):
        await served.ask("chat", [{"role": "user", "content": [chat_part(url)]}])
    messages, _, files = await served.recorded()
    assert (messages[0], files) == (messages[1], {RED.sha256})


async def test_the_image_is_stored_before_its_call(box: Box) -> None:
    """A store that cannot be reached is tried again; the call's record waits for its image."""
    served = await Served(box, TEXT_TOOLS).start()
    seen: list[str] = []
    fails = [OSError("away")] * 3

    async def write(images: Any) -> None:
        seen.append("image")
        if fails:
            raise fails.pop()
        await box.store.write_images(images)

    async def capture(opened: Any, closed: Any) -> Any:
        seen.extend("call" for _, call, _ in closed if call is not None)
        return await box.store.capture(opened, closed)

    served.recorder = Recorder(capture, write_images=write)
    served.gateway = build_gateway(
        served.app, vision_engine(), SECRET, served.recorder, box.store, EngineConfig()
    )
    await served.ask("chat", CASES["chat"])
    _, generations, files = await served.recorded()
    assert seen == ["image"] * 5 + ["call"]
    assert (len(generations), len(files)) == (1, 2)
