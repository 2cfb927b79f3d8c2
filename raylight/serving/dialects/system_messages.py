"""System messages at places where a chat template takes them."""

from __future__ import annotations

import functools
import uuid
from typing import Any

FIRST, SECOND = (f"Zq{uuid.uuid4().hex}" for _ in range(2))
"""Words that are unique in a rendered text."""


class SystemMessages:
    """Puts the system messages of a chat where its template takes them. Not thread-safe.

    Messages of developers become messages of the system, the only name that most templates know. Where the
    template refuses or omits a system message that is not the first message, all of them are folded into the
    first, in their order, as other servers do. Where it takes them, they keep their places, because another
    first message is another prompt.

    Args:
        tokenizer: Hugging Face tokenizer with the chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def place(self, messages: Any) -> Any:
        """Return a request's messages with system messages in their places; the same list if they are."""
        if not isinstance(messages, list):
            return messages
        named = [
            {**message, "role": "system"}
            if isinstance(message, dict) and message.get("role") == "developer"
            else message
            for message in messages
        ]
        found = [index for index, message in enumerate(named) if _is_system(message)]
        if found not in ([], [0]) and not (
            self._takes_later if found != list(range(len(found))) else self._takes_several
        ):
            text = "\n\n".join(filter(None, (_text(named[index]) for index in found)))
            rest = [message for message in named if not _is_system(message)]
            return [{**named[found[0]], "content": text}, *rest]
        return messages if all(new is old for new, old in zip(named, messages, strict=True)) else named

    @functools.cached_property
    def _takes_later(self) -> bool:
        """True if the template shows a system message after an answer."""
        turns = [_message("user", "u"), _message("assistant", "a"), _message("system", SECOND)]
        return self._shows([_message("system", FIRST), *turns, _message("user", "u")])

    @functools.cached_property
    def _takes_several(self) -> bool:
        """True if the template shows two system messages at the start."""
        return self._shows([_message("system", FIRST), _message("system", SECOND), _message("user", "u")])

    def _shows(self, messages: list[dict[str, str]]) -> bool:
        """True if the template shows all system messages, or not even the first, which the engine reports."""
        text = self._render(messages)
        if FIRST in text and SECOND in text:
            return True
        return FIRST not in self._render([_message("system", FIRST), _message("user", "u")])

    def _render(self, messages: list[dict[str, str]]) -> str:
        """Return the rendered text; "" if the template raises."""
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template is the model authors' program and may raise anything
            return ""


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "system"


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))
