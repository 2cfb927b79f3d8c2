"""Images through capture, and the size of a store whose rollouts share screenshots.

    python tests/benchmarks/images.py [--rollouts 1000] [--turns 10] [--calls 300] [--width 1280]
                                      [--height 800]

The application of an engine, which reads the images of each request and answers at once, is called bare and
behind the whole gateway with a store, in one process and without HTTP. Prints images a second of both: for
images that are new in each call, and for conversations that send their screenshots again in each turn.

Then each rollout has a conversation, in which all see the same screenshots, one a turn. Prints the bytes of
the store's file, of its folder of images and of the requests.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import make_parser
from PIL import Image as pillow

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.config import EngineConfig, StoreConfig
from raylight.engines.capture_context import CURRENT
from raylight.engines.protocol import EngineLoad
from raylight.http.request import json_request
from raylight.images.image import Image, read_data_url, read_image
from raylight.images.messages import image_urls
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import PlacedImage

SECRET, PATH = "secret", "/v1/chat/completions"
IMAGE_TOKENS = 1000
"""Tokens of an image, about as many as a screenshot has in Qwen's models."""


def screenshot(seed: int, width: int, height: int) -> Image:
    """Return an image with windows and lines of text, as compressible as one."""
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), 240, np.uint8)
    for _ in range(12):
        top, left = rng.integers(0, height - 80), rng.integers(0, width - 200)
        box = pixels[top : top + rng.integers(60, 300), left : left + rng.integers(150, 600)]
        box[:] = rng.integers(0, 256, 3)
        text = rng.random(box.shape[:2]) < 0.15
        text[(np.arange(len(text)) // 8) % 2 == 0] = False
        box[text] = 30
    buffer = BytesIO()
    pillow.fromarray(pixels).save(buffer, "PNG")
    return read_image(buffer.getvalue())


def user(image: Image) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": image.data_url}}
    return {"role": "user", "content": [{"type": "text", "text": "the screen"}, part]}


def body_of(images: list[Image]) -> bytes:
    """Return a request of a conversation with an image in each turn."""
    messages = [user(images[0])]
    for image in images[1:]:
        messages += [{"role": "assistant", "content": "click"}, user(image)]
    return json.dumps({"model": "m", "messages": messages}).encode()


async def engine_app(scope: Any, receive: Any, send: Any) -> None:
    """Read the images of a request, as an engine does, and answer."""
    fields = (await json_request(scope, receive)).fields
    images = [await asyncio.to_thread(read_data_url, url) for _, url in image_urls(fields["messages"])]
    step = IMAGE_TOKENS + 8
    if (context := CURRENT.get()) is not None:
        ids = np.resize(np.array([*range(4), *[9] * IMAGE_TOKENS, *range(4)], np.int32), step * len(images))
        places = [
            PlacedImage(one.sha256, step * n + 4, step * n + 4 + IMAGE_TOKENS) for n, one in enumerate(images)
        ]
        sample = context.sample(0, ids, {"temperature": 1.0}, tuple(places))
        sample.output_ids, sample.logprobs, sample.weight_versions = [1, 2], [-0.5, -0.5], [0, 0]
        sample.finish_reason = "stop"
    message = {"role": "assistant", "content": "click"}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    answer["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def call(app: Any, path: str, key: str, body: bytes) -> None:
    """Send a request to an application."""
    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": ""}
    sent: list[Any] = []
    given = [{"type": "http.request", "body": body, "more_body": False}]
    over = asyncio.Event()

    async def receive() -> Any:
        if given:
            return given.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope | {"query_string": b"", "headers": headers}, receive, send)
    over.set()
    assert sent[0]["status"] == 200, sent


class Captured:
    """The gateway with a store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.service = StoreService(folder / "store.db", StoreConfig(lease_s=600))
        self.store = StoreClient(self.service)
        self.recorder = Recorder(self.store.capture, write_images=self.store.write_images)
        engine: Any = SimpleNamespace(
            kind="mock", model="m", tokenizer=None, max_model_len=None, load=EngineLoad
        )
        config = EngineConfig(max_body_bytes=2**30)
        self.app = build_gateway(engine_app, engine, SECRET, self.recorder, self.store, config)

    async def attempt(self) -> Callable[[bytes], Awaitable[None]]:
        """Return a function that sends a request of a new attempt."""
        rollout = await self.store.start_rollout(input={})
        assert rollout.attempt is not None
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        path, key = f"{attempt_path(*ids)}{PATH}", attempt_key(SECRET, *ids)
        return lambda body: call(self.app, path, key, body)

    async def close(self) -> None:
        await self.recorder.aclose(60)
        await self.service.close()


async def rate(send: Callable[[bytes], Awaitable[None]], bodies: list[bytes], images: int) -> float:
    """Return images a second."""
    begun = time.perf_counter()
    for body in bodies:
        await send(body)
    return images / (time.perf_counter() - begun)


async def speed(captured: Captured, calls: int, turns: int, width: int, height: int) -> None:
    async def bare(body: bytes) -> None:
        await call(engine_app, PATH, "", body)

    for title, bodies_of, images in (
        (
            "new images",
            lambda seed: [body_of([screenshot(seed + n, width, height)]) for n in range(calls)],
            calls,
        ),
        (
            "conversations",
            lambda seed: [
                body_of([screenshot(seed + n, width, height) for n in range(turn + 1)])
                for turn in range(turns)
            ],
            turns * (turns + 1) // 2,
        ),
    ):
        one = await rate(bare, bodies_of(10**6), images)
        other = await rate(await captured.attempt(), bodies_of(2 * 10**6), images)
        print(f"{title}: bare {one:.0f} images/s, captured {other:.0f} images/s, {other / one:.2f} of it")


async def growth(captured: Captured, rollouts: int, turns: int, width: int, height: int) -> None:
    images = [screenshot(seed, width, height) for seed in range(turns)]
    bodies = [body_of(images[: turn + 1]) for turn in range(turns)]
    before = sizes(captured)
    begun = time.perf_counter()
    for _ in range(rollouts):
        send = await captured.attempt()
        for body in bodies:
            await send(body)
    seconds = time.perf_counter() - begun
    await captured.recorder.aclose(60)
    await captured.service.query("statistics")
    rows, files = (after - was for after, was in zip(sizes(captured), before, strict=True))
    sent = rollouts * sum(map(len, bodies))
    print(
        f"{rollouts} rollouts of {turns} turns that share {turns} screenshots ({seconds:.0f} s): "
        f"{sent / 1e6:.0f} MB in requests, {rows / 1e6:.1f} MB in the store's file "
        f"({rows / rollouts / turns:.0f} bytes a call), {files / 1e6:.2f} MB in its image folder"
    )


def sizes(captured: Captured) -> tuple[int, int]:
    """Return the bytes of the store's file and of its images."""
    captured.service._journal.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file = captured.service._journal.path
    folder = captured.service._images.path
    images = sum(path.stat().st_size for path in folder.iterdir()) if folder.exists() else 0
    return file.stat().st_size, images


async def main(arguments: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        captured = Captured(Path(folder))
        size = (arguments.width, arguments.height)
        await speed(captured, arguments.calls, arguments.turns, *size)
        await growth(captured, arguments.rollouts, arguments.turns, *size)
        await captured.close()


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=800)
    asyncio.run(main(parser.parse_args()))
