"""The extras, commands, settings and packages that the pages name exist."""

import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml
from docs_snippets import DOCS, snippet
from page_tables import tables

import raylight as rl
from raylight.cli import app
from raylight.learner.ranks.group import bundles

ROOT = DOCS.parent
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "algorithms").glob("*.md")])


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load a script that belongs to no package as a module."""
    name = f"loaded_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look it up here
    spec.loader.exec_module(module)
    return module


def test_extras_and_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        name for page in PAGES for name in re.findall(r"(?:-e \"\.|raylight)\[(\w+)\]", page.read_text())
    }
    assert named == {*project["optional-dependencies"]}
    install = (DOCS / "install.md").read_text()
    pinned = {requirement for requirement in project["dependencies"] if "==" in requirement}
    for requirement in re.findall(r"torch==[\d.]+", install):
        assert requirement in pinned
    assert project["requires-python"] == ">=3.11,<3.13"
    for page in (install, (ROOT / "README.md").read_text(), (ROOT / "CONTRIBUTING.md").read_text()):
        assert "Python 3.11 or 3.12" in page
    for file in re.findall(r"-r (\S+\.txt)", install):
        assert (ROOT / file).exists()


def test_commands_and_options_match_the_program() -> None:
    program = typer.main.get_command(app)
    options = {
        name: {option for p in command.params for option in p.opts}
        for name, command in program.commands.items()
    }
    for page in PAGES:
        for name, rest in re.findall(r"^ {4}.*\braylight (\w+)(.*)$", page.read_text(), re.MULTILINE):
            assert name in options, f"{page} calls raylight {name}"
            unknown = set(re.findall(r" (--[\w-]+)", rest)) - options[name]
            assert not unknown, f"{page}: raylight {name} has no {unknown}"


def test_the_cluster_page_makes_a_trainer() -> None:
    trainer = snippet(DOCS / "clusters.md", "trainer").run()["trainer"]
    assert isinstance(trainer, rl.Trainer)
    assert bundles(trainer.learner) == [{"CPU": 0.5, "GPU": 1.0}] * 8
    assert (trainer.engine.replicas, trainer.runner.n, trainer.store.path) == (8, 16, "/local/run.db")
    text = (DOCS / "clusters.md").read_text()
    assert f"({rl.RunnerConfig().start_timeout_s:g} s)" in text
    shown = re.findall(r"(engine|learner)=(\{[^`]*\})`", text)
    assert len(shown) >= 3
    for group, written in shown:
        {"engine": rl.EngineConfig, "learner": rl.LearnerConfig}[group].parse(yaml.safe_load(written))


def test_packages_that_the_architecture_page_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "architecture.md").read_text()
    _, _, rooms, _, components, *_ = tables(DOCS / "architecture.md")
    named = [code for row in components.rows for code in re.findall(r"`([\w./]+)`", row[1])]
    assert len(named) > 5
    assert [name for name in named if not (ROOT / "raylight" / name).exists()] == []
    structure = load(ROOT / "tests" / "test_structure.py", monkeypatch)
    by_package: dict[str, list[str]] = {}
    for row in rooms.rows:
        package, room = row[0].strip("`/").split("/")
        by_package.setdefault(package, []).append(room)
    assert {"experience", "learner", "serving", "trainer"} == by_package.keys()
    for package, order in by_package.items():
        folders = (ROOT / "raylight" / package).glob("*/__init__.py")
        assert sorted(order) == sorted(path.parent.name for path in folders)
        between = structure.between_children(f"raylight.{package}", structure.imports())
        for i, room in enumerate(order):
            assert between[room].isdisjoint(order[i + 1 :]), f"{package}/{room} imports a room below it"
    floors = re.split(r"^  (\d) ", text.split("```")[1], flags=re.M)[1:]
    shown = {
        int(n): re.findall(r"(\w+)(?: {2,}(.*→.*))?", drawn)
        for n, drawn in zip(floors[::2], floors[1::2], strict=True)
    }
    assert {n: {name for name, _ in found} for n, found in shown.items()} == dict(enumerate(structure.FLOORS))
    assert {
        name: drawn.split(" → ") for found in shown.values() for name, drawn in found if drawn
    } == by_package
    assert "architecture.svg" in text
    for path in re.findall(r"`(\w+/[\w/]+\.py)`", text):
        assert (ROOT / "raylight" / path).exists() or (ROOT / path).exists(), path
    hops = [hop for hop in re.findall(r"`(\w+/[\w/]+\.py)` `([\w.]+)`", text) if hop[1] != "os.environ"]
    assert len(hops) > 20
    for path, name in hops:  # a hop of a journey is in its file
        source = (ROOT / "raylight" / path).read_text()
        assert all(re.search(rf"(class|def) {part}\b", source) for part in name.split(".")), (path, name)
    assert (DOCS / "architecture.svg").read_text().startswith("<?xml")


def test_the_committed_picture_is_the_output_of_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = load(DOCS / "architecture_picture.py", monkeypatch)
    monkeypatch.setattr(picture, "PICTURE", tmp_path / "picture.svg")
    picture.main()

    def words(text: str) -> list[str]:
        return re.findall(r"<!-- (.+?) -->", text)

    drawn = words((tmp_path / "picture.svg").read_text())
    assert len(drawn) > 30
    assert words((DOCS / "architecture.svg").read_text()) == drawn, (
        "run `python docs/architecture_picture.py`"
    )


def test_contributing_names_all_packages_and_folders_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    _, packages, _, folders, *_ = tables(ROOT / "CONTRIBUTING.md")
    structure = load(ROOT / "tests" / "test_structure.py", monkeypatch)
    named = {name for row in packages.rows for name in re.findall(r"`(\w+)`", row[1])}
    assert named == structure.FLOOR_OF.keys()
    named = {name for row in folders.rows for name in re.findall(r"`tests/(\w+)`", row[0])}
    assert named | {"helpers"} == {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))}


def test_contributing_names_files_that_exist_and_toys_of_at_most_40_lines() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = [ROOT / path for path in re.findall(r"`((?:raylight|tests|docs|scripts|\.ci)/[\w./]+)`", text)]
    assert [path for path in paths if not path.exists()] == []
    toys = [path for path in paths if "toy" in path.stem or path.stem == "echo_engine"]
    assert len(toys) == 8
    assert {toy.name: n for toy in toys if (n := len(toy.read_text().splitlines())) > 40} == {}
