"""Code blocks of documentation pages, so that tests can run them.

A block is fenced and begins with ```` ```python ````. An HTML comment directly above it marks it:

    <!-- run: agent -->             the name by which a test finds the block
    <!-- not run: needs a GPU -->   tests skip the block; the reason is required
    <!-- file: agent.mjs -->        a file of this name, in any language, for a separate program

    for block in snippets(DOCS / "clients" / "openai.md"):
        names = block.run()
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
MARK = re.compile(r"^ *<!-- *(?P<kind>run|not run|file) *(?:: *(?P<text>.*?) *)?-->$")


@dataclass(frozen=True)
class Snippet:
    """Python block of a page."""

    page: Path
    line: int
    """Line number of the first line of code in the page, from 1."""
    code: str
    name: str = ""
    not_run: str = ""
    """Reason for not running the block; empty if it is run."""
    file: str = ""
    """Name of the file that the block shows; empty if it does not show a file."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(DOCS) if DOCS in self.page.parents else self.page}:{self.line}"

    def run(self, names: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the block with `names` defined, and return all names that are defined afterwards.

        Errors show the line in the page. The module of functions and classes is not importable, so that Ray
        pickles them by value, as in a notebook.
        """
        namespace = {"__name__": f"page_{self.page.stem}"} | (names or {})
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)
        return namespace


def snippets(*pages: Path) -> Iterator[Snippet]:
    """Iterate over the Python blocks of pages, in order.

    Raises:
        ValueError: a page has no block, an unclosed block, or a mark without a block or a reason.
    """
    for page in pages:
        blocks = [block for language, block in _parse(page) if language == "python"]
        if not blocks:
            raise ValueError(f"{page} has no Python block")
        yield from blocks


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows into a folder."""
    for _, block in _parse(page):
        if block.file:
            (folder / block.file).write_text(block.code)


def snippet(page: Path, name: str) -> Snippet:
    """Return the block with this name.

    Raises:
        ValueError: no block or several blocks have this name.
    """
    blocks = [block for block in snippets(page) if block.name == name]
    if len(blocks) != 1:
        raise ValueError(
            f"{page} has {len(blocks)} blocks named {name!r}; it should have one below <!-- run: {name} -->"
        )
    return blocks[0]


def _parse(page: Path) -> Iterator[tuple[str, Snippet]]:
    """Iterate over languages and contents of the Python blocks, and of the marked ones in other languages."""
    mark: re.Match[str] | None = None
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, text in lines:
        fence = FENCE.match(text)
        if fence is None:
            if mark is not None and text.strip():
                raise ValueError(f"{page}:{number}: a mark stands right above a block")
            mark = MARK.match(text) or mark
            continue
        code = _body(page, number, fence["indent"], lines)
        if fence["language"] == "python" or (mark is not None and mark["kind"] == "file"):
            yield fence["language"], Snippet(page, number + 1, code, **_marked(page, number, mark))
        elif mark is not None:
            raise ValueError(f"{page}:{number}: a mark stands above a Python block only")
        mark = None
    if mark is not None:
        raise ValueError(f"{page}: a mark stands right above a block, and this one has none")


def _body(page: Path, number: int, indent: str, lines: Iterator[tuple[int, str]]) -> str:
    """Return the lines up to the end of the block."""
    body: list[str] = []
    for _, text in lines:
        if text.rstrip() == f"{indent}```":
            return textwrap.dedent("\n".join(body)) + "\n"
        body.append(text)
    raise ValueError(f"{page}:{number}: the block does not end")


def _marked(page: Path, number: int, mark: re.Match[str] | None) -> dict[str, str]:
    if mark is None:
        return {}
    if mark["kind"] in ("run", "file"):
        return {"name" if mark["kind"] == "run" else "file": mark["text"] or ""}
    if not mark["text"]:
        raise ValueError(f"{page}:{number}: say why the block is not run: <!-- not run: reason -->")
    return {"not_run": mark["text"]}
