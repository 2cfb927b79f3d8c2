"""The code of the page about starter models makes a model."""

from pathlib import Path

import pytest
from docs_snippets import DOCS, snippet, write_files

from examples.starter_models.tasks.registry import FAMILIES
from examples.starter_models.tasks.repairs import harness
from examples.starter_models.tokenizer import build_tokenizer
from raylight.experience.batches.demonstrations import Demonstration, demonstration_rows

PAGE = DOCS / "starter_models.md"


@pytest.mark.slow
def test_the_example_makes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    names = snippet(PAGE, "capitals").run()
    assert 0.3 < names["made"].accuracy < 0.7
    assert (tmp_path / "outputs" / "capitals" / "model.safetensors").is_file()


def test_every_family_is_in_the_table() -> None:
    for name, family in FAMILIES.items():
        assert f"| `{name}{':' if family.argument else ''}" in PAGE.read_text()


def test_the_form_of_a_harness_is_rendered(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    value = next(harness("coder", seed=0, conversation=str(tmp_path / "conversation.json")))
    tokenizer = build_tokenizer([])
    (row,) = demonstration_rows(tokenizer, Demonstration.parse(value, "page"), "page")
    assert "sed -i" in tokenizer.decode(row.tokens[slice(*row.answers[0])])
