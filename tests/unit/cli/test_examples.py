"""The list of examples, copies of them, and the wheel that carries them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_runner import CliRunner
from example_modules import run_copy

from raylight.cli import app
from raylight.cli import examples as cli_examples
from raylight.cli.examples import copy_example, example_folders, imported_folders
from raylight.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_the_list_has_a_line_for_each_example() -> None:
    lines = CliRunner().invoke(app, ["examples"]).output.splitlines()
    assert [line.split()[0] for line in lines] == sorted(
        p.parent.name for p in ROOT.glob("examples/*/README.md")
    )
    assert "real_model     A real model, without a hub" in lines
    assert "math_agent     Math agent (in a checkout only)" in lines


def test_a_copy_has_the_files_and_names_its_command(tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    result = CliRunner().invoke(app, ["examples", "real_model", str(copy)])
    assert f"start it with: python {copy / 'train.py'} --steps 3 --cpu" in " ".join(result.output.split())
    copied = {path.name for path in copy.iterdir()}
    assert copied == {"README.md", "after_sft.py", "agent.py", "pretrained.py", "train.py"}


def test_a_copy_runs_outside_of_the_checkout(tmp_path: Path) -> None:
    run_copy("harness_agent", tmp_path, "--help")
    assert (tmp_path / "mine" / "examples" / "starter_models" / "make.py").exists()
    shutil.rmtree(tmp_path / "mine")
    run_copy("real_model", tmp_path, "--help")
    command = [sys.executable, str(tmp_path / "mine" / "after_sft.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_copied_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no example 'wordly'; the examples are .*real_model"):
        copy_example("wordly", tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"tau2_agent imports its modules from the checkout.*clone"):
        copy_example("tau2_agent", tmp_path / "mine")
    with pytest.raises(ConfigError, match="in use; name a new folder: raylight examples real_model FOLDER"):
        copy_example("real_model", Path(__file__).parent)
    assert list(tmp_path.iterdir()) == []


def test_an_installation_without_examples_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_examples, "_PACKAGE", tmp_path / "raylight")
    with pytest.raises(ConfigError, match=r"no examples in .* install raylight again"):
        example_folders()


def test_a_built_package_has_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
    command = [sys.executable, "setup.py", "-q", *places]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    monkeypatch.setattr(cli_examples, "_PACKAGE", tmp_path / "lib" / "raylight")
    built = example_folders()
    assert list(built) == sorted(path.parent.name for path in ROOT.glob("examples/*/README.md"))
    assert {path.parents[1] for path in built.values()} == {tmp_path / "lib" / "raylight"}
    assert imported_folders(built["harness_agent"]) == {"starter_models"}
    copy_example("harness_agent", tmp_path / "mine")
