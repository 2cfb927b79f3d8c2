"""The committed API reference equals the output of its generator."""

import importlib.util
from types import ModuleType

import pytest
from docs_snippets import DOCS


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_api", DOCS / "generate_api.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> dict[str, str]:
    return generator.pages()


def test_the_reference_is_not_stale(generator: ModuleType, pages: dict[str, str]) -> None:
    committed = {path.name: path.read_text() for path in (DOCS / "api").iterdir()}
    stale = sorted(name for name in pages.keys() | committed.keys() if pages.get(name) != committed.get(name))
    assert not stale, (
        f"docs/api: {', '.join(stale)} differs from the docstrings; run `python docs/generate_api.py`"
    )


@pytest.mark.slow("the pages in the checkout come from another process")
def test_the_reference_is_always_the_same(generator: ModuleType, pages: dict[str, str]) -> None:
    assert generator.pages() == pages


def test_every_public_name_has_one_section(generator: ModuleType, pages: dict[str, str]) -> None:
    headings = [line for text in pages.values() for line in text.splitlines() if line.startswith("## `")]
    assert sorted(headings) == sorted(f"## `{name}`" for name in generator.MODULE_OF)


def test_the_section_of_a_class(pages: dict[str, str]) -> None:
    text = pages["algorithms.md"]
    dapo = text.partition("## `algorithms.DAPO`")[2].partition("\n## ")[0]
    assert "class DAPO(GRPO)" in dapo
    assert (
        "| `overlong_buffer` | `int` | `4096` (≥ 1) | Tokens below `max_response_tokens` over which "
        "the penalty rises from 0. |" in dapo
    )
    assert "_buffer_fits" not in text
    general = text.partition("## `algorithms.PolicyAlgorithm`")[2].partition("\n## ")[0]
    assert "| `lr` |" in general, "a class shows the settings of parents that have no page"
