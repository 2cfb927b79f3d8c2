"""`raylight examples`: list the example folders, and copy one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from raylight._utils.machine import check_writable
from raylight.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(r"^\s*(?:from|import) examples\.(\w+)", re.MULTILINE)
_OUTPUTS = "__pycache__", "outputs", "node_modules", "dist"


def example_folders() -> dict[str, Path]:
    """Return the example folders of the installed package, or of its checkout, by name.

    Raises:
        ConfigError: the installation has neither.
    """
    places = _PACKAGE / "examples", _PACKAGE.parent / "examples"
    for place in places:
        if found := {readme.parent.name: readme.parent for readme in sorted(place.glob("*/README.md"))}:
            return found
    raise ConfigError(f"there are no examples in {places[0]} or {places[1]}; install raylight again")


def imported_folders(folder: Path) -> set[str]:
    """Return the folders of the package `examples` that files of an example import.

    An example that imports itself so runs in a checkout only.
    """
    return {name for path in folder.rglob("*.py") for name in _IMPORT.findall(path.read_text())}


def copy_example(name: str, target: Path) -> Path:
    """Copy an example folder, with the folders that it imports in its subfolder `examples`; return the copy.

    Raises:
        ConfigError: the name is unknown, the example runs in a checkout only, or the target is in use or
            cannot be written.
    """
    folders = example_folders()
    if name not in folders:
        raise ConfigError(f"there is no example {name!r}; the examples are {', '.join(folders)}")
    imported = imported_folders(folders[name])
    if name in imported:
        raise ConfigError(
            f"the example {name} imports its modules from the checkout, so a copy would not run; clone "
            f"raylight's repository and start it there, as its README says: {folders[name]}"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is in use; name a new folder: raylight examples {name} FOLDER")
    check_writable(target, "the folder")
    left_out = shutil.ignore_patterns("__init__.py", *_OUTPUTS)
    shutil.copytree(folders[name], target, ignore=left_out, dirs_exist_ok=True)
    for other in imported:
        package = target / "examples"
        shutil.copytree(
            folders[name].parent / other, package / other, ignore=shutil.ignore_patterns(*_OUTPUTS)
        )
        (package / "__init__.py").touch()  # comes before a package `examples` that is installed
    return target


def examples(
    name: Annotated[
        str | None, typer.Argument(help="Example to copy.", metavar="NAME", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(help="New folder; ./NAME by default.", metavar="FOLDER", show_default=False),
    ] = None,
) -> None:
    """List the examples, or copy one: `raylight examples real_model ./mine`."""
    if name is not None:
        target = folder or Path(name)
        copy_example(name, target)
        command = f"python {target / 'train.py'} --steps 3 --cpu"
        print(f"{target} is a copy of the example {name}; start it with: {command}")
        return
    found = example_folders()
    width = max(map(len, found))
    for example, path in found.items():
        title = (path / "README.md").read_text().splitlines()[0].lstrip("# ")
        place = " (in a checkout only)" if example in imported_folders(path) else ""
        print(f"{example:{width}}  {title}{place}")
