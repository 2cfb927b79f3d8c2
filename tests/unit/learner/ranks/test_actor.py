"""Memory of a CPU rank: freed blocks are reused without new page faults."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource
from raylight.learner.ranks.actor import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
usual = [faults() for _ in range(3)][-1]
assert keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
@pytest.mark.slow
def test_freed_blocks_are_reused():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    usual, kept = map(int, done.stdout.split())
    assert usual > 10_000
    assert kept < 100
