"""One form of all recipes: their files, the picture of their curve, and the options of `train.py`."""

import re
from pathlib import Path

import pytest

from raylight.cli.examples import example_folders

OPTIONS = ("--model", "--steps", "--output-dir", "--seed", "--cpu")
OTHER_FORM = {
    "process_agent": "finds the best of several designs and prompts, and trains no weights",
    "tau2_agent": "no curve: no model that is made in minutes holds a conversation with tools",
}
"""Reason for which an older example has another form."""


def missing_parts(folder: Path) -> list[str]:
    """Return the parts of the form that an example does not have."""
    missing = [name for name in ("agent.*", "train.py", "README.md") if not any(folder.glob(name))]
    if not missing:
        program, page = (folder / "train.py").read_text(), (folder / "README.md").read_text()
        pictures = [folder / path for path in re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", page)]
        missing += [option for option in OPTIONS if f'"{option}"' not in program]
        missing += [f"the picture {path.name}" for path in pictures if not path.exists()]
        missing += [] if pictures else ["a picture of the curve"]
        missing += [size for size in ("One GPU", "Eight") if size not in page]
        missing += [] if page.startswith("# ") else ["a title"]
    return missing


@pytest.mark.parametrize("name", example_folders())
def test_an_example_has_the_form_or_a_reason(name: str) -> None:
    missing = missing_parts(example_folders()[name])
    assert bool(missing) == (name in OTHER_FORM), f"{name} has no {', '.join(missing)}" if missing else name


def test_each_reason_is_of_an_example() -> None:
    assert OTHER_FORM.keys() <= example_folders().keys()
