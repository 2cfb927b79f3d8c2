"""Every relative link and anchor of the documentation has a target."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from docs_snippets import DOCS

ROOT = DOCS.parent
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("README.md")])
FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^()\s<>]+)>?(?: \"[^\"]*\")?\)")


def links(text: str) -> list[str]:
    """Return the targets of links outside of code."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "code", FENCED.sub("", text)))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates for headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCED.sub("", text), re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        base = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        name, number = base, 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def dead_links(page: Path) -> list[str]:
    """Return the links of a page whose target is missing or outside of the repository."""
    wrong = []
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / unquote(path)).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            wrong.append(f"{link}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text())):
            wrong.append(f"{link}: no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    assert dead_links(page) == []


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, waiting = set(), [DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for link in links(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_file() and target not in reached:
                waiting.append(target)
    assert [str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md") if page not in reached] == []


def test_dead_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# A `b_c` & d!\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n")
    good = (
        "[a](other.md) [b](other.md#a-b_c--d) [c](other.md#twice-1) [d](https://x.org/y) [`e`](#here)\n\n"
        "# Here\n\n`[x](gone.md)`\n"
    )
    page.write_text(good + "\n```\n[x](gone.md)\n```\n")
    assert dead_links(page) == []
    page.write_text("[a](gone.md) [b](other.md#no-heading) [c](#nowhere) [d](../outside.md) ![e](gone.svg)")
    assert [line.partition(":")[0] for line in dead_links(page)] == [
        "gone.md",
        "other.md#no-heading",
        "#nowhere",
        "../outside.md",
        "gone.svg",
    ]
