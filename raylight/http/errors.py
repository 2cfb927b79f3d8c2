"""Refusals in each dialect's own shape, and the reading of an engine's refusal, whatever its shape."""

from __future__ import annotations

import json
from typing import Any, Literal

from starlette.responses import JSONResponse

DialectName = Literal["chat", "completions", "responses", "messages"]


class RequestError(Exception):
    """A request that is refused; becomes an HTTP answer in the dialect's own error shape."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


_DIALECTS: dict[str, DialectName] = {
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
}
"""By the first segment of a path after `/v1/`."""

_MESSAGES_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def dialect_of(path: str) -> DialectName:
    """What is spoken at a path, with or without an attempt before its `/v1/`; "chat" where unknown."""
    return _DIALECTS.get(path.rpartition("/v1/")[2].partition("/")[0], "chat")


def error_body(dialect: DialectName, error: RequestError) -> dict[str, Any]:
    """The body of an answer that refuses."""
    message = (
        str(error).encode("utf-8", "replace").decode()
    )  # it may quote lone surrogates, which cannot be sent
    if dialect == "messages":
        kind = _MESSAGES_KINDS.get(
            error.status, "invalid_request_error" if error.status < 500 else "api_error"
        )
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": error.kind, "param": None, "code": None}}


def error_response(dialect: DialectName, error: RequestError) -> JSONResponse:
    return JSONResponse(error_body(dialect, error), error.status)


def read_error(status: int, body: bytes) -> RequestError:
    """What an engine's error answer says: OpenAI's shape, FastAPI's `detail`, or plain text."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = body.decode("utf-8", "replace").strip()
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return RequestError(text or f"the engine answered with status {status}", status, kind)
    return error_of(told, status) or RequestError(text, status, kind)


def error_of(told: Any, status: int = 500) -> RequestError | None:
    """The error that a decoded answer, or an event of a stream, tells of; None if it tells of none.

    Args:
        status: of the answer; an event of a stream may name its own as its `code`.
    """
    if not isinstance(told, dict):
        return None
    found = told.get("error") or told.get("detail")
    if told.get("object") == "error":
        found = told
    if not found:
        return None
    if not isinstance(found, dict):
        return RequestError(found if isinstance(found, str) else json.dumps(found), status)
    if status == 500 and isinstance(code := found.get("code"), int) and 400 <= code <= 599:
        status = code
    kind = found.get("type")
    message = found.get("message")
    return RequestError(
        message if isinstance(message, str) else json.dumps(found),
        status,
        kind if isinstance(kind, str) else "server_error",
    )
