"""Base of the sandboxes that a command-line tool of this machine starts and enters: containers, instances."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import psutil

from raylight.errors import SandboxError, SandboxUnavailableError
from raylight.sandboxes.exec_sandbox import ExecSandbox
from raylight.sandboxes.folders import SandboxFolder
from raylight.sandboxes.local_program import run_program
from raylight.sandboxes.process import inherited_environment, make_folder
from raylight.sandboxes.remote_program import run_remote_program
from raylight.sandboxes.sandbox import ExecResult, SandboxLimits

STOP_S = 60.0


class ToolSandbox(ExecSandbox):
    """A sandbox of a tool such as podman. It has a name of its own, and a folder of this machine.

    Attributes:
        TOOL: the tool's program.
        START_S: seconds that a start may take.
        MISSING_IMAGE: parts of the messages of an image that is not there.
        ENV_PREFIX: prefix of the variables by which the tool hands variables to programs inside.
    """

    TOOL: ClassVar[str]
    START_S: ClassVar[float]
    MISSING_IMAGE: ClassVar[tuple[str, ...]]
    ENV_PREFIX: ClassVar[str] = ""
    orphans_removed: ClassVar[set[str]] = set()
    """Tools whose sandboxes without a runner this process has removed."""

    def __init__(self, image: str | None, limits: SandboxLimits, name: str) -> None:
        super().__init__(image, limits)
        self.require_image("python:3.12")
        self._name = name
        self._folder: SandboxFolder | None = None

    @abstractmethod
    async def remove_orphans(self) -> None:
        """Remove the sandboxes of this tool whose runner on this machine has ended."""

    @abstractmethod
    async def _start_inside(self, folder: str) -> tuple[ExecResult, str]:
        """Start the sandbox with a folder of this machine; return the tool's answer and the workspace."""

    @abstractmethod
    def _exec_arguments(
        self, program: Sequence[str], variables: Mapping[str, str], cwd: str
    ) -> Sequence[str]:
        """Return the tool's arguments that run a program. They have no values of variables."""

    @abstractmethod
    def _stop_arguments(self) -> Sequence[str]:
        """Return the tool's arguments that end the sandbox."""

    async def start(self) -> None:
        if self._folder is not None:
            return
        if self.TOOL not in self.orphans_removed:
            self.orphans_removed.add(self.TOOL)
            await self.remove_orphans()
        self._folder = await make_folder()
        ended, workspace = await self._start_inside(self._folder.path)
        if ended.status != 0:
            await self.stop()
            raise self._start_error(ended)
        self._workspace = workspace

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        folder = self.path(cwd or "")
        return await run_remote_program(
            lambda program, variables: [self.TOOL, *self._exec_arguments(program, variables, folder)],
            command,
            env=env or {},
            stdin=stdin,
            timeout_s=timeout_s,
            env_prefix=self.ENV_PREFIX,
        )

    async def stop(self) -> None:
        folder, self._folder, self._workspace = self._folder, None, None
        if folder is None:
            return
        try:
            await self._tool(self._stop_arguments(), STOP_S)
        finally:
            await asyncio.to_thread(folder.remove)

    def _folder_path(self) -> str:
        if self._folder is None:
            raise SandboxError("the sandbox is not started; call start() first")
        return self._folder.path

    def _start_error(self, ended: ExecResult) -> SandboxError:
        message = f"no answer within {self.START_S:g} s" if ended.timed_out else ended.stderr.strip()[-400:]
        if any(part in message.lower() for part in self.MISSING_IMAGE):
            return SandboxError(
                f"{self.TOOL} has no image {self.image} ({message}); pull or build it on every machine"
            )
        return SandboxUnavailableError(f"{self.TOOL} cannot start {self.image}: {message}")

    async def _tool(self, arguments: Sequence[str], timeout_s: float) -> ExecResult:
        try:
            return await run_program(
                [self.TOOL, *arguments],
                env=inherited_environment(),
                timeout_s=timeout_s,
                ends_children=False,  # what was started stays, and so does a network's service
            )
        except (OSError, ValueError) as error:
            raise SandboxError(
                f"{self.TOOL} cannot be started: {error}; install it on every machine with runners"
            ) from None


def runner_id(separator: str) -> str:
    """Return the id of this process and its start, in seconds since that of the machine: a clock that is set
    moves all times of the day, `create_time` too."""
    return f"{os.getpid()}{separator}{_seconds_at_start(os.getpid())}"


def runner_lives(pid: str, start: str) -> bool:
    """Return True if a process of this machine with this `runner_id` is alive."""
    try:
        return abs(_seconds_at_start(int(pid)) - float(start)) < 2
    except (psutil.NoSuchProcess, ValueError):
        return False


def _seconds_at_start(pid: int) -> int:
    return round(psutil.Process(pid).create_time() - psutil.boot_time())
