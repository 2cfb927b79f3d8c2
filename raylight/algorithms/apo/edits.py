"""Parsing and validation of a model's rewritten prompt."""

from __future__ import annotations

import re
import string

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.history import RejectionKind
from raylight.errors import PromptError, RaylightError

_OPEN, _CLOSE, _TAG = "<prompt>", "</prompt>", re.compile(r"</?prompt>")
_OUTERMOST = re.compile(r"<prompt>(?P<text>.*)</prompt>", re.DOTALL)
_FENCED = re.compile(r"\A```[\w-]*\n(?P<text>.*)\n```\Z", re.DOTALL)


class RejectedEdit(RaylightError):
    """Branch of the search without a usable prompt.

    Args:
        message: the reason.
        kind: category of the reason, for counting.
        text: the rejected text.
    """

    def __init__(self, message: str, kind: RejectionKind = "malformed", text: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.text = text

    def __reduce__(self) -> tuple[type[RejectedEdit], tuple[str, RejectionKind, str]]:
        return type(self), (str(self), self.kind, self.text)


def extract_prompt(answer: str, parent: str = "") -> str:
    """Return the prompt in an answer, without a code fence around it.

    The prompt is the text between the last `<prompt>` and `</prompt>`, or after an unclosed `<prompt>`, or
    else the whole answer.

    Args:
        parent: the prompt that is rewritten. If it has such tags itself, the answer's may be nested; if they
            are not pairs, the prompt is all between the first `<prompt>` and the last `</prompt>`.
    """
    if parent.count(_OPEN) != parent.count(_CLOSE):
        outermost = _OUTERMOST.search(answer)
        text = outermost["text"] if outermost else answer.strip().removeprefix(_OPEN)
    else:
        opened: list[int] = []
        text = answer.rpartition(_OPEN)[2]
        for tag in _TAG.finditer(answer):
            if tag[0] == _OPEN:
                opened.append(tag.end())
            elif opened:
                text = answer[opened.pop() : tag.start()]
                opened = opened if _OPEN in parent else []
    text = text.strip()
    fenced = _FENCED.match(text)
    return fenced["text"].strip() if fenced else text


def parse_rewrite(parent: PromptTemplate, answer: str) -> PromptTemplate:
    """Return the rewritten prompt of an answer; raises as `check_rewrite` does."""
    return check_rewrite(parent, extract_prompt(answer, parent.template), answer)


def check_rewrite(parent: PromptTemplate, text: str, answer: str = "") -> PromptTemplate:
    """Return a prompt with a rewritten text.

    It has exactly its parent's placeholders, each plain or with its parent's conversion and format, because
    no other format is known to fit the agents' values.

    Args:
        answer: what the text is from, for the record of an empty one.

    Raises:
        RejectedEdit: the prompt is empty or malformed, or has other placeholders than its parent.
    """
    if not text:
        raise RejectedEdit("the model's answer has no prompt", "empty", answer)
    rewritten = parent.model_copy(update={"template": text})
    try:
        placeholders = rewritten.placeholders()
    except PromptError as error:
        raise RejectedEdit(str(error), "malformed", text) from None
    expected = parent.placeholders()
    if placeholders != expected:
        missing, unknown = sorted(expected - placeholders), sorted(placeholders - expected)
        problems = [f"lacks the placeholders {', '.join(missing)}"] * bool(missing)
        problems += [f"has the unknown placeholders {', '.join(unknown)}"] * bool(unknown)
        raise RejectedEdit(f"the rewritten prompt {' and '.join(problems)}", "placeholders", text)
    if parent.engine == "f-string":
        plain = {f"{{{name}}}" for name in expected}
        if changed := written_placeholders(text) - written_placeholders(parent.template) - plain:
            raise RejectedEdit(
                f"the rewritten prompt has {', '.join(sorted(changed))}, a format that its parent does not "
                f"use",
                "malformed",
                text,
            )
    return rewritten


def written_placeholders(template: str) -> set[str]:
    """Return the placeholders of an f-string template as they are written, with conversion and format."""
    parts = string.Formatter().parse(template)
    return {
        f"{{{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}"
        for _, name, spec, conversion in parts
        if name is not None
    }
