"""Installed packages that cannot be imported: a run's error names them, before Ray starts and after."""

import importlib.metadata
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from raylight._utils.broken_packages import BrokenPackage, check_packages, find_broken, import_packages
from raylight.config import LearnerConfig
from raylight.errors import BrokenPackageError
from raylight.learner.faults import classify_in_rank

NMS = "operator torchvision::nms does not exist"
REMEDY = "pip uninstall torchvision, which raylight does not need, or install the release for torch "
TORCH = importlib.metadata.version("torch").partition("+")[0]


def install(site: Path, name: str, code: str, requires: str = "", module: str = "") -> None:
    """Install a package with metadata into a folder."""
    (site / (module or name)).mkdir(parents=True)
    (site / (module or name) / "__init__.py").write_text("from . import _operators\n")
    (site / (module or name) / "_operators.py").write_text(code)
    info = site / f"{name.replace('-', '_')}-0.19.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 0.19.0"]
    (info / "METADATA").write_text("\n".join([*lines, *([f"Requires-Dist: {requires}"] if requires else [])]))
    (info / "top_level.txt").write_text(module or name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of packages that this process and those that it starts can import."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder


@pytest.fixture
def torchvision(site: Path) -> Path:
    """A torchvision for another torch, which fails as the real one does."""
    code = "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(*_): ...\n"
    install(site, "torchvision", code, requires="torch (==2.4.0)")
    return site


@pytest.mark.slow
def test_a_run_names_a_package_for_another_torch(torchvision: Path) -> None:
    with pytest.raises(BrokenPackageError) as raised:
        check_packages()
    message = str(raised.value)
    assert message.startswith(
        f"torchvision 0.19.0 is installed and cannot be imported (RuntimeError: {NMS}); "
    )
    assert REMEDY + TORCH in message
    assert message.endswith(f": pip install --upgrade torchvision torch=={TORCH}")


@pytest.mark.slow
def test_a_package_that_works_with_another_torch_than_it_names_is_left_alone(site: Path) -> None:
    install(site, "torchvision", "import torch", requires="torch (==2.4.0)")
    check_packages()


def test_nothing_is_imported_without_a_reason(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "torchaudio", "raise RuntimeError('imported')", requires="torch")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    check_packages()


@pytest.mark.slow
def test_the_doctor_finds_all_that_cannot_be_imported(torchvision: Path) -> None:
    install(torchvision, "scikit-learn", "print('[\"noise'); import absent_library", module="sklearn")
    found = import_packages(["torchvision", "scikit-learn", "flash-attn"])
    assert [(one.name, one.reason) for one in found] == [
        ("torchvision", f"RuntimeError: {NMS}"),
        ("scikit-learn", "ModuleNotFoundError: No module named 'absent_library'"),
    ]


def test_an_import_that_ends_the_process_is_found(site: Path) -> None:
    install(site, "torchaudio", "import os; os._exit(3)")
    install(site, "torchcodec", "raise OSError('libav')")
    found = import_packages(["torchaudio", "torchcodec"])
    assert [(one.name, one.reason) for one in found] == [
        ("torchaudio", "its import ends the process with code 3"),
        ("torchcodec", "OSError: libav"),
    ]


def test_a_required_package_is_not_to_be_removed() -> None:
    assert BrokenPackage("torch", "2.4.0", "OSError: libcudart.so").remedy == (
        "pip install --force-reinstall 'torch==2.13.0'"
    )


def test_a_package_that_verl_requires_is_not_to_be_removed() -> None:
    remedy = BrokenPackage("pandas", "3.0", "ValueError: numpy.dtype size changed").remedy
    assert remedy == "install it again: pip install --upgrade --force-reinstall --no-deps pandas"


def error_of(statement: str) -> Exception:
    try:
        exec(compile(statement, "agent.py", "exec"), {"__name__": "agent"})
    except Exception as error:
        return error
    raise AssertionError("no error")


def test_the_innermost_package_is_named(site: Path) -> None:
    install(site, "inner-package", "raise OSError('libinner.so: undefined symbol')", module="inner_module")
    install(
        site,
        "outer-package",
        "try:\n    import inner_module\nexcept OSError as error:\n    raise ImportError('outer') from error",
        module="outer_module",
    )
    broken = find_broken(error_of("import outer_module"))
    reason = "OSError: libinner.so: undefined symbol"
    assert broken == BrokenPackage("inner-package", "0.19.0", reason)
    typed = classify_in_rank(error_of("import outer_module"), 0, LearnerConfig())
    assert isinstance(typed, BrokenPackageError)
    assert str(pickle.loads(pickle.dumps(typed))) == (
        f"inner-package 0.19.0 is installed and cannot be imported ({reason}); install what it lacks, or "
        "repair it"
    )


@pytest.mark.parametrize(
    "statement",
    [
        "1 / 0",
        "import a_module_that_nobody_has",
        "try:\n    import failing_module\nexcept ImportError:\n    {}['of the run']",
    ],
)
def test_other_errors_are_left_alone(site: Path, statement: str) -> None:
    install(site, "failing-package", "raise ImportError('optional')", module="failing_module")
    assert find_broken(error_of(statement)) is None


@pytest.mark.slow
def test_transformers_own_error_names_the_package(torchvision: Path) -> None:
    """transformers only says that it could not import the model's class."""
    code = (
        "from raylight._utils.broken_packages import find_broken\n"
        "try:\n    from transformers import Qwen3ForCausalLM\n"
        "except Exception as error:\n    print(type(error).__name__, find_broken(error))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.startswith("ModuleNotFoundError BrokenPackage(name='torchvision', version='0.19.0'")
