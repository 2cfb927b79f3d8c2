"""How an answer is marked in what the model says, and how the model is told so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_ANSWER = 2000
"""Characters of an answer; a longer one is none."""
HASHES = re.compile(r"(?<!#)###(?!#)[ \t]*([^\n#]+)")
ANSWER_TAG = re.compile(r"###\s*ANSWER:\s*(.+?)\s*(?:###|$)", re.IGNORECASE | re.MULTILINE)
FOUR_HASHES = re.compile(r"####[ \t]*([^\n#]+)")
NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)"
)
"""In 20-25 and x-5 there is no sign."""


@dataclass(frozen=True)
class Extractor:
    """Finds the answer.

    Attributes:
        find: all answers in a text, in their order; the last one counts.
        instruction: what the model is told.
    """

    find: Callable[[str], list[str]]
    instruction: str


EXTRACTORS = {
    "hashes": Extractor(
        HASHES.findall, "Write your final answer in a last line of its own, after ###, such as: ### 42"
    ),
    "answer_tag": Extractor(
        ANSWER_TAG.findall, "End with your final answer in this form: ### ANSWER: 42 ###"
    ),
    "four_hashes": Extractor(
        FOUR_HASHES.findall, "Write your final answer in a last line of its own, after ####, such as: #### 42"
    ),
    "last_number": Extractor(NUMBER.findall, "End with your final answer, which is a number."),
}
"""By name, as in `MathSettings.extractor`."""


def extract(said: str, extractor: str) -> str | None:
    """The answer in what a model said; None if it is not marked, empty, or too long to be one."""
    found = [text.strip() for text in EXTRACTORS[extractor].find(said)]
    answer = next((text for text in reversed(found) if text), None)
    return answer if answer is not None and len(answer) <= MAX_ANSWER else None
