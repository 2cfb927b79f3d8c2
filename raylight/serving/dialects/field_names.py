"""Names of fields in the request that an agent sent, for errors about the chat request made from it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence

from raylight.http.errors import RequestError

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

    def _of_message(self, index: int, inner: str) -> str | None:
        sources = self._messages()
        if index >= len(sources):
            return None
        source = sources[index]
        known = max((name for name in source if _begins(inner, name)), key=len)
        rest = inner[len(known) :]
        return source[known] + ("." if rest and rest[0] not in ".[" else "") + rest

    def rename(self, error: RequestError) -> RequestError:
        """Return an error with the agent's names in its message, in place of those of the chat request."""
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
