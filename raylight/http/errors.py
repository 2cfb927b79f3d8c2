"""Errors as HTTP answers: OpenAI's error shape, and the reading of engines' error answers in any shape.

Clients choose their exception classes, and whether to retry, by status, `type`, `code` and wording. So these
are the providers' own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from starlette.responses import JSONResponse

from raylight._utils.printable import encodable
from raylight.types import JsonObject

CONTEXT_LENGTH = "context_length_exceeded"
"""Code of the error of a prompt that is longer than the model's context."""
OPENAI_TYPES: Mapping[str, tuple[str, str | None]] = {
    "authentication_error": ("invalid_request_error", "invalid_api_key"),
    "permission_error": ("invalid_request_error", None),
    "not_found_error": ("invalid_request_error", None),
    "request_too_large": ("invalid_request_error", "request_too_large"),
    "overloaded_error": ("server_error", "server_is_overloaded"),
    "rate_limit_error": ("rate_limit_error", "rate_limit_exceeded"),
    "timeout_error": ("server_error", None),
    "api_error": ("server_error", None),
}
"""Kind of an error -> `type` and default `code` in OpenAI's shape. Other kinds are types of OpenAI's."""
STATUS_OF: Mapping[str, int] = {
    CONTEXT_LENGTH: 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "request_too_large": 413,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "server_is_overloaded": 503,
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}
"""Status of an error in a stream, which has none, by its `code` or `type`. All others are 500."""

KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Kind of an error by its status: a `type` of Anthropic's."""
_FIELD = re.compile(r"(?!body:)([A-Za-z_][\w.\[\]-]{0,99}): ")
"""A field's name at the start of a message."""
_TYPE = re.compile(r"[a-z][a-z_]*")
"""A type of OpenAI's. vLLM sends names of classes and HTTP phrases instead."""
_VLLM_DETAILS = re.compile(r" \(parameter=([\w.]+)(?:, value=.*)?\)$", re.DOTALL)
_MODEL_MISSING = re.compile(r"\bmodel\b.* (?:does not exist|not found)", re.DOTALL | re.IGNORECASE)
_LIMIT = re.compile(r"(?:maximum context length is|configured limit of) (\d+)")
_PROMPT = re.compile(
    r"(?:resulted in|prompt contains) (?:at least )?(\d+) (?:input )?tokens|(\d+) in your prompt"
)
_OUTPUT = re.compile(r"requested (\d+) output tokens|(\d+) for the completion")
_CHARS = re.compile(r"upper bound for (\d+) input tokens")


class RequestError(Exception):
    """A request that is rejected; the gateway answers it in the error shape of the request's dialect.

    Attributes:
        message: the text of the answer.
        status: its HTTP status.
        kind: a key of `OPENAI_TYPES`, or a `type` of OpenAI's. By default from `KINDS`, or else
            `invalid_request_error` below status 500 and `server_error` from there on.
        code: its `code` in OpenAI's shape; None: the default of the kind.
        param: field of the request that is wrong. By default the one that the message of a status 400 begins
            with: "field: reason".
        details: `error.details` in Anthropic's shape, by which its SDK decides how to go on; None: none.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str | None = None,
        *,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = encodable(message)
        self.status = status
        self.kind = kind or KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.code = code or OPENAI_TYPES.get(self.kind, (None, None))[1]
        if param is None and status == 400 and (field := _FIELD.match(message)):
            param = field[1]
        self.param = param
        self.details = details


class UnknownModelError(RequestError):
    """A request for a model that is not served."""

    def __init__(self, model: object, *served: str) -> None:
        names = f"; this endpoint serves {', '.join(map(repr, served))}" if served else ""
        super().__init__(
            f"The model `{model!s:.200}` does not exist{names}",
            404,
            code="model_not_found",
            param="model",
        )


def error_body(error: RequestError) -> JsonObject:
    """Return the body of an error answer in OpenAI's shape."""
    kind = OPENAI_TYPES.get(error.kind, (error.kind, None))[0]
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> JSONResponse:
    """Return an error answer in OpenAI's shape; outer layers reshape it for other dialects."""
    return JSONResponse(error_body(error), error.status)


def read_error(status: int, body: bytes) -> RequestError:
    """Read an engine's error answer: OpenAI's shape, FastAPI's `detail`, or plain text."""
    text = body.decode("utf-8", "replace").strip()
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return _error(text or f"the engine answered with status {status}", status)
    return find_error(answer, status) or _error(text, status)


def find_error(answer: object, status: int | None = None) -> RequestError | None:
    """Return the error in a decoded answer, or in a decoded event of a stream; None if there is none.

    Args:
        status: HTTP status of the answer. None: an event of a stream, whose error has a status or a type of
            its own.
    """
    if not isinstance(answer, dict):
        return None
    error = answer if answer.get("object") == "error" else answer.get("error") or answer.get("detail")
    if not error:
        return None
    if not isinstance(error, dict):
        return _error(error if isinstance(error, str) else json.dumps(error), status or 500)
    code, kind, param = (error.get(name) for name in ("code", "type", "param"))
    if status is None:
        status = _status_of(code, kind)
    message = error.get("message")
    return _error(
        message if isinstance(message, str) else json.dumps(error),
        status,
        kind if isinstance(kind, str) and _TYPE.fullmatch(kind) else None,
        code if isinstance(code, str) else None,
        param.removeprefix("body.") if isinstance(param, str) else None,
    )


def _status_of(code: object, kind: object) -> int:
    if isinstance(code, int) and 400 <= code <= 599:
        return code
    return next(
        (STATUS_OF[name] for name in (code, kind) if isinstance(name, str) and name in STATUS_OF), 500
    )


def _error(
    message: str, status: int, kind: str | None = None, code: str | None = None, param: str | None = None
) -> RequestError:
    """Return the error that an engine's answer states, with the code that its wording implies."""
    if details := _VLLM_DETAILS.search(message):
        message, param = message[: details.start()], param or details[1]
    if code is None and status == 404 and _MODEL_MISSING.search(message):
        code, param = "model_not_found", param or "model"
    if code is None and status == 400 and "maximum context length" in message:
        code = CONTEXT_LENGTH
    if code == CONTEXT_LENGTH and CONTEXT_LENGTH not in message:
        message = f"{message} ({CONTEXT_LENGTH})"  # LangChain looks for it in the text
    return RequestError(message, status, kind, code=code, param=param)


class ContextLengthError(RequestError):
    """A prompt that does not fit into the model's context, in the wording of each provider.

    Clients recognise it by that wording, and shorten the conversation instead of giving up.

    Args:
        limit: tokens of the longest prompt with its response.
        tokens: tokens of the prompt.
        at_least: True if `tokens` is a lower bound, because the text was not encoded to its end.
    """

    def __init__(self, limit: int, tokens: int, *, at_least: bool = False) -> None:
        count = f"at least {tokens}" if at_least else str(tokens)
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{count} tokens. Please reduce the length of the messages. ({CONTEXT_LENGTH})",
            code=CONTEXT_LENGTH,
        )


def anthropic_message(message: str) -> str:
    """Return the message of a context length error in Anthropic's wording, with the numbers of the original.

    Its maximum leaves room for the requested response. The original is this module's, OpenAI's or
    vLLM's; any other wording is quoted.
    """
    limit, prompt, output = (_number(pattern, message) for pattern in (_LIMIT, _PROMPT, _OUTPUT))
    if prompt is None and (longest := _number(_CHARS, message)) is not None:
        prompt = longest + 1
    if limit is None or prompt is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {prompt} tokens > {limit - (output or 0)} maximum"


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(next(filter(None, match.groups()))) if match else None
