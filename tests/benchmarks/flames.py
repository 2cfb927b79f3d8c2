"""Flame graphs of processes under load, by py-spy."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

FLAME_S = 10
"""Seconds that py-spy records."""


def flame_folder(text: str) -> Path:
    """Return the value of `--flame`.

    Raises:
        ArgumentTypeError: py-spy is not installed.
    """
    if py_spy() is None:
        raise argparse.ArgumentTypeError(
            "py-spy is neither on PATH nor in this Python's folder; pip install py-spy, or leave --flame out"
        )
    return Path(text)


def py_spy() -> str | None:
    """Return the path of py-spy; None if it is neither on PATH nor in the environment of this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=sysconfig.get_path("scripts"))


class Recorders:
    """Recordings of processes into `folder/NAME.svg`, which do not stop a process while they read it.

    Args:
        pids: process IDs by name.

    Raises:
        FileNotFoundError: py-spy is not installed.
    """

    def __init__(self, folder: Path, pids: Mapping[str, int]) -> None:
        if (program := py_spy()) is None:
            raise FileNotFoundError("flame graphs need py-spy; pip install py-spy")
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--rate", "200", "--duration", str(FLAME_S), "--nonblocking", "--format", "flamegraph"]
        self._processes = {
            folder / f"{name}.svg": subprocess.Popen(
                [program, "record", *options, "--pid", str(pid), "--output", str(folder / f"{name}.svg")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for name, pid in pids.items()
        }

    @property
    def are_running(self) -> bool:
        return any(process.poll() is None for process in self._processes.values())

    def finish(self) -> None:
        """Write what has been recorded, with the process's name as the title."""
        for file, process in self._processes.items():
            process.send_signal(signal.SIGINT)
            process.wait(60)
            file.write_text(re.sub("py-spy record [^<]*", file.stem, file.read_text()))


def children(kinds: Iterable[str]) -> dict[str, int]:
    """Return the process ID of an actor of each kind, such as "StoreActor", below this process."""
    titles = {
        process.pid: " ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)
    }
    found = {kind: [pid for pid, title in titles.items() if f"ray::{kind}" in title] for kind in kinds}
    return {kind: pids[0] for kind, pids in found.items() if pids} | {"driver": os.getpid()}
