"""The table of families in docs/models.md is what its generator finds."""

import importlib.util

import pytest
import trl_templates
from docs_snippets import DOCS

spec = importlib.util.spec_from_file_location("generate_families", DOCS / "generate_families.py")
assert spec.loader is not None
GENERATOR = importlib.util.module_from_spec(spec)
spec.loader.exec_module(GENERATOR)
MOVED = {("gemma4_v5", "text and tools"): "Let me.<turn|>\n"}
"""Template and conversation -> the text of an answer that the template writes behind its calls' results."""


def test_the_table_is_that_of_the_templates() -> None:
    page = GENERATOR.PAGE.read_text()
    written = page.partition(GENERATOR.BEGIN)[2].partition(GENERATOR.END)[0]
    assert written == GENERATOR.section(), "run: python docs/generate_families.py"


@pytest.mark.parametrize("name", GENERATOR.CONVERSATIONS)
@pytest.mark.parametrize("template", GENERATOR.TEMPLATES)
def test_a_continued_row_has_the_new_turns_as_the_template_writes_them(template: str, name: str) -> None:
    """The new turns follow the answer's tokens, which are kept as sampled."""
    tokenizer = GENERATOR.make_tokenizer(trl_templates.read_template(template))
    if GENERATOR.rows(tokenizer, name) != "1":
        return  # its calls are separate rows, each with the whole prompt
    continued = GENERATOR.continue_row(tokenizer, name)
    assert continued.ids[: len(continued.sampled)] == continued.sampled
    added = tokenizer.decode(continued.ids[len(continued.sampled) :])
    assert added.strip()
    whole = continued.whole.removesuffix(MOVED.get((template, name), ""))
    assert whole.endswith(added)
