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
    with _stand_ins(dict.fromkeys(names, _load_when_called)):
        yield


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Let the block import and load a model of transformers without torch's compiler.

    The compiler takes longer to import than torch. For a model that is not compiled it has nothing to do:
    transformers marks functions for it, and torch runs some functions outside of it.
    """
    import torch  # noqa: F401 - otherwise torch itself would import the stand-in

    scope = "torch._dynamo._trace_wrapped_higher_order_op"
    with _stand_ins({"torch._dynamo": _mark, scope: _load_when_called, "scipy.optimize": _load_when_called}):
        yield


@contextlib.contextmanager
def _stand_ins(attributes: dict[str, Callable[[str, str], Any]]) -> Iterator[None]:
    """Put stand-ins for modules into `sys.modules` for the time of the block.

    Args:
        attributes: by name of a module, the function that returns an attribute for the names of both.
    """
    placed = {name: _StandIn(name, get) for name, get in attributes.items() if name not in sys.modules}
    sys.modules.update(placed)
    try:
        yield
    finally:
        for name in placed:
            del sys.modules[name]


class _StandIn(ModuleType):
    def __init__(self, name: str, get: Callable[[str, str], Any]) -> None:
        super().__init__(name)
        self._get = get

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"the stand-in for {self.__name__} has no {attribute}")
        return self._get(self.__name__, attribute)


def _load_when_called(module: str, attribute: str) -> Callable[..., Any]:
    def load_and_call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(*args, **options)

    return load_and_call


def _mark(_module: str, _attribute: str) -> Callable[..., Any]:
    """Return a decorator, with or without arguments, that returns the function itself."""

    def decorate(function: Any = None, *_args: Any, **_options: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function

    return decorate
