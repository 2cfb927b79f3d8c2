"""Flame graphs of processes under load, by py-spy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

FLAME_S = 10
"""Seconds that py-spy records."""


def start_recorders(folder: Path, pids: Mapping[str, int]) -> list[subprocess.Popen[bytes]]:
    """Start to record processes into `folder/NAME.svg`, without stopping them while they are read.

    Raises:
        FileNotFoundError: py-spy is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--rate", "200", "--duration", str(FLAME_S), "--nonblocking", "--format", "flamegraph"]
    return [
        subprocess.Popen(
            ["py-spy", "record", *options, "--pid", str(pid), "--output", str(folder / f"{name}.svg")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, pid in pids.items()
    ]


def children(kinds: Iterable[str]) -> dict[str, int]:
    """Return the process ID of an actor of each kind, such as "StoreActor", below this process."""
    titles = {
        process.pid: " ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)
    }
    found = {kind: [pid for pid, title in titles.items() if f"ray::{kind}" in title] for kind in kinds}
    return {kind: pids[0] for kind, pids in found.items() if pids} | {"driver": os.getpid()}
