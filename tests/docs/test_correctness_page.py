"""The tests that the page about correctness names exist, and it names all of parity."""

import re

from docs_snippets import DOCS

PAGE = DOCS / "correctness.md"


def test_each_named_test_is_in_its_file() -> None:
    named = re.findall(r"\[`(\w+)`\]\(([^)]+)\)", PAGE.read_text())
    assert len(named) > 30
    missing = [name for name, file in named if f"def {name}(" not in (DOCS / file).read_text()]
    assert not missing
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "|---" not in line]
    assert all("test_" in row for row in rows if not row.startswith("| raylight "))


def test_each_file_of_parity_is_named() -> None:
    files = {file.name for file in (DOCS.parent / "tests" / "parity").glob("test_*.py")}
    assert files == {*re.findall(r"tests/parity/(\w+\.py)", PAGE.read_text())}
