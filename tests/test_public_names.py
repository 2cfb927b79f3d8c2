"""Public names: one table gives `__all__`, lazy loading, `raylight.algorithms`, and the stubs."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

import raylight
from raylight import algorithms

ROOT = Path(__file__).parent.parent
TABLE = "_EXPORTS = {\n"
STUBS = runpy.run_path(str(ROOT / "scripts" / "generate_stubs.py"))


def copy_with(entry: str, folder: Path) -> ModuleType:
    """Import a copy of the package's `__init__.py` whose table has one more entry."""
    source = (ROOT / "raylight" / "__init__.py").read_text()
    assert source.count(TABLE) == 1
    package = folder / "copy_of_raylight"
    package.mkdir()
    (package / "__init__.py").write_text(source.replace(TABLE, TABLE + entry))
    (package / "toys.py").write_text("class Toy:\n    pass\n")
    return importlib.import_module("copy_of_raylight")


def test_a_name_added_to_the_table_is_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    copy = copy_with('    "toys": ("Toy",),\n', tmp_path)
    try:
        assert "Toy" in copy.__all__
        assert "Toy" in dir(copy)
        assert "copy_of_raylight.toys" not in sys.modules
        assert copy.Toy is sys.modules["copy_of_raylight.toys"].Toy
    finally:
        for name in [name for name in sys.modules if name.startswith("copy_of_raylight")]:
            del sys.modules[name]


def test_every_public_name_can_be_loaded() -> None:
    for name in raylight.__all__:
        assert getattr(raylight, name) is not None
    with pytest.raises(AttributeError, match="'raylight' has no attribute 'no_such_name'"):
        _ = raylight.no_such_name


def test_no_name_is_in_the_table_twice() -> None:
    assert len(raylight.__all__) == sum(map(len, raylight._EXPORTS.values()))


def test_algorithms_offers_the_names_of_its_modules() -> None:
    assert {"GRPO", "APO", "Baseline", "MiniGRPO", "VERL", "algo"} <= set(algorithms.__all__)
    assert "Trainer" not in algorithms.__all__
    for name in algorithms.__all__:
        assert getattr(algorithms, name) is getattr(raylight, name)
        assert name in dir(algorithms)
    with pytest.raises(AttributeError, match=r"'raylight.algorithms' has no attribute 'Trainer'"):
        _ = algorithms.Trainer


@pytest.mark.parametrize("package", STUBS["PACKAGES"])
def test_the_stub_is_what_the_table_gives(package: str) -> None:
    written = STUBS["stub_path"](package).read_text()
    assert written == STUBS["stub_text"](package), "run `python scripts/generate_stubs.py`"
