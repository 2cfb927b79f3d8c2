"""Python files as syntax trees."""

import ast
import functools
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return a file's tree, which no caller may change. Several tests read the whole package, and parsing it
    takes seconds."""
    return ast.parse(path.read_text())
