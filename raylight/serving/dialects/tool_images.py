"""Images of tools' results, in the messages in which a model's chat template takes them."""

from __future__ import annotations

import functools
from typing import Any

from raylight.images.messages import image_url_of
from raylight.serving.dialects.chat_normalizer import FIRST, SECOND, rendered
from raylight.serving.dialects.dialect import MessageSource
from raylight.types import JsonObject, Tokenizer
from raylight.types.chat_messages import join_parts, text_part, tool_call

CALL: JsonObject = {"role": "assistant", "content": "", "tool_calls": [tool_call("call_0", "f", "{}")]}
CALL["tool_calls"][0]["function"]["arguments"] = {}  # templates take them decoded


class ToolImages:
    """Moves the images of tools' results into the user's next message, unless the template shows them.

    Most templates, and OpenAI's chat API, take only text from tools. Not thread-safe.

    Args:
        tokenizer: Hugging Face tokenizer with the chat template; None: the model runs elsewhere.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def place(self, messages: Any) -> tuple[Any, list[MessageSource] | None]:
        """Return a request's messages with images in their places, and the source of each message among the
        given ones; the same list and None if they are in their places."""
        if not isinstance(messages, list) or not any(map(_has_images, messages)) or self._takes_images:
            return messages, None
        placed: list[JsonObject] = []
        sources: list[MessageSource] = []
        moved: list[tuple[JsonObject, str]] = []
        for index, message in enumerate(messages):
            path = f"messages[{index}]"
            if moved and not _is(message, "tool"):
                parts = _parts(message, path) if _is(message, "user") else []
                placed.append(_user(moved + parts))
                sources.append(_source(path, moved + parts))
                moved = []
                if _is(message, "user"):
                    continue
            if _has_images(message):
                parts = _parts(message, path)
                moved += [pair for pair in parts if image_url_of(pair[0]) is not None]
                rest = [part for part, _ in parts if image_url_of(part) is None]
                message = message | {"content": join_parts(rest)}
            placed.append(message)
            sources.append({"": path})
        if moved:
            placed.append(_user(moved))
            sources.append(_source(f"messages[{len(messages) - 1}]", moved))
        return placed, sources

    @functools.cached_property
    def _takes_images(self) -> bool:
        """True if the template shows an image between two texts of a tool's result."""
        if (tokenizer := self._tokenizer) is None:
            return False
        parts = [text_part(FIRST), {"type": "image"}, text_part(SECOND)]
        shown, without = _render(tokenizer, parts), _render(tokenizer, [parts[0], parts[2]])
        return (
            FIRST in shown
            and SECOND in shown
            and shown != without
            and "'type'" not in shown
            and '"type"' not in shown
        )


def _render(tokenizer: Tokenizer, content: list[JsonObject]) -> str:
    result = {"role": "tool", "tool_call_id": "call_0", "content": content}
    return rendered(tokenizer, [{"role": "user", "content": "u"}, CALL, result])


def _is(message: object, role: str) -> bool:
    return isinstance(message, dict) and message.get("role") == role


def _has_images(message: Any) -> bool:
    content = message.get("content") if _is(message, "tool") else None
    return isinstance(content, list) and any(image_url_of(part) is not None for part in content)


def _parts(message: JsonObject, path: str) -> list[tuple[JsonObject, str]]:
    """Return the parts of a message's content with their paths."""
    content = message.get("content")
    if isinstance(content, str):
        return [(text_part(content), f"{path}.content")] if content else []
    numbered = enumerate(content if isinstance(content, list) else ())
    return [(part, f"{path}.content[{place}]") for place, part in numbered]


def _user(parts: list[tuple[JsonObject, str]]) -> JsonObject:
    return {"role": "user", "content": [part for part, _ in parts]}


def _source(path: str, parts: list[tuple[JsonObject, str]]) -> MessageSource:
    return {"": path} | {f"content[{place}]": source for place, (_, source) in enumerate(parts)}
