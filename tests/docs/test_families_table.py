"""The table of families in docs/models.md is what its generator finds."""

from __future__ import annotations

import importlib.util

import trl_templates  # noqa: F401 - the generator reads the same templates
from docs_snippets import DOCS

spec = importlib.util.spec_from_file_location("generate_families", DOCS / "generate_families.py")
assert spec is not None
assert spec.loader is not None
GENERATOR = importlib.util.module_from_spec(spec)
spec.loader.exec_module(GENERATOR)


def test_the_table_is_that_of_the_templates() -> None:
    page = GENERATOR.PAGE.read_text()
    written = page.partition(GENERATOR.BEGIN)[2].partition(GENERATOR.END)[0]
    assert written == GENERATOR.section(), "run: python docs/generate_families.py"
