"""Algorithms: they turn rollouts into a better agent.

This package offers the public names of its modules, as the table in `raylight/__init__.py` lists them.
"""

from __future__ import annotations

from typing import Any

import raylight

__all__ = sorted(name for name, module in raylight._MODULE_OF.items() if module.startswith(f"{__name__}."))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(raylight, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
