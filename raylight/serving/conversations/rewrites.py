"""Rewrites: messages that an agent sends back in other words than they had, with the same meaning.

A rewritten message stands for the stored one, and its prompt has the stored tokens. Such a prompt differs
from the messages of the request in one of these ways only:

- white_space: in white space;
- suffix: text that the agent appended to an answer follows the sampled tokens, as part of the same turn. A
  sampled stop word, which the client did not receive, counts as the beginning of that text;
- merged: the same, on a new line or after an empty answer, where the answer has ended: the text is a turn of
  its own;
- calls_as_text: calls that the agent wrote as text are the sampled calls.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raylight.serving.conversations.drift import note_difference
from raylight.serving.conversations.message_forms import (
    MessageForm,
    UnsupportedMessage,
    arguments_of,
    digest_of,
    without_reasoning,
)
from raylight.serving.conversations.turn_tree import Branches, Message, StoredTurn, TokenPrefix
from raylight.types import CONTINUED, ContinuedKind, Tokenizer

MAX_LABEL = 40
"""Longest text before calls that are written as text, such as "Calling tools:"."""
MAX_CALLS_TEXT = 200_000
"""Longest text that is parsed for calls."""
ARGUMENT_KEYS = ("arguments", "args", "input", "parameters")
"""Names under which agents write the arguments of a call."""


class Rewrites:
    """Finds the stored message that a rewritten one stands for.

    Args:
        tokenizer: the engine's Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._end_ids = frozenset(number for number, token in added.items() if token.special)

    def find(self, branches: Branches, form: MessageForm) -> StoredTurn | None:
        """Return a turn for a message that is not stored but stands for one that is; None if none fits."""
        if same := branches.find_loose(form):
            return _stand_in(same, form, "white_space")
        if not form.is_answer or form.calls:
            return None
        sampled = branches.sampled()
        with_calls = (self._as_calls(turn, form) for turn in sampled if turn.form.calls)
        if called := next(filter(None, with_calls), None):
            return called
        begun = [
            turn
            for turn in sampled
            if not turn.form.calls and remainder(form.text, turn.form.text) is not None
        ]
        # a shorter answer may begin like the longest one; an empty answer begins like any
        longest = max(begun, key=lambda turn: len(turn.form.text), default=None)
        if longest is None or not (longest.form.text or longest is sampled[0]):
            return None
        return self._as_answer(longest, form)

    def _as_answer(self, turn: StoredTurn, form: MessageForm) -> StoredTurn | None:
        """Return a turn that stands for a sampled answer with which a text begins; None if the text cannot
        continue it."""
        spoken = self._spoken(turn)
        appended = remainder(form.text, spoken)
        if appended is None:
            return None
        if not appended.strip():
            return _stand_in(turn, form, "suffix")
        if self.has_ended(turn):
            between = spoken[len(spoken.rstrip()) :] + appended[: len(appended) - len(appended.lstrip())]
            return _split(turn, form, appended) if "\n" in between or not spoken.strip() else None
        text = appended.lstrip() if spoken[-1:].isspace() else appended
        return self._extended(turn, form, text)

    def has_ended(self, turn: StoredTurn) -> bool:
        """True if the sampled answer ends with a special token, after which no text of it can follow."""
        output = turn.prefix.output() if turn.prefix else []
        return bool(output) and output[-1] in self._end_ids

    def _as_calls(self, turn: StoredTurn, form: MessageForm) -> StoredTurn | None:
        written = remainder(form.text, turn.form.text)
        same_calls = written is not None and _digest(calls_in_text(written)) == _digest(turn.form.calls)
        if not same_calls and remainder(form.text, self._spoken(turn)) != "":
            return None
        return replace(_stand_in(turn, form, "calls_as_text"), shown=[_answer_message(turn.form)])

    def _extended(self, turn: StoredTurn, form: MessageForm, appended: str) -> StoredTurn:
        """Return a turn of the answer's tokens and the appended text's."""
        assert turn.prefix is not None
        ids = np.array(self._tokenizer.encode(appended, add_special_tokens=False), dtype=np.int32)
        prefix = TokenPrefix(turn.prefix, ids, turn.prefix.length + len(ids), 0)
        note = note_difference("suffix", CONTINUED["suffix"], turn.form.text, form.text)
        return StoredTurn(form, prefix, note=note)

    def _spoken(self, turn: StoredTurn) -> str:
        """Return the text of all sampled tokens of an answer, without reasoning."""
        output = turn.prefix.output() if turn.prefix else []
        return without_reasoning(str(self._tokenizer.decode(output, skip_special_tokens=True)))


