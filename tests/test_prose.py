"""Mechanical rules of the prose: how docstrings begin, and words that plain English does without."""

import ast
import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_noun_or_a_verb(path: Path) -> None:
    texts = [(text.lineno, text.value.strip()) for text in docstrings(ast.parse(path.read_text()))]
    assert [(line, text.splitlines()[0]) for line, text in texts if QUESTION.match(text)] == []


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_words_are_plain(path: Path) -> None:
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [(number, line.strip()) for number, line in lines if ARCHAIC.search(line)] == []
