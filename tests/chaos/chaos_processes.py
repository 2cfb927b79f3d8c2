"""The processes of one run, orphans included, and what they leave on the machine.

Other runs work on the same machine: everything is found through an environment variable that all processes
of the run inherit, or through such a process.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
from ray_cluster import eventually, processes_with

RUN_VARIABLE = "RAYLIGHT_CHAOS_RUN"
TARGETS = {
    "driver": "chaos_driver.py",
    "GCS": "gcs/gcs_server",
    "raylet": "raylet/raylet",
    "dashboard agent": "ray::DashboardAgent",
    "store": "ray::StoreActor",
    "coordinator": "ray::CoordinatorActor",
    "learner": "ray::LearnerActor",
    "runner": "ray::RunnerActor",
    "Serve controller": "ray::ServeController",
    "proxy manager": "ray::HAProxyManager",
    "HAProxy": "/haproxy ",
    "replica": "ray::ServeReplica",
    "program": "chaos_program.py",
}
"""Part of the command line of each kind of process."""
FOLDERS = ("/dev/shm", "/tmp", "/tmp/haproxy-serve")
"""Folders whose entries a run may leave behind."""
KEPT = re.compile(r"/tmp/(ray|haproxy-serve|pymp-\w+|raylight-\w+-\d+\.lock)$")
"""Entries that stay: Ray's logs, the empty folders of Ray's dashboard, and raylight's locks, one for all runs
of a user."""


class RunProcesses:
    """Processes of a run. Those seen once are recognised later, although some hide their environment.

    Args:
        run: value of RUN_VARIABLE in the environment of the run's driver.
    """

    def __init__(self, run: str) -> None:
        self.environment = {RUN_VARIABLE: run}
        self._seen: set[psutil.Process] = set()
        self._paths: set[str] = set()
        self._before = {entry for folder in FOLDERS for entry in _entries(folder)}

    def look(self) -> list[psutil.Process]:
        """Return the live processes, and remember them and the files that they have."""
        for process in processes_with(self.environment):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen |= {process, *process.children(recursive=True)}
        alive = [process for process in self._seen if _is_alive(process)]
        for process in alive:
            self._paths |= {entry for path in _paths_of(process) for entry in _parents(path)}
        return alive

    def find(self, target: str) -> list[psutil.Process]:
        """Return the live processes of a kind, in the order of their start."""
        found = []
        for process in self.look():
            with contextlib.suppress(psutil.NoSuchProcess):
                if TARGETS[target] in " ".join(process.cmdline()) + " ":
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def wait_for(self, target: str, deadline_s: float) -> list[psutil.Process]:
        """Wait until there is a process of a kind."""
        found: list[psutil.Process] = []

        def exists() -> bool:
            found[:] = self.find(target)
            return bool(found)

        eventually(exists, deadline_s, f"a process of the kind {target}")
        return found

    def wait_for_end(self, deadline_s: float) -> list[str]:
        """Wait for the end of all processes; describe those that remain, with the ports they listen on."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self.look(), deadline_s, "the end of all processes")
        return sorted(filter(None, map(_describe, self.look())))

    def kill(self) -> None:
        """Kill what remains."""
        while alive := self.look():
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=10)

    def files(self) -> list[str]:
        """Return the files, folders and segments of shared memory of the run that still exist."""
        new = self._paths - self._before
        return sorted(path for path in new if not KEPT.match(path) and os.path.exists(path))


def _entries(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in os.listdir(folder)] if os.path.isdir(folder) else []


def _parents(path: str) -> Iterator[str]:
    """Yield the entries of FOLDERS that a path lies in."""
    for folder in FOLDERS:
        if path.startswith(f"{folder}/"):
            yield os.path.join(folder, path[len(folder) + 1 :].split("/")[0])


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _paths_of(process: psutil.Process) -> Iterator[str]:
    """Yield the files, memory segments, sockets and arguments of a process."""
    with contextlib.suppress(
        psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError
    ):
        yield from process.cmdline()
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            yield from line.split(maxsplit=5)[5:]
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor)
        yield from (socket.laddr for socket in process.net_connections("unix") if socket.laddr)


def _describe(process: psutil.Process) -> str:
    """Name a process by its kind, and list the ports that it listens on; "" if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        line = " ".join(process.cmdline()) + " "
        kind = next((name for name, part in TARGETS.items() if part in line), "") or _script(process)
        ports = sorted({c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"})
        state = " frozen" if process.status() == psutil.STATUS_STOPPED else ""
        return kind + state + (f" on {', '.join(map(str, ports))}" if ports else "")
    return ""


def _script(process: psutil.Process) -> str:
    """Return a short form of a command line, such as `python monitor.py`."""
    return " ".join(Path(word).name for word in process.cmdline() if not word.startswith("-"))[:60].strip()
