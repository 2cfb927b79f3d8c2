"""Surroundings of a run for faults outside its processes: a small disk, and a cluster of two nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DISK_BYTES = 64 * 2**20


class SmallDisk:
    """A disk of its own for a run directory; needs root.

    Args:
        folder: empty folder at which the disk is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filler = folder / "filler"

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount the disk until the block ends; the run directory then remains as a copy."""
        self._folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self._folder)]
        subprocess.run(command, check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(self._folder)], check=True, capture_output=True)

    def fill(self) -> None:
        """Write until no byte is left."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 65536):
                pass

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink()


class TwoNodes:
    """A Ray cluster of two nodes on this machine, in a process of its own.

    Args:
        environment: environment variables of all its processes.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout
        self.address = next(line.split()[1] for line in self._process.stdout if line.startswith("address "))

    def remove_node(self) -> None:
        """Kill all processes of the second node."""
        assert self._process.stdin
        self._process.stdin.write("remove\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """End the cluster."""
        self._process.communicate()


def main() -> None:
    """Start the cluster, print its address, and obey the lines of the standard input until it is closed."""
    from ray.cluster_utils import Cluster

    size: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    node = cluster.add_node(**size)
    cluster.wait_for_nodes()
    print("address", cluster.address, flush=True)
    for line in sys.stdin:
        if line == "remove\n":
            cluster.remove_node(node, allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
