"""Diagnosis of requests that continue no stored conversation, or only a part of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from raylight.serving.conversations.message_forms import MessageForm
from raylight.serving.conversations.turn_tree import Branches, StoredTurn
from raylight.types import DRIFTS, DriftKind, HistoryKind, HistoryNote, JsonObject

MAX_TURNS = 2000
"""Most stored turns in which a message is looked for."""
MAX_BREADTH = 256
"""Most turns at the same depth."""
EXCERPT = 60
"""Characters of an excerpt."""
INSTRUCTIONS = ("system", "developer")
"""Roles of messages with instructions."""
NEW = HistoryNote("new")


def diagnose(branches: Branches, index: int, forms: Sequence[MessageForm]) -> HistoryNote:
    """Return the reason for which a request leaves the stored conversations at a message.

    Args:
        branches: the stored turns at this place.
        index: index of the message, which is none of them.
        forms: all messages of the request.
    """
    answers = [n for n in range(index, len(forms)) if forms[n].is_answer]
    if not answers or not branches:
        return NEW  # nothing in it was sampled after this place
    if forms[index].is_answer and (sampled := branches.sampled()):
        return _edited_answer(sampled[0], index, forms[index])
    below: dict[bytes, list[tuple[int, StoredTurn]]] = {}
    for depth, turn, branch in _descendants(branches):
        below.setdefault(turn.form.digest, []).append((depth, branch))
    known = next((n for n in answers if forms[n].digest in below), None)
    if known is None:
        return NEW
    return _changed_before(known, below[forms[known].digest], index, forms)


def describe_tools(was: object, sent: object) -> HistoryNote:
    """Return a note of the tools that were added, removed or changed."""
    before, after = _by_name(was), _by_name(sent)
    changes = [
        f"{verb} {', '.join(names)}"
        for verb, names in (
            ("added", sorted(after.keys() - before.keys())),
            ("removed", sorted(before.keys() - after.keys())),
            ("changed", sorted(name for name in before.keys() & after.keys() if before[name] != after[name])),
        )
        if names
    ]
    return HistoryNote(
        "tools_changed", f"the tools of the request changed: {'; '.join(changes) or 'their order'}"
    )


def note_difference(
    kind: HistoryKind, reason: str, was: str, sent: str, index: int | None = None
) -> HistoryNote:
    """Return a note with the first difference between two texts."""
    pairs = enumerate(zip(was, sent, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(was), len(sent)))
    return HistoryNote(kind, reason, index, start, _excerpt(was, start), _excerpt(sent, start))


def _edited_answer(turn: StoredTurn, index: int, form: MessageForm) -> HistoryNote:
    was, sent = turn.form, form
    if was.text != sent.text:
        reason = DRIFTS["answer_edited"]
        if sent.text.startswith(was.text):
            reason = "text was appended to an answer that had ended, or that has other tokens after its text"
        elif "".join(was.text.split()) == "".join(sent.text.split()):
            reason = "the white space of an earlier answer was edited"
        return _difference("answer_edited", reason, index, turn, form)
    reason = DRIFTS["call_edited"]
    if len(was.calls) != len(sent.calls):
        reason = f"an earlier answer had {len(was.calls)} tool calls and was sent with {len(sent.calls)}"
    as_json = (json.dumps(calls, ensure_ascii=False) for calls in (was.calls, sent.calls))
    return note_difference("call_edited", reason, next(as_json), next(as_json), index)


def _changed_before(
    known: int, places: list[tuple[int, StoredTurn]], index: int, forms: Sequence[MessageForm]
) -> HistoryNote:
    """Return a note of messages that were edited, removed or inserted before an answer that is stored.

    Args:
        known: index of the answer.
        places: depths of the answer below the place of the first difference, and the turns there that lead
            to it.
        index: index of the first message that differs.
    """
    depth, branch = next((place for place in places if place[0] == known - index), places[0])
    form, removed = forms[index], depth - (known - index)
    if removed > 0:
        return _difference(
            "history_truncated", f"{removed} earlier messages were removed or summarized", index, branch, form
        )
    if removed < 0:
        return _difference("history_edited", f"{-removed} messages were inserted", index, branch, form)
    kind: DriftKind = "system_edited" if form.role in INSTRUCTIONS else "history_edited"
    reason = DRIFTS[kind]
    if form.role != branch.form.role:
        reason = f"the role of an earlier message was {branch.form.role} and is {form.role}"
    elif form.text == branch.form.text and form.images != branch.form.images:
        reason = "the images of an earlier message were changed"
    return _difference(kind, reason, index, branch, form)


def _descendants(branches: Branches) -> Iterator[tuple[int, StoredTurn, StoredTurn]]:
    """Yield turns with their depths and the branches that they are on, breadth first, the latest first."""
    level = [(turn, turn) for turn in branches][:MAX_BREADTH]
    depth = count = 0
    while level:
        for turn, branch in level:
            yield depth, turn, branch
        count += len(level)
        if count > MAX_TURNS:
            return
        level = [(below, branch) for turn, branch in level for below in turn.next][:MAX_BREADTH]
        depth += 1


def _by_name(tools: object) -> JsonObject:
    named: JsonObject = {}
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        named[str(function.get("name") if isinstance(function, dict) else tool)] = tool
    return named


def _difference(kind: DriftKind, reason: str, index: int, turn: StoredTurn, form: MessageForm) -> HistoryNote:
    return note_difference(kind, reason, turn.form.text, form.text, index)


def _excerpt(text: str, start: int) -> str:
    return text[start : start + EXCERPT]
