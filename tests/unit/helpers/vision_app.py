"""A chat template with images, and an engine's application that samples for chats with images."""

import base64
import hashlib
import json
from types import SimpleNamespace
from typing import Any

from asgi_helpers import response_body, start
from capture_helpers import ENGINE, add_token
from starlette.types import Receive, Scope, Send
from template_helpers import make_tokenizer

from raylight.engines.capture_context import CURRENT
from raylight.images.messages import image_urls
from raylight.types import PlacedImage

VISION = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that shows images in every message."""
TEXT_TOOLS = VISION.replace(
    "{% if m.content is string %}",
    "{% if m.role == 'tool' %}{{ m.content | string }}{% elif m.content is string %}",
)
"""A template that shows no images in tools' results."""


def vision_engine(template: str | None = TEXT_TOOLS) -> Any:
    """Return an engine with a template; None: of a model that runs elsewhere."""
    return SimpleNamespace(**vars(ENGINE) | {"tokenizer": template and make_tokenizer(template)})


class VisionApp:
    """Answers chats, streamed or not, and records what it received.

    Attributes:
        asked: bodies of the requests.
        images: their images, as the engine reads them.
        status: status of its answers.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.images: list[list[str]] = []
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        self.asked.append(body)
        files = [base64.b64decode(url.partition(",")[2]) for _, url in image_urls(body["messages"])]
        digests = [hashlib.sha256(data).hexdigest() for data in files]
        self.images.append(digests)
        if self.status >= 400:
            content: Any = {"error": {"message": "this model accepts text only", "type": "t"}}
        else:
            content = self._answer(digests)
        await send(start(self.status, content_type="application/json"))
        await send(response_body(json.dumps(content).encode()))

    def _answer(self, digests: list[str]) -> dict[str, Any]:
        if (context := CURRENT.get()) is not None:
            images = tuple(PlacedImage(name, 4 * i, 4 * i + 4) for i, name in enumerate(digests))
            sample = context.sample(0, [9] * 4 * len(digests) + [1], {"temperature": 1.0}, images)
            add_token(sample, 2)
            sample.finish_reason = "stop"
        message = {"role": "assistant", "content": "red"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
        return head | {"choices": [choice], "usage": usage}
