"""A run trains with packages that people have installed: each alone, and all that resolve together.

`pytest -n 0 -m slow tests/crowd` takes about a minute a package, and needs a package index.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from crowd import PACKAGES, RAN, UNRESOLVED, Result, requirements, selected_package, try_together

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed: pip install uv")


@pytest.fixture
def outcome_beside(tmp_path: Path, record_property: Callable[[str, object], None]) -> Callable[..., Result]:
    def try_and_record(*packages: str) -> Result:
        result = try_together(list(packages), tmp_path)
        record_property("row", result.row())
        return result

    return try_and_record


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_run_beside(package: str, outcome_beside: Callable[..., Result]) -> None:
    result = outcome_beside(package)
    assert result.outcome == RAN, result.output


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_beside_all(outcome_beside: Callable[..., Result]) -> None:
    result = outcome_beside(*PACKAGES)
    assert result.outcome == RAN, result.output


@pytest.mark.slow
def test_a_package_that_excludes_a_requirement_does_not_resolve(tmp_path: Path) -> None:
    result = try_together(["transformers==5.10.3"], tmp_path)
    assert (result.outcome, result.versions) == (UNRESOLVED, {})
    assert "transformers" in result.output, "not a failure of uv itself"
    assert not (tmp_path / "env").exists()


def test_all_packages_come_in_turn() -> None:
    assert {selected_package(f"{number:x}") for number in range(len(PACKAGES))} == set(PACKAGES)


def test_the_pins_of_raylight_take_part_in_the_resolution() -> None:
    assert {"torch==2.13.0", "verl==0.9.1", "transformers==5.10.4"} <= set(requirements())
    assert not any("extra ==" in requirement for requirement in requirements())
