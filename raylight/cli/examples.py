"""`raylight examples`: list the example folders, and copy one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from raylight.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(r"^\s*(?:from|import) examples\b", re.MULTILINE)
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "__init__.py", "outputs", "node_modules", "dist")


def example_folders() -> dict[str, Path]:
    """Return the example folders by name: those of the installed package, or of its checkout.

    Raises:
        ConfigError: the installation has neither.
    """
    places = _PACKAGE / "examples", _PACKAGE.parent / "examples"
    for place in places:
        if found := {readme.parent.name: readme.parent for readme in sorted(place.glob("*/README.md"))}:
            return found
    raise ConfigError(f"there are no examples in {places[0]} or {places[1]}; install raylight again")


def needs_checkout(folder: Path) -> bool:
    """Return True if files of an example import the package `examples`, which only a checkout has."""
    return any(_IMPORT.search(path.read_text()) for path in folder.rglob("*.py"))


def copy_example(name: str, target: Path) -> Path:
    """Copy an example folder; return the copy.

    Raises:
        ConfigError: the name is unknown, the example runs in a checkout only, or the target exists.
    """
    folders = example_folders()
    if name not in folders:
        raise ConfigError(f"there is no example {name!r}; the examples are {', '.join(folders)}")
    if needs_checkout(folders[name]):
        raise ConfigError(
            f"the example {name} imports other modules of the checkout, so a copy would not run; clone "
            f"raylight's repository and start it there, as its README says: {folders[name]}"
        )
    if target.exists():
        raise ConfigError(f"{target} exists; name a new folder: raylight examples {name} FOLDER")
    return Path(shutil.copytree(folders[name], target, ignore=_LEFT_OUT))


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
        print(f"{target} is a copy of the example {name}; {target / 'README.md'} has its commands")
        return
    found = example_folders()
    width = max(map(len, found))
    for example, path in found.items():
        title = (path / "README.md").read_text().splitlines()[0].lstrip("# ")
        print(f"{example:{width}}  {title}{' (in a checkout only)' if needs_checkout(path) else ''}")
