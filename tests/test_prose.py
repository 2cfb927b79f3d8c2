"""Mechanical rules of the prose: how docstrings begin, and words that plain English does without."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = sorted(path for folder in ("raylight", "examples", "docs") for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
QUESTION = re.compile(
    r'^\s*r?"""\s*((What|Who|Whom|Whose|Whether|Where|Which|When|Why|How|Of|By|Whence|Those)\b.*)', re.M
)
ARCHAIC = re.compile(
    r"\b(anew|whence|whoever|whomever|in vain|for want of|all the same|mourn\w*|their kin|lets? go of)\b",
    re.I,
)


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[1]}"
        for path in [*CODE, *(ROOT / "tests").rglob("*.py")]
        for match in QUESTION.finditer(path.read_text())
    ]
    assert found == []


def test_the_words_are_plain() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*CODE, *PAGES]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ARCHAIC.search(line)
    ]
    assert found == []
