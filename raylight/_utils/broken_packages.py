"""Installed packages that cannot be imported, such as a torchvision for another release of torch.

transformers and verl import many packages if they are there. When one of them fails, transformers only says
that it "could not import" the model's class.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from raylight.errors import BrokenPackageError

BUILT_FOR_TORCH = {"torchvision": "torchvision", "torchaudio": "torchaudio", "torchcodec": "torchcodec"}
"""Modules of packages that are compiled against one release of torch."""
IMPORTED = BUILT_FOR_TORCH | {
    "flash-attn": "flash_attn",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "pandas": "pandas",
    "pillow": "PIL",
    "pyarrow": "pyarrow",
}
"""Modules of packages that transformers, verl or vLLM import if they are there."""
NEEDED = ("verl", "transformers", "peft", "ray")
"""Packages whose own requirements a run needs too."""
IMPORT_ALL = """
import importlib, json, sys
reasons = {}
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except Exception as error:
        reasons[module] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
print()
print("raylight:", json.dumps(reasons))
"""
RESULT = "raylight: "
"""Beginning of the result among what the packages print."""


@dataclass(frozen=True)
class BrokenPackage:
    """An installed package that cannot be imported."""

    name: str
    version: str
    reason: str
    """Type and message of the error that its import raised."""

    @property
    def summary(self) -> str:
        """The package, and the error."""
        return f"{self.name} {self.version} is installed and cannot be imported ({self.reason})"

    @property
    def remedy(self) -> str:
        """Command that removes the package, or installs one that fits."""
        for one in _requirements("raylight"):
            if canonicalize_name(one.name) == self.name:
                return f"pip install --force-reinstall '{one.name}{one.specifier}'"
        if torch := self.name in BUILT_FOR_TORCH and installed("torch"):
            release = Version(torch).public
            install = f"the release for torch {release}: pip install --upgrade {self.name} torch=={release}"
        else:
            install = f"it again: pip install --upgrade --force-reinstall --no-deps {self.name}"
        if any(canonicalize_name(one.name) == self.name for name in NEEDED for one in _requirements(name)):
            return f"install {install}"
        if self.name in IMPORTED:
            return f"pip uninstall {self.name}, which raylight does not need, or install {install}"
        return "install what it lacks, or repair it"

    def error(self) -> BrokenPackageError:
        """Return the error of a run that needs what imports the package."""
        return BrokenPackageError(f"{self.summary}; {self.remedy}")


def find_broken(error: BaseException) -> BrokenPackage | None:
    """Return the package whose import raised an error, None if it has another cause.

    The innermost error of the chain is the package's own: transformers raises others from it.
    """
    if not isinstance(error, ImportError) and _importing(error) is None:
        return None  # an optional import may have failed before
    for cause in reversed(list(_chain(error))):
        if name := _importing(cause):
            reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
            return BrokenPackage(name, installed(name) or "", reason)
    return None


def check_packages() -> None:
    """Check that the installed packages that are built for one release of torch can be imported.

    Only one that requires another release of torch is imported, in a separate process.

    Raises:
        BrokenPackageError: one cannot be imported.
    """
    torch = installed("torch")
    others = [
        name
        for name in BUILT_FOR_TORCH
        for required in _requirements(name)
        if required.name == "torch" and torch and not required.specifier.contains(torch, prereleases=True)
    ]
    for package in import_packages(others):
        raise package.error()


def import_packages(names: Iterable[str] = tuple(IMPORTED)) -> list[BrokenPackage]:
    """Import the installed ones of these packages in a process; return those that cannot be imported."""
    versions = {name: version for name in names if (version := installed(name))}
    if not versions:
        return []
    command = [sys.executable, "-c", IMPORT_ALL, *(IMPORTED[name] for name in versions)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        reasons = json.loads(done.stdout.rpartition(RESULT)[2].splitlines()[0])
    elif len(versions) > 1:
        return [broken for name in versions for broken in import_packages([name])]
    else:
        reasons = dict.fromkeys(command[3:], f"its import ends the process with code {done.returncode}")
    return [
        BrokenPackage(name, version, reasons[module])
        for name, version in versions.items()
        if (module := IMPORTED[name]) in reasons
    ]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, or while they were handled."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def _importing(error: BaseException) -> str | None:
    """Return the installed package whose import raised an error; raylight does not count."""
    modules = [
        str(frame.f_globals.get("__name__", "")).split(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    names = importlib.metadata.packages_distributions().get(modules[-1], []) if modules else []
    return next((canonicalize_name(name) for name in names if name != "raylight"), None)


def installed(name: str) -> str | None:
    """Return the installed version of a package; None without one."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _requirements(name: str) -> list[Requirement]:
    """Return what an installed package requires without extras; nothing of one that is not there."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        declared = map(Requirement, importlib.metadata.requires(name) or ())
        return [one for one in declared if one.marker is None or one.marker.evaluate({"extra": ""})]
    return []
