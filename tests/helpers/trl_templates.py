"""Chat templates of many families, in the package of the extra `trl`; without it, test modules skip."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.find_spec("trl")
if _spec is None:
    pytest.skip("the extra raylight[trl] is not installed", allow_module_level=True)
FOLDER = Path(str(_spec.origin)).parent / "chat_templates"


def read_template(name: str) -> str:
    """Return the template in the file of this name, without its suffix."""
    return (FOLDER / f"{name}.jinja").read_text()
