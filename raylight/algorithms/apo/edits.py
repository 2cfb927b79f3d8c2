"""What a model wrote in place of a prompt: taken out of its answer, and let pass only if agents can use it."""

from __future__ import annotations

import re
import string

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.history import RejectionKind
from raylight.errors import PromptError, RaylightError

_TAGGED = re.compile(r"<prompt>(?P<text>(?:(?!<prompt>).)*?)</prompt>", re.DOTALL)
_OPENED = re.compile(r".*<prompt>", re.DOTALL)
_FENCED = re.compile(r"\A```[\w-]*\n(?P<text>.*)\n```\Z", re.DOTALL)


class RejectedEdit(RaylightError):
    """A branch of the search led to no prompt.

    Args:
        message: why.
        kind: in a word, for counting.
        text: what was rejected.
    """

    def __init__(self, message: str, kind: RejectionKind = "malformed", text: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.text = text

    def __reduce__(self) -> tuple[type[RejectedEdit], tuple[str, RejectionKind, str]]:
        return type(self), (str(self), self.kind, self.text)


def extract(answer: str) -> str:
    """The prompt in an answer: between the last `<prompt>` and `</prompt>`, or after a `<prompt>` that was left open, or all of it;
    without a fence around it."""
    tagged = list(_TAGGED.finditer(answer))
    text = (tagged[-1]["text"] if tagged else _OPENED.sub("", answer)).strip()
    fenced = _FENCED.match(text)
    return fenced["text"].strip() if fenced else text


def rewrite_of(parent: PromptTemplate, answer: str) -> PromptTemplate:
    """The rewritten prompt, which has exactly its parent's placeholders, each plain or as its parent writes it: no other format is
    known to fit what agents fill in.

    Raises:
        RejectedEdit: it is empty, cannot be filled, or lost or invented a placeholder.
    """
    text = extract(answer)
    if not text:
        raise RejectedEdit("the model gave back no prompt", "empty", answer)
    rewritten = parent.model_copy(update={"template": text})
    try:
        found = rewritten.placeholders()
    except PromptError as error:
        raise RejectedEdit(str(error), "malformed", text) from None
    wanted = parent.placeholders()
    if found != wanted:
        lost, new = sorted(wanted - found), sorted(found - wanted)
        parts = [f"lost {', '.join(lost)}"] * bool(lost) + [
            f"asks for {', '.join(new)}, which nobody gives"
        ] * bool(new)
        raise RejectedEdit(f"the rewritten prompt {' and '.join(parts)}", "placeholders", text)
    if parent.engine == "f-string":
        odd = fields(text) - fields(parent.template) - {f"{{{name}}}" for name in wanted}
        if odd:
            raise RejectedEdit(
                f"the rewritten prompt has {', '.join(sorted(odd))}: a format of its own", "malformed", text
            )
    return rewritten


def fields(template: str) -> set[str]:
    """The placeholders of an f-string template as they are written, with conversion and format."""
    parts = string.Formatter().parse(template)
    return {
        f"{{{name}{f'!{conversion}' if conversion else ''}{f':{layout}' if layout else ''}}}"
        for _, name, layout, conversion in parts
        if name is not None
    }
