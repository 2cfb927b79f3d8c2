"""Public names: tables give `__all__`, lazy loading, the public packages, old names, and the stubs."""

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

import raylight
from raylight import algorithms

ROOT = Path(__file__).parent.parent
TABLE = "_EXPORTS = {\n"
MAX_NAMES = 70
STUBS = runpy.run_path(str(ROOT / "scripts" / "generate_stubs.py"))


def copy_with(entry: str, folder: Path) -> ModuleType:
    """Import a copy of the package's `__init__.py` whose table has one more entry."""
    source = (ROOT / "raylight" / "__init__.py").read_text()
    assert source.count(f"\n{TABLE}") == 1
    package = folder / "copy_of_raylight"
    package.mkdir()
    (package / "__init__.py").write_text(source.replace(f"\n{TABLE}", f"\n{TABLE}{entry}"))
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
    assert len(raylight.__all__) <= MAX_NAMES
    for name in raylight.__all__:
        assert getattr(raylight, name) is not None
    with pytest.raises(AttributeError, match="'raylight' has no attribute 'no_such_name'"):
        _ = raylight.no_such_name


def test_no_name_is_in_a_table_twice() -> None:
    tables = [raylight._EXPORTS, *raylight._PACKAGE_EXPORTS.values()]
    names = [name for table in tables for module in table.values() for name in module]
    assert len(names) == len({*names})


def test_a_name_of_a_public_package_is_its_own_and_no_module() -> None:
    for package in raylight._PACKAGE_EXPORTS:
        module = getattr(raylight, package)
        for name, home in raylight._modules_of(package).items():
            offered = getattr(module, name)
            assert offered is getattr(importlib.import_module(home), name)
            assert not isinstance(offered, ModuleType), f"{package}.{name} is hidden by a module"
            assert name in dir(module)


@pytest.mark.parametrize("name", sorted(raylight._PACKAGE_OF))
def test_a_name_of_version_0_2_is_found_with_a_warning(name: str) -> None:
    package = raylight._PACKAGE_OF[name]
    with pytest.warns(DeprecationWarning, match=rf"raylight\.{name} is now raylight\.{package}\.{name}; "):
        found = getattr(raylight, name)
    assert found is getattr(getattr(raylight, package), name)
    assert name not in dir(raylight)


def test_an_old_name_is_an_error_in_these_tests() -> None:
    with pytest.raises(DeprecationWarning, match=r"works until 1\.0"):
        _ = raylight.ruler


def test_algorithms_offers_the_names_of_its_modules() -> None:
    assert {"GRPO", "APO", "Baseline", "MiniGRPO", "VERL", "algo", "DAPO"} <= set(algorithms.__all__)
    assert "Trainer" not in algorithms.__all__
    assert algorithms.GRPO is raylight.GRPO
    with pytest.raises(AttributeError, match=r"'raylight.algorithms' has no attribute 'Trainer'"):
        _ = algorithms.Trainer


@pytest.mark.parametrize("package", STUBS["PACKAGES"])
def test_the_stub_is_what_the_table_gives(package: str) -> None:
    written = STUBS["stub_path"](package).read_text()
    assert written == STUBS["stub_text"](package), "run `python scripts/generate_stubs.py`"
