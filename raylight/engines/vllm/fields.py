"""What agents may ask of vLLM's application: vLLM ignores the fields that it does not know; here they are
refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from raylight.http.errors import RequestError, error_response
from raylight.http.request import json_request

LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""They tell of the caller, and nothing of the answer."""
SETTLED: Mapping[str, tuple[Any, ...]] = {"store": (False, None), "service_tier": ("auto", "default", None)}
"""Fields that vLLM does not know, and the values of them that ask for what it does anyway."""
MAX_ENTRIES: Mapping[str, int] = {"messages": 10_000, "tools": 1_000, "stop": 64}
"""Of lists; vLLM's event loop and its scheduler take long over more."""


def _names(model: Any) -> frozenset[str]:
    aliases = (field.alias for field in model.model_fields.values())
    return LABELS | SETTLED.keys() | model.model_fields.keys() | {alias for alias in aliases if alias}


KNOWN = {"/v1/chat/completions": _names(ChatCompletionRequest), "/v1/completions": _names(CompletionRequest)}


class KnownFields:
    """ASGI: refuses requests for completions that vLLM would ignore a part of, or could never serve.

    Args:
        app: vLLM's.
        most: choices that may be waited for and sampled at a time; None: without limit.
    """

    def __init__(self, app: ASGIApp, most: int | None) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = KNOWN.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if known is None:
            await self._app(scope, receive, send)
            return
        try:
            request = await json_request(scope, receive)
            self._check(request.fields, known)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
        else:
            request = request.with_receive(receive)
            await self._app(request.put_into(scope), request, send)

    def _check(self, body: Mapping[str, Any], known: frozenset[str]) -> None:
        if unknown := body.keys() - known:
            names = ", ".join(sorted(unknown)[:10])
            raise RequestError(f"this engine does not support the request: unknown fields: {names:.1000}")
        for name, allowed in SETTLED.items():
            if name in body and body[name] not in allowed:
                raise RequestError(f"{name}: {body[name]!r:.50} is not supported by this engine")
        for name, most in MAX_ENTRIES.items():
            if isinstance(entries := body.get(name), list) and len(entries) > most:
                raise RequestError(f"{name}: at most {most} entries, not {len(entries)}")
        count = _choices(body)
        if self._most is not None and count > self._most:
            raise RequestError(
                f"n: this engine takes at most {self._most} choices at a time; the request asks for {count}"
            )


def _choices(body: Mapping[str, Any]) -> int:
    """How many choices a request asks for; what is no number vLLM refuses by itself."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return (n if type(n) is int else 1) * prompts
