"""The table of architectures: each passes or fails the check of names as docs/models.md says."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from docs_snippets import DOCS


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_models", DOCS / "generate_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()
ROWS = GENERATOR.read_rows()


COMMON = {
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "glm4",
    "deepseek_v3",
    "gpt2",
    "llama4",
}


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in GENERATOR.TRAINED | COMMON else pytest.param(name, marks=pytest.mark.slow)
        for name in ROWS
    ],
)
def test_the_names_of_an_architecture_are_checked(model_type: str) -> None:
    name, _, names, trained, *_ = ROWS[model_type]
    if "timm" in names and importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed here")
    assert GENERATOR.check_names(GENERATOR.tiny_config(model_type, name)) == names
    assert (trained == "yes") == (model_type in GENERATOR.TRAINED)


def test_the_table_has_most_architectures() -> None:
    passed = [row for row in ROWS.values() if row[2] == "yes"]
    assert len(passed) >= 80
    assert ROWS.keys() >= GENERATOR.TRAINED | COMMON
