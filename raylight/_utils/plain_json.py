"""Values of users as JSON, for files and pages that people read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def plain(value: object) -> object:
    """Return a value as JSON has it; what JSON lacks, keys included, as text, and NaN as None."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # the order of texts differs between processes
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray) and not isinstance(value, np.longdouble):
        return plain(value.tolist())
    return repr(value)
