"""The heap of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> bool:
    """Keep what tensors free for the tensors of the next step; returns whether the C library took notice.

    glibc maps every large tensor anew and gives it back afterwards, and the kernel clears each page again: of a CPU's update of 20
    million parameters that is a tenth. Afterwards the process holds on to the most that it ever needed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
