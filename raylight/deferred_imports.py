"""Deferral of slow imports, so that a process does not import at its start what it may never need."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def defer_imports(*names: str) -> Iterator[None]:
    """Defer the import of modules. A function that the block imports from one of them loads the module when
    it is first called.

    The block can use these modules only for functions and classes that it does not call itself. A module that
    is already imported stays.

    Args:
        names: full names of modules.
    """
    placed = {name: _StandIn(name) for name in names if name not in sys.modules}
    sys.modules.update(placed)
    try:
        yield
    finally:
        for name in placed:
            del sys.modules[name]


class _StandIn(ModuleType):
    """Module whose functions load the real module when they are called."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"the stand-in for {self.__name__} has no {attribute}")
        return _load_when_called(self.__name__, attribute)


def _load_when_called(module: str, attribute: str) -> Callable[..., Any]:
    def load_and_call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(*args, **options)

    return load_and_call
