"""The seam for dialects: HTTP APIs that agents call, translated to and from the engine's chat completions.

A new dialect is one class in a new file and one entry in `registry.DIALECTS`. The gateway then serves
its routes, capture records its calls, the retry cache answers its retries, and every error leaves in its
shape.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import CONTEXT_LENGTH, RequestError, error_body
from raylight.types import JsonObject

MessageSource = Mapping[str, str]
"""Paths in the agent's request by paths within one chat message: "" is the message, "content[0]" a part."""

_PATH = re.compile(r"(?<![\w.'\"`/])[a-z]\w*(?:\[\d+\]|\.[a-z_]\w*)*(?!\w)")
_MESSAGE = re.compile(r"messages\[(\d+)\]\.?")


class FieldNames:
    """Translates paths of fields, such as `messages[2].content`, back to the agent's request.

    Args:
        names: path in the agent's request by its path in the chat request, without `messages`. `[]` stands
            for any index, and the longest path counts.
        messages: returns the source of each chat message; called for an error only.
    """

    def __init__(
        self, names: Mapping[str, str], messages: Callable[[], Sequence[MessageSource]] = tuple
    ) -> None:
        self._names = names
        self._messages = messages

    def of(self, path: str) -> str:
        """Return the agent's path of a field of the chat request."""
        if match := _MESSAGE.match(path):
            return self._of_message(int(match[1]), path[match.end() :]) or path
        for chat in sorted(self._names, key=len, reverse=True):
            if match := re.match(re.escape(chat).replace(r"\[\]", r"(\[\d+\])") + r"(?!\w)", path):
                return match.expand(self._names[chat].replace("[]", r"\1")) + path[match.end() :]
        return path

    def behind(self, sources: Sequence[MessageSource]) -> FieldNames:
        """Return the names of a request whose messages were rearranged.

        Args:
            sources: the source of each message in the request that this object names.
        """
        return FieldNames(
            self._names, lambda: [{name: self.of(path) for name, path in one.items()} for one in sources]
        )

    def _of_message(self, index: int, inner: str) -> str | None:
        sources = self._messages()
        if index >= len(sources):
            return None
        source = sources[index]
        known = max((name for name in source if _begins(inner, name)), key=len)
        rest = inner[len(known) :]
        return source[known] + ("." if rest and rest[0] not in ".[" else "") + rest

    def rename(self, error: RequestError) -> RequestError:
        """Return an error with the agent's names in its message, in place of the chat request's."""
        renamed = copy.copy(error)
        renamed.message = _PATH.sub(lambda match: self._in_text(match, error.message), error.message)
        renamed.param = self.of(error.param) if error.param else None
        return renamed

    def _in_text(self, match: re.Match[str], text: str) -> str:
        """Return the agent's path if a word of a text is surely the name of a field."""
        path = match[0]
        is_field = "_" in path or "[" in path or text[match.end() : match.end() + 1] in (":", "=")
        return self.of(path) if is_field else path


def _begins(path: str, name: str) -> bool:
    return path.startswith(name) and (not name or path[len(name) : len(name) + 1] in ("", ".", "["))


Event = JsonObject
"""Data of a server-sent event. Its `type`, if it has one, becomes the name of the event."""


TOKENIZE = "/tokenize"
"""Route of engines that counts the tokens of a prompt."""


class AnswerStream(ABC):
    """Writer of a streamed answer: chunks of a chat completion in, events of the dialect out.

    Attributes:
        answer_id: id of the answer if it is known before the first chunk, else empty. The chunks have it too.
    """

    answer_id: str = ""

    @abstractmethod
    def feed(self, chunk: JsonObject) -> list[Event]:
        """Return the events of a chunk.

        Raises:
            RequestError: the chunk cannot be read.
        """

    @abstractmethod
    def finish(self) -> list[Event]:
        """Return the events at the end of the engine's answer.

        Raises:
            RequestError: the answer is incomplete.
        """

    def keep_alive(self) -> list[Event]:
        """Return the events that show a client that a silent stream lives; none: a comment is sent."""
        return []

    def fail(self, error: RequestError, error_body: Event) -> list[Event]:
        """Return the events that end a broken answer; by default one with the dialect's error body."""
        return [error_body]


class Translation(ABC):
    """A request translated for the engine, and the writer of its answer.

    Args:
        engine_request: the body for the engine's route.
        field_names: the agent's names of its fields; None: chat's.

    Attributes:
        engine_path: route of the engine that answers: chat completions, or one that does not sample.
        dropped_tools: types of the request's tools that the model does not get.
    """

    engine_path: ClassVar[str] = "/v1/chat/completions"
    dropped_tools: Sequence[str] = ()

    def __init__(self, engine_request: JsonObject, field_names: FieldNames | None = None) -> None:
        self.engine_request = engine_request
        self.field_names = field_names or FieldNames({})

    @abstractmethod
    def write_answer(self, answer: JsonObject) -> JsonObject:
        """Return the dialect's answer for the engine's.

        Raises:
            RequestError: the engine's answer cannot be read or is incomplete.
        """

    @abstractmethod
    def start_stream(self) -> AnswerStream:
        """Return the writer of a streamed answer."""


class Dialect(ABC):
    """An HTTP API that agents call. Each replica has one instance, which may hold state.

    Attributes:
        name: recorded on spans as `raylight.dialect`; the route's label in metrics.
        path: route whose requests sample, below `/v1/`. Its first segment belongs to this dialect alone.
        other_paths: further routes below it that sample nothing, each with its label in metrics.
        span_name: name of the spans of its calls. The triplet adapter finds those that match its
            `llm_call_match`.
        id_prefix: replaces `chatcmpl-` in the id of an answer; None: the engine's id is kept.
        native: True if engines serve its routes themselves, so that nothing is translated.
        prompt_field: field of a request that holds the prompt, for the error that it is too long.
        error_statuses: HTTP status of an error -> the status that the dialect has instead.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    other_paths: ClassVar[Mapping[str, str]] = {}
    span_name: ClassVar[str]
    id_prefix: ClassVar[str | None] = None
    native: ClassVar[bool] = False
    prompt_field: ClassVar[str] = "messages"
    error_statuses: ClassVar[Mapping[int, int]] = {}

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a dialect with a name whose other attributes are incomplete."""
        missing = [name for name in ("path", "span_name") if hasattr(cls, "name") and not hasattr(cls, name)]
        if missing:
            raise TypeError(f"dialect {cls.__name__} does not define {' and '.join(missing)}")

    @abstractmethod
    def translate(self, path: str, body: JsonObject, scope: AttemptScope | None) -> Translation:
        """Translate a request to one of the dialect's routes.

        Args:
            path: `path` or one of `other_paths`.
            scope: the attempt that calls; None outside attempts.

        Raises:
            RequestError: the request is not supported.
        """

    @classmethod
    def error_body(cls, error: RequestError) -> JsonObject:
        """Return the body of an error answer; by default in the shape of OpenAI.

        The gateway sets its `request_id`, if it has one.
        """
        body = error_body(error)
        return (
            {"error": body["error"] | {"param": cls.prompt_field}} if error.code == CONTEXT_LENGTH else body
        )
