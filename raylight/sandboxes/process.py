"""Sandbox of plain processes: a temporary folder on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raylight._utils.files import read_bounded
from raylight.errors import ConfigError, SandboxError, SandboxUnavailableError
from raylight.sandboxes.exec_sandbox import MAX_FILE_BYTES
from raylight.sandboxes.folders import SandboxFolder
from raylight.sandboxes.local_program import run_program
from raylight.sandboxes.sandbox import ExecResult, Sandbox, SandboxLimits, SandboxProgram

PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables of the runner's Python, which would make another Python import the runner's packages."""
COUNT_S = 60.0
"""Longest time for counting the size of a sandbox's folder."""


def inherited_environment() -> dict[str, str]:
    """Return the variables of this process that a program on this machine receives."""
    return {name: value for name, value in os.environ.items() if name not in PYTHON_VARIABLES}


async def run_here(command: Sequence[str], name: str | None = None, **options: Any) -> ExecResult:
    """Run a program of this machine, by default with the variables of `inherited_environment`.

    Args:
        name: name of the program for messages; by default the command's first word.
        options: as in `run_program`.

    Raises:
        SandboxError: it cannot be started.
    """
    try:
        return await run_program(command, **{"env": inherited_environment()} | options)
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        title = name or command[0]
        raise SandboxError(
            f"{title} cannot be started: {error}; install {title} on every machine with runners"
        ) from None


async def make_folder() -> SandboxFolder:
    """Return a new folder for a sandbox.

    Raises:
        SandboxUnavailableError: it cannot be made.
    """
    try:
        return await asyncio.to_thread(SandboxFolder)
    except OSError as error:
        raise SandboxUnavailableError(
            f"no folder for a sandbox can be made: {error}; free disk space, or set TMPDIR"
        ) from None


async def check_size(folder: str, limits: SandboxLimits) -> None:
    """Compare the size of a sandbox's folder with its limit, if it has one.

    Raises:
        SandboxError: the folder is larger.
    """
    if limits.file_mb is None:
        return
    counted = await run_here(["du", "-sk", folder], timeout_s=COUNT_S)
    size = counted.stdout.partition("\t")[0]
    if counted.timed_out or not size.isdigit() or int(size) >> 10 > limits.file_mb:
        found = f"take {int(size) >> 10} MiB" if size.isdigit() else f"cannot be counted in {COUNT_S:g} s"
        raise SandboxError(
            f"the files of the sandbox {found}, and its limit file_mb is {limits.file_mb}; raise it in "
            "SandboxLimits, or have the agent write less"
        )


class ProcessSandbox(Sandbox):
    """Programs of this machine, in a temporary folder. It protects nothing but that folder.

    A program reads and writes what the runner's user may, so this is for agents that are trusted; `read` and
    `write` take any path of the machine, too. The limit of memory holds for each process; the limit of
    files holds for each process and, when a program has ended, for the folder. The number of processes and
    the network cannot be limited.

    Raises:
        ConfigError: a limit cannot be enforced.
    """

    HAS_IMAGE = False

    def __init__(self, image: str | None, limits: SandboxLimits) -> None:
        if image is not None:
            raise ConfigError(f'the sandbox "process" has no images; leave {image!r} out')
        for name, is_set in (("processes", limits.processes is not None), ("network", not limits.network)):
            if is_set:
                raise ConfigError(
                    f'the sandbox "process" cannot limit {name}; use "bubblewrap" or "podman:IMAGE"'
                )
        self._limits = limits
        self._folder: SandboxFolder | None = None

    @property
    def workspace(self) -> str:
        if self._folder is None:
            raise SandboxError("the sandbox has no workspace, because it is not started; call start() first")
        return self._folder.path

    @property
    def root(self) -> str:
        return self.workspace

    async def start(self) -> None:
        if self._folder is None:
            self._folder = await make_folder()

    async def run(self, program: SandboxProgram) -> ExecResult:
        environment = inherited_environment() | {"TMPDIR": self.workspace} | dict(program.env)
        folder = os.path.join(self.workspace, program.cwd)
        ended = await run_here(
            self._limits.limited(program.command),
            program.command[0],
            env=environment,
            cwd=folder,
            stdin=program.stdin,
            timeout_s=program.timeout_s,
            limit_mark=True,
        )
        await check_size(self.workspace, self._limits)
        return ended

    async def forward(self, url: str) -> str:
        return url

    async def read(self, path: str) -> bytes:
        try:
            return await asyncio.to_thread(self._read, Path(self.workspace, path))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SandboxError(f"{path} cannot be read from the sandbox: {error}") from None

    async def write(self, path: str, content: bytes, *, executable: bool = False) -> None:
        try:
            await asyncio.to_thread(self._write, Path(self.workspace, path), content, executable)
        except OSError as error:
            raise SandboxError(f"{path} cannot be written to the sandbox: {error}") from None

    async def stop(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(folder.remove)

    @staticmethod
    def _read(path: Path) -> bytes:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not in the sandbox")
        return read_bounded(path, MAX_FILE_BYTES)

    @staticmethod
    def _write(path: Path, content: bytes, executable: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a pipe that a program left would wait for a reader
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags, 0o666), "wb") as file:
            file.write(content)
        if executable:
            path.chmod(0o755)
