"""Cost of Python's garbage collector in long-lived processes."""

from __future__ import annotations

import gc


def freeze_startup_objects() -> None:
    """Exempt all present objects from further garbage collections.

    The libraries of a process are hundreds of thousands of objects that live as long as it. Each full
    collection would visit them all. Called once a process has started, before its first work.
    """
    gc.collect()
    gc.freeze()
