"""docs/harnesses.md: its agents can be made, and its tables match the presets."""

import re

import pytest
from docs_snippets import DOCS, snippet

from raylight.harnesses.command import CommandAgent
from raylight.harnesses.presets import CLAUDE_TOOLS, PRESETS
from raylight.harnesses.reward_command import SPAN_LETTERS
from raylight.sandboxes.file_bundle import MAX_FILES_BYTES

PAGE = DOCS / "harnesses.md"
TEXT = PAGE.read_text()


@pytest.mark.parametrize("block", ["codex", "mini", "own"])
def test_an_agent_of_the_page_can_be_made(block: str) -> None:
    assert isinstance(snippet(PAGE, block).run()["agent"], CommandAgent)


def test_the_tables_have_every_preset() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| `([^`]+)` \| ([^|]+) \| [\d.]+ \|$", TEXT, re.MULTILINE)
    assert [(name, install) for name, install, _ in rows] == [
        (name, preset.install) for name, preset in PRESETS.items()
    ]
    assert all(protocol.startswith(PRESETS[name].protocol.split(",")[0]) for name, _, protocol in rows)
    assert CLAUDE_TOOLS in TEXT


def test_the_limits_are_those_of_the_code() -> None:
    assert f"{MAX_FILES_BYTES >> 20} MiB" in TEXT
    assert f"{SPAN_LETTERS:,} letters" in TEXT
