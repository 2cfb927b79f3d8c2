"""Mechanical rules of the prose: how docstrings begin, and words that plain English does without."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = sorted(path for folder in ("raylight", "examples", "docs") for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
QUESTION = re.compile(r"(What|Who|Whom|Whose|Whether|Where|Which|When|Why|How|Of|By|Whence|Those)\b")
ARCHAIC = re.compile(
    r"\b(anew|whence|whoever|whomever|in vain|for want of|all the same|mourn\w*|their kin|lets? go of)\b",
    re.I,
)


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    """Return every string that stands alone: docstrings of modules, classes, functions and attributes."""
    alone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [value for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {text.value.strip().splitlines()[0]}"
        for path in CODE
        for text in docstrings(ast.parse(path.read_text()))
        if QUESTION.match(text.value.strip())
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
