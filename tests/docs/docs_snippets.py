"""The Python blocks of documentation pages, so that tests run what the pages show.

Every fenced block that begins with ```` ```python ```` counts. An HTML comment right above it may say more:

    <!-- run: agent -->             its name, by which a test asks for it
    <!-- not run: needs a GPU -->   a test leaves it out; the reason must be given

    for block in snippets(DOCS / "clients" / "openai.md"):
        names = block.run()
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
MARK = re.compile(r"^ *<!-- *(?P<kind>run|not run) *(?:: *(?P<text>.*?) *)?-->$")


@dataclass(frozen=True)
class Snippet:
    """One block of a page."""

    page: Path
    line: int
    """Of its first line of code in the page, from 1."""
    code: str
    name: str = ""
    not_run: str = ""
    """Why it is left out; empty where it is run."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(DOCS) if DOCS in self.page.parents else self.page}:{self.line}"

    def run(self, names: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run it, after `names`, and return all names that are known then.

        Errors show the line in the page. Functions and classes are of no importable module, so that Ray sends them to other
        processes by value, as it does those of a notebook.
        """
        known = {"__name__": f"page_{self.page.stem}"} | (names or {})
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), known)
        return known


def snippets(*pages: Path) -> Iterator[Snippet]:
    """The Python blocks of pages, in order.

    Raises:
        ValueError: a page has a mark without a block or a reason, a block without an end, or no block at all.
    """
    for page in pages:
        found = list(_of_page(page))
        if not found:
            raise ValueError(f"{page} has no Python block")
        yield from found


def snippet(page: Path, name: str) -> Snippet:
    """The block with this name.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [block for block in snippets(page) if block.name == name]
    if len(found) != 1:
        raise ValueError(
            f"{page} has {len(found)} blocks named {name!r}; it should have one below <!-- run: {name} -->"
        )
    return found[0]


def _of_page(page: Path) -> Iterator[Snippet]:
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
        if fence["language"] == "python":
            yield Snippet(page, number + 1, code, **_meaning(page, number, mark))
        elif mark is not None:
            raise ValueError(f"{page}:{number}: a mark stands above a Python block only")
        mark = None
    if mark is not None:
        raise ValueError(f"{page}: a mark stands right above a block, and this one has none")


def _body(page: Path, number: int, indent: str, lines: Iterator[tuple[int, str]]) -> str:
    """The lines up to the end of the block."""
    taken: list[str] = []
    for _, text in lines:
        if text.rstrip() == f"{indent}```":
            return textwrap.dedent("\n".join(taken)) + "\n"
        taken.append(text)
    raise ValueError(f"{page}:{number}: the block does not end")


def _meaning(page: Path, number: int, mark: re.Match[str] | None) -> dict[str, str]:
    if mark is None:
        return {}
    if mark["kind"] == "run":
        return {"name": mark["text"] or ""}
    if not mark["text"]:
        raise ValueError(f"{page}:{number}: say why the block is not run: <!-- not run: reason -->")
    return {"not_run": mark["text"]}
