"""Errors as HTTP answers: OpenAI's error shape, and the reading of engines' error answers in any shape."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


class RequestError(Exception):
    """A request that is rejected; the gateway answers it in the error shape of the request's dialect.

    Attributes:
        message: the text of the answer.
        status: its HTTP status.
        kind: its `type` in OpenAI's error shape.
    """

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.message = message.encode("utf-8", "replace").decode()  # quotes of lone surrogates cannot be sent
        self.status = status
        self.kind = kind


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error answer in OpenAI's shape."""
    return {"error": {"message": error.message, "type": error.kind, "param": None, "code": None}}


def error_response(error: RequestError) -> JSONResponse:
    """Return an error answer in OpenAI's shape; outer layers reshape it for other dialects."""
    return JSONResponse(error_body(error), error.status)


def read_error(status: int, body: bytes) -> RequestError:
    """Read an engine's error answer: OpenAI's shape, FastAPI's `detail`, or plain text."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = body.decode("utf-8", "replace").strip()
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return RequestError(text or f"the engine answered with status {status}", status, kind)
    return find_error(answer, status) or RequestError(text, status, kind)


def find_error(answer: Any, status: int = 500) -> RequestError | None:
    """Return the error in a decoded answer, or in a decoded event of a stream; None if there is none.

    Args:
        status: HTTP status of the answer. An event of a stream may have its own as its `code`.
    """
    if not isinstance(answer, dict):
        return None
    error = answer if answer.get("object") == "error" else answer.get("error") or answer.get("detail")
    if not error:
        return None
    if not isinstance(error, dict):
        return RequestError(error if isinstance(error, str) else json.dumps(error), status)
    if status == 500 and isinstance(code := error.get("code"), int) and 400 <= code <= 599:
        status = code
    kind, message = error.get("type"), error.get("message")
    return RequestError(
        message if isinstance(message, str) else json.dumps(error),
        status,
        kind if isinstance(kind, str) else "server_error",
    )
