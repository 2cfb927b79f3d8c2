"""The house stands: no import upwards, a light package, no crowded room."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "raylight"
FLOORS = [
    {"types", "semconv", "errors", "config", "aio", "components", "log"},
    {"agent", "store", "traces"},
    {"http", "experience"},
    {"runner", "engines", "weight_sync", "serving", "learner"},
    {"algorithms"},
    {"trainer"},
    {"cli", "doctor", "quickstart"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    return module.split(".")[1]


def home_of(name: str) -> str:
    """Where a name of the package itself comes from; nowhere for its own, such as the version."""
    import raylight

    return raylight._HOMES.get(name, f"raylight.{name}" if name in FLOOR_OF else "")


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports from, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module] if node.module != "raylight" else [home_of(alias.name) for alias in node.names]
            )
        found |= {room_of(name) for name in names if name.startswith("raylight.")}
    return found


@pytest.mark.parametrize(
    "path", [f for f in FILES if f.parent != PACKAGE or f.stem != "__init__"], ids=lambda p: p.stem
)
def test_no_import_upwards(path: Path) -> None:
    relative = path.relative_to(PACKAGE).with_suffix("")
    own = FLOOR_OF[relative.parts[0]]
    upwards = {room for room in imported_rooms(path) if FLOOR_OF[room] > own}
    assert not upwards, f"{relative} is on floor {own} and imports {upwards}"


def test_a_file_stays_under_400_lines() -> None:
    assert {str(f): n for f in FILES if (n := len(f.read_text().splitlines())) > 400} == {}


@pytest.mark.parametrize(
    "module",
    ["raylight", "raylight.types", "raylight.agent", "raylight.cli", "raylight.experience.trajectory"],
)
def test_light_imports(module: str) -> None:
    code = (
        f"import sys, {module}; heavy = {{'torch', 'transformers', 'vllm', 'verl', 'ray'}} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_takes_under_a_second() -> None:
    code = "import time; t = time.perf_counter(); import raylight, raylight.agent; print(time.perf_counter() - t)"
    runs = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    assert min(runs) < 1.0


def test_every_public_name_can_be_loaded() -> None:
    import raylight

    for name in raylight.__all__:
        assert getattr(raylight, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = raylight.no_such_name


def test_no_product_code_sleeps_or_swallows() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "sleep"
                and ast.unparse(node.value) in ("asyncio", "time")
            ):
                pytest.fail(f"{path}:{node.lineno} sleeps; wait on an event")
            if isinstance(node, ast.ExceptHandler) and all(
                isinstance(s, ast.Pass | ast.Continue) for s in node.body
            ):
                pytest.fail(f"{path}:{node.lineno} swallows an exception")
