"""Registry of the dialects that are served."""

from __future__ import annotations

from raylight.engines.capture_context import AttemptScope
from raylight.semconv import CHAT_SPAN, COMPLETION_SPAN
from raylight.serving.dialects.dialect import Dialect, Translation
from raylight.serving.dialects.messages import MessagesDialect
from raylight.serving.dialects.responses import ResponsesDialect
from raylight.types import JsonObject


class NativeDialect(Dialect):
    """Base of the dialects that need no translation."""

    native = True

    def translate(self, path: str, body: JsonObject, scope: AttemptScope | None) -> Translation:
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


DIALECTS: dict[str, type[Dialect]] = {
    dialect.name: dialect for dialect in (ChatDialect, CompletionsDialect, ResponsesDialect, MessagesDialect)
}
"""Dialects by name. A new one is served once it is in here."""


def dialect_of(path: str) -> type[Dialect]:
    """Return the dialect of a path, with or without an attempt before its `/v1/`.

    Other paths count as `ChatDialect`, whose error shape they use.
    """
    if sampling := sampling_dialect(path):
        return sampling
    segment = path.rpartition("/v1/")[2].partition("/")[0]
    for dialect in DIALECTS.values():
        if f"{dialect.path}/".startswith(f"/v1/{segment}/"):
            return dialect
    return ChatDialect


def sampling_dialect(path: str) -> type[Dialect] | None:
    """Return the dialect whose requests to this path sample; None if no dialect's do."""
    for dialect in DIALECTS.values():
        if dialect.path == path:
            return dialect
    return None
