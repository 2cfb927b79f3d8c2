"""The dialects that engines serve themselves: OpenAI's chat completions and completions."""

from __future__ import annotations

from typing import Any

from raylight.engines.capture_context import AttemptScope
from raylight.semconv import CHAT_SPAN, COMPLETION_SPAN
from raylight.serving.dialects.dialect import Dialect, Translation


class NativeDialect(Dialect):
    """Base of the dialects that need no translation."""

    native = True

    def translate(self, path: str, body: dict[str, Any], scope: AttemptScope | None) -> Translation:
        raise NotImplementedError(f"requests to {path} go to the engine untranslated")


class ChatDialect(NativeDialect):
    """OpenAI's chat completions."""

    name = "chat"
    path = "/v1/chat/completions"
    span_name = CHAT_SPAN


class CompletionsDialect(NativeDialect):
    """OpenAI's completions: text or tokens in, text out."""

    name = "completions"
    path = "/v1/completions"
    span_name = COMPLETION_SPAN
    prompt_field = "prompt"
