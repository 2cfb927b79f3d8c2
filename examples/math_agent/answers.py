"""Formats in which the model marks its answer, and their extraction."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_ANSWER = 2000
"""Maximum number of characters of an answer; a longer text is not an answer."""
HASHES = re.compile(r"(?<!#)###(?!#)[ \t]*([^\n#]+)")
ANSWER_TAG = re.compile(r"###\s*ANSWER:\s*(.+?)\s*(?:###|$)", re.IGNORECASE | re.MULTILINE)
FOUR_HASHES = re.compile(r"####[ \t]*([^\n#]+)")
NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)"
)
"""Number with an optional sign; 20-25 and x-5 contain no sign."""


@dataclass(frozen=True)
class Extractor:
    """Format of an answer.

    Attributes:
        find: returns all answers in a text, in order; the last one counts.
        instruction: part of the system message that describes the format.
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
"""Formats by name, as in `MathSettings.extractor`."""


def extract(said: str, extractor: str) -> str | None:
    """Return the answer in a model's response; None if it is not marked, empty, or too long."""
    found = [text.strip() for text in EXTRACTORS[extractor].find(said)]
    answer = next((text for text in reversed(found) if text), None)
    return answer if answer is not None and len(answer) <= MAX_ANSWER else None
