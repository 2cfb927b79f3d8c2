"""The protocol of a sandbox: start, exec, read, write, stop. One sandbox belongs to one attempt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

MAX_STDOUT = 4 * 1024 * 1024
MAX_STDERR = 64 * 1024
"""Bytes of a program's output that are kept: the last ones."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a sandbox. None: no limit, or the backend's default.

    A backend that cannot enforce a limit that was set raises ConfigError when the sandbox is described, not
    when it runs.
    """

    memory_mb: int | None = None
    """Memory of all processes together where the backend can count it, else of each process."""
    processes: int | None = None
    """Processes and threads at once."""
    file_mb: int | None = None
    """Size of the largest file. In `process` and `bubblewrap` also of the workspace after each program; a
    larger one fails the attempt."""
    network: bool = True
    """False: the sandbox reaches the model's endpoint and nothing else."""

    def limited(self, command: Sequence[str]) -> list[str]:
        """Return a command behind a shell that sets its limits."""
        settings = self.shell_commands()
        shell = ["/bin/sh", "-c", f'{" && ".join(settings)} && exec "$@"', "sh"] if settings else []
        return [*shell, *command]

    def shell_commands(self) -> list[str]:
        """Return the commands of a shell that limit memory, files and processes of the programs it starts."""
        commands = []
        if self.memory_mb is not None:
            commands.append(f"ulimit -v {self.memory_mb * 1024}")
        if self.file_mb is not None:
            commands.append(f"ulimit -f {self.file_mb * 2048}")  # blocks of 512 bytes
        if self.processes is not None:  # dash and bash differ in the letter
            commands.append(f"{{ ulimit -p {self.processes} 2>/dev/null || ulimit -u {self.processes}; }}")
        return commands


@dataclass(frozen=True)
class ExecResult:
    """Outcome of a program in a sandbox."""

    status: int
    """Exit status; negative: the signal that ended the program."""
    stdout: str = ""
    """The last 4 MiB of the standard output."""
    stderr: str = ""
    """The last 64 KiB of the standard error."""
    timed_out: bool = False
    """True if the program was ended because it ran longer than `timeout_s`."""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class SandboxProgram:
    """A program to run in a sandbox; see `Sandbox.exec`."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    stdin: bytes = b""
    timeout_s: float | None = None


class Sandbox(Protocol):
    """A place in which programs run, with a folder, the workspace.

    All methods are asynchronous and may be cancelled; a cancelled `exec` ends its program. A path is absolute
    or relative to the workspace. `stop` ends every process and removes the workspace; it may be called at any
    time, more than once, and after a failed `start`.

    Raises (all methods):
        SandboxUnavailableError: the backend failed for a reason that may pass; the attempt is retried.
        SandboxError: the backend cannot do this, and would not the next time.
    """

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace, as programs inside see it. Known after `start`."""

    @property
    def root(self) -> str:
        """Folder in which absolute paths of a task, such as /tests, are put.

        It is empty for a sandbox with a separate file system, and the workspace for one that shares the
        machine's.
        """

    HAS_IMAGE: ClassVar[bool]
    """True for a sandbox that starts from an image, False for one that has the machine's programs."""

    async def start(self) -> None:
        """Make the sandbox, with an empty workspace."""

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run a program to its end, one at a time.

        What it leaves behind ends with it, or with the sandbox if that has an image: a server that an agent
        started is there for its tests.

        Args:
            command: program and arguments. No shell reads them.
            env: variables in addition to the sandbox's.
            cwd: working directory; by default the workspace.
            stdin: its standard input, which is closed afterwards.
            timeout_s: seconds after which the program is ended (SIGTERM, after 3 s SIGKILL); the result
                says so. None: no limit.
        """
        return await self.run(SandboxProgram(command, env or {}, cwd or "", stdin, timeout_s))

    @abstractmethod
    async def run(self, program: SandboxProgram) -> ExecResult:
        """Run a program, as `exec` describes."""

    async def read(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: there is none.
        """

    async def write(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Write a file; missing folders are made."""

    async def forward(self, url: str) -> str:
        """Return the URL by which programs inside reach a URL of the runner, such as the model's endpoint."""

    async def stop(self) -> None:
        """End every process and remove the workspace."""
