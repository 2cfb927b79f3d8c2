"""Every Python block of every page is valid Python, and uses names and arguments that raylight has."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docs_snippets import DOCS, Snippet, snippets
from flat_settings import FLAT_KEYS
from pydantic import BaseModel

import raylight as rl
from raylight.experience.settings.policy_settings import PolicySettings

ROOT = DOCS.parent
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("README.md")]
    if DOCS / "api" not in page.parents and "```python\n" in page.read_text()
)
METHODS = {
    name: method
    for cls in (rl.Trainer, rl.StoreClient, rl.LLM, rl.APO)
    for name, method in inspect.getmembers(cls, inspect.isfunction)
    if not name.startswith("_")
}
"""Methods of variables called `trainer`, `store`, `llm` and `apo`, by method name."""


def arguments(called: Any) -> set[str] | None:
    """Return the keyword arguments that a callable accepts; None if it accepts any."""
    if inspect.isclass(called) and issubclass(called, BaseModel):
        aliases = {field.alias for field in called.model_fields.values() if field.alias}
        flat = FLAT_KEYS if issubclass(called, PolicySettings) else set()
        own = {*inspect.signature(called.__init__).parameters} - {"self"}
        return {*called.model_fields} | aliases | flat | own | ({"name"} if called is rl.LLM else set())
    parameters = inspect.signature(called).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}


def public_module(node: ast.AST) -> ModuleType | None:
    """Return the module that a block names by `rl` or `rl.rewards`; None for anything else."""
    match node:
        case ast.Name("rl"):
            return rl
        case ast.Attribute(ast.Name("rl"), name) if name in rl._SUBMODULES:
            return getattr(rl, name)
    return None


def called_object(call: ast.Call, known: dict[str, Any]) -> tuple[str, Any] | None:
    """Return name and object of raylight that a call refers to; None if the block does not show it."""
    match call.func:
        case ast.Attribute(ast.Name("rl") | ast.Attribute(ast.Name("rl")) as owner, name):
            return ast.unparse(call.func), getattr(public_module(owner), name, None)
        case ast.Name(name) if name in known:
            return name, known[name]
        case ast.Attribute(ast.Name("trainer" | "store" | "llm" | "apo") as owner, name) if name in METHODS:
            return f"{owner.id}.{name}", METHODS[name]
        case ast.Attribute(ast.Call(ast.Attribute(ast.Name("rl"), "Trainer")), name):
            return f"Trainer.{name}", getattr(rl.Trainer, name, None)
    return None


def offered(module: ModuleType) -> set[str]:
    """Return the names that a module offers."""
    return {*getattr(module, "__all__", dir(module)), *(rl._SUBMODULES if module is rl else ())}


def unknown_names(block: Snippet) -> Iterator[str]:
    """Yield a message for each name or argument that raylight does not have."""
    tree = ast.parse(block.code)
    bare = {name: getattr(rl, name) for name in rl.__all__ if inspect.isclass(getattr(rl, name))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := public_module(node.value)) is not None:
            if node.attr not in offered(owner):
                yield f"{block}: there is no {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and (called := called_object(node, bare)) and called[1] is not None:
            accepted = arguments(called[1])
            for keyword in node.keywords:
                if accepted is not None and keyword.arg is not None and keyword.arg not in accepted:
                    yield f"{block}: {called[0]} takes no {keyword.arg}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_python_and_use_existing_names(page: Path) -> None:
    assert [line for block in snippets(page) for line in unknown_names(block)] == []


def test_unknown_names_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nrl.Trainr()\nrl.Trainer(n_runner=2, n_runners=1).fit(agents=1)\nGRPO(model='m', rate=1)\n"
        "trainer.fit(a, data=1)\nstore.wait_for_rollouts(rollout_ids=[], seconds=1)\nother(x=1)\n"
        "rl.rollout(judge=1)\nrl.rewards.ruler(judge_name=1)\nrl.rewards.rulers()\n```\n"
    )
    (block,) = snippets(page)
    assert sorted(line.partition(": ")[2] for line in unknown_names(block)) == [
        "GRPO takes no rate",
        "Trainer.fit takes no agents",
        "rl.Trainer takes no n_runner",
        "rl.rewards.ruler takes no judge_name",
        "store.wait_for_rollouts takes no seconds",
        "there is no rl.Trainr",
        "there is no rl.rewards.rulers",
        "trainer.fit takes no data",
    ]