def remainder(text: str, beginning: str) -> str | None:
    """Return the rest of a text after its beginning; None if it begins otherwise.

    The two may differ in white space, where both have some.
    """
    if text.startswith(beginning):
        return text[len(beginning) :]
    position = 0
    for number, word in enumerate(beginning.split()):
        start = position
        while position < len(text) and text[position].isspace():
            position += 1
        if (number and start == position) or not text.startswith(word, position):
            return None
        position += len(word)
    return text[position:]


def calls_in_text(text: str) -> list[list[object]]:
    """Return names and arguments of the calls that a text consists of, after a label of one line; [] for
    other texts.

    Calls are written as JSON or as Python literals, in a list or one after another.
    """
    starts = [index for mark in "[{" if (index := text.find(mark)) >= 0]
    if not starts or len(text) > MAX_CALLS_TEXT:
        return []
    label, body = text[: min(starts)].strip(), text[min(starts) :].strip()
    if len(label) > MAX_LABEL or "\n" in label:
        return []
    try:
        return [_call(item) for item in _literals(body)]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, AttributeError):
        return []


def _literals(body: str) -> Iterator[object]:
    """Yield the values that a text consists of: JSON values, or one Python literal.

    Raises:
        ValueError, TypeError, SyntaxError: it is something else.
    """
    decoder, position = json.JSONDecoder(), 0
    values: list[object] = []
    try:
        while position < len(body):
            value, end = decoder.raw_decode(body, position)
            values.append(value)
            position = end + len(body[end:]) - len(body[end:].lstrip(" \t\r\n,;"))
    except ValueError:
        values = [ast.literal_eval(body)]
    for value in values:
        yield from value if isinstance(value, list) else [value]


def _call(item: Any) -> list[Any]:
    """Return name and arguments of a call.

    Raises:
        ValueError, TypeError, AttributeError: it is not a call.
    """
    function = item.get("function", item)
    arguments = [function[key] for key in ARGUMENT_KEYS if key in function]
    if not arguments:
        raise ValueError("no arguments")
    decoded = arguments_of(arguments[0] if isinstance(arguments[0], str) else json.dumps(arguments[0]))
    return [function.get("name"), decoded]


def _digest(calls: Sequence[list[object]]) -> bytes | None:
    try:
        return digest_of(calls)
    except UnsupportedMessage:
        return None


def _stand_in(turn: StoredTurn, form: MessageForm, kind: ContinuedKind) -> StoredTurn:
    """Return a turn with the same tokens and the same turns after it."""
    note = turn.note or note_difference(kind, CONTINUED[kind], turn.form.text, form.text)
    return StoredTurn(form, turn.prefix, turn.next, note, turn.shown)


def _split(turn: StoredTurn, form: MessageForm, appended: str) -> StoredTurn:
    """Return a turn that is shown as the sampled answer and, in a separate turn, the text after it."""
    shown = [_answer_message(turn.form), {"role": "assistant", "content": appended.strip()}]
    note = note_difference("merged", CONTINUED["merged"], turn.form.text, form.text)
    return StoredTurn(form, turn.prefix, note=note, shown=shown)


def _answer_message(form: MessageForm) -> Message:
    message: Message = {"role": "assistant", "content": form.text}
    if form.calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(form.calls)
        ]
    return message
