"""Rules that hold for the whole package: floors, import circles, light imports, file length, names."""

import ast
import collections
import functools
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from syntax_trees import parsed

PACKAGE = Path(__file__).parent.parent / "raylight"
FLOORS = [
    {"types", "semconv", "errors", "base_config", "config", "components", "log", "_utils"},
    {
        "agent",
        "environments",
        "sandboxes",
        "harbor",
        "rewards",
        "harnesses",
        "store",
        "traces",
        "ray_metrics",
        "advisories",
        "images",
    },
    {"http", "tasks", "experience", "weights"},
    {"runner", "engines", "serving", "learner"},
    {"algorithms"},
    {"trainer"},
    {"benchmarks", "cli", "doctor", "quickstart", "tinker", "ui"},
]
FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 700


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package; that of its folder for an `__init__.py`."""
    parts = ("raylight", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
PACKAGES = sorted(module_of(path) for path in FILES if path.stem == "__init__")


STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
"""Nodes of a file that can contain an import."""


@functools.cache
def imports() -> dict[str, set[str]]:
    return {name: imports_of(parsed(path), set(MODULES)) - {name} for name, path in MODULES.items()}


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules that a file imports anywhere, except under `if TYPE_CHECKING`.

    `from raylight.store import rows` is an import of the module `raylight.store.rows`, if there is one.
    """
    found: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, STATEMENTS)]
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            dotted = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in dotted}
    return found & modules


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return the names along one circle of a graph; nothing if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def between_children(package: str, graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between the direct children (files and folders) of one package."""

    def child(module: str) -> str | None:
        rest = module.removeprefix(package + ".")
        return None if rest == module else rest.split(".")[0]

    among: dict[str, set[str]] = collections.defaultdict(set)
    for module, imported in graph.items():
        if (own := child(module)) is not None:
            among[own] |= {other for name in imported if (other := child(name)) not in (None, own)}
    return among


def test_no_import_upwards() -> None:
    upwards = [
        f"{module} on floor {floor} imports {imported}"
        for module in sorted(MODULES.keys() - {"raylight"})
        for imported in sorted(imports()[module] - {"raylight"})
        if FLOOR_OF[imported.split(".")[1]] > (floor := FLOOR_OF[module.split(".")[1]])
    ]
    assert upwards == []


def test_files_import_each_other_in_no_circle() -> None:
    assert circle_in(imports()) == []


def test_packages_import_each_other_in_no_circle() -> None:
    found = {package: circle_in(between_children(package, imports())) for package in PACKAGES}
    assert {package: circle for package, circle in found.items() if circle} == {}


def test_circles_are_found() -> None:
    modules = {"raylight.a.x", "raylight.a.y", "raylight.b.z"}
    reads = {
        "raylight.a.x": "from raylight.b import z",
        "raylight.a.y": "import os\nif TYPE_CHECKING:\n    from raylight.a import x",
        "raylight.b.z": "def f():\n    import raylight.a.y",
    }
    graph = {name: imports_of(ast.parse(text), modules) for name, text in reads.items()}
    assert graph == {
        "raylight.a.x": {"raylight.b.z"},
        "raylight.a.y": set(),
        "raylight.b.z": {"raylight.a.y"},
    }
    assert circle_in(graph) == []
    assert set(circle_in(between_children("raylight", graph))) == {"a", "b"}
    assert set(circle_in(graph | {"raylight.a.y": {"raylight.a.x"}})) == modules


def test_a_file_stays_under_the_limit() -> None:
    assert {str(f): n for f in FILES if (n := len(f.read_text().splitlines())) > MAX_LINES} == {}


def test_no_two_classes_have_one_name() -> None:
    """Private classes count too: a reader who searches for a name finds one class."""
    places = collections.defaultdict(list)
    for module, path in MODULES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


LIGHT = (
    "raylight",
    "raylight.types",
    "raylight.agent",
    "raylight.cli",
    "raylight.experience.trajectories.trajectory",
    "raylight.ui.app",
)


@pytest.fixture(scope="module")
def loaded_by() -> dict[str, list[str]]:
    """Return the heavy modules after the import of each light one, in this order, in a process."""
    code = (
        "import importlib, json, sys; "
        "heavy = {'torch', 'transformers', 'vllm', 'verl', 'ray'}; "
        "load = importlib.import_module; "
        "print(json.dumps({name: load(name) and [*heavy & set(sys.modules)] for name in sys.argv[1:]}))"
    )
    return json.loads(subprocess.check_output([sys.executable, "-c", code, *LIGHT]))


@pytest.mark.parametrize("module", LIGHT)
def test_light_imports(module: str, loaded_by: dict[str, list[str]]) -> None:
    assert loaded_by[module] == []


def test_importing_the_package_takes_under_a_second() -> None:
    code = (
        "import time; t = time.perf_counter(); import raylight, raylight.agent; "
        "print(time.perf_counter() - t)"
    )
    assert any(float(subprocess.check_output([sys.executable, "-c", code])) < 1.0 for _ in range(3))


def test_no_test_imports_from_a_conftest() -> None:
    """With several folders in one run, `conftest` is the module of the folder that was loaded last."""
    found = [
        str(f)
        for f in (PACKAGE.parent / "tests").rglob("*.py")
        if re.search(r"(?m)^\s*(from|import) conftest\b", f.read_text())
    ]
    assert found == []


def test_no_product_code_sleeps_or_swallows() -> None:
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and node.attr == "sleep":
                sleeps = ast.unparse(node.value) in ("asyncio", "time")
                assert not sleeps, f"{module}:{node.lineno} sleeps; wait on an event"
            if isinstance(node, ast.ExceptHandler):
                swallows = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
                assert not swallows, f"{module}:{node.lineno} swallows an exception"
