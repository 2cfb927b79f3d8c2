"""Base of the sandboxes whose files are read and written by programs inside.

A file is never opened from outside, so a link that a program made cannot lead out of the sandbox.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
from typing import ClassVar

from raylight.errors import ConfigError, SandboxError
from raylight.sandboxes.folders import SandboxFolder
from raylight.sandboxes.sandbox import MAX_STDOUT, ExecResult, Sandbox, SandboxLimits

CHUNK = MAX_STDOUT // 2
"""Bytes of a file that are read at once; base64 makes them a third longer."""
NO_FILE = 44
"""Exit status of the reading script for a file that is not there."""
MAX_FILE_BYTES = 512 * 1024 * 1024
"""Largest file that is read, so that a program inside cannot fill the runner's memory."""
READ = f'test -f "$1" || exit {NO_FILE}; tail -c "+$2" -- "$1" | head -c {CHUNK} | base64'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1" && chmod "$2" -- "$1"'


class ExecSandbox(Sandbox):
    """Sandbox whose files are reached by its own programs: sh, cat, tail, head, base64, mkdir, chmod.

    Attributes:
        NAME: name of the backend, for messages.
    """

    NAME: ClassVar[str]
    HAS_IMAGE: ClassVar[bool] = True

    def __init__(self, image: str | None, limits: SandboxLimits) -> None:
        self.image = image
        self.limits = limits
        self._workspace: str | None = None
        self._folder: SandboxFolder | None = None
        """Folder of this machine that belongs to the sandbox."""

    @property
    def workspace(self) -> str:
        if self._workspace is None:
            raise SandboxError("the sandbox has no workspace, because it is not started; call start() first")
        return self._workspace

    @property
    def root(self) -> str:
        return ""

    async def read(self, path: str) -> bytes:
        content = bytearray()
        while True:
            ended = await self._script(READ, self.path(path), str(len(content) + 1))
            if ended.status == NO_FILE:
                raise FileNotFoundError(f"{path} is not in the sandbox")
            if ended.status != 0:
                raise self._failure(f"reading {path}", ended)
            try:
                part = base64.b64decode(ended.stdout)
            except binascii.Error as error:
                raise SandboxError(f"{path} cannot be read from the sandbox {self.NAME}: {error}") from None
            content += part
            if len(content) > MAX_FILE_BYTES:
                raise SandboxError(f"{path} in the sandbox is larger than {MAX_FILE_BYTES >> 20} MiB")
            if len(part) < CHUNK:
                return bytes(content)

    async def write(self, path: str, content: bytes, *, executable: bool = False) -> None:
        ended = await self._script(WRITE, self.path(path), "755" if executable else "644", stdin=content)
        if ended.status != 0:
            raise self._failure(f"writing {path}", ended)

    def path(self, path: str) -> str:
        return posixpath.join(self.workspace, path) if path else self.workspace

    def require_image(self, example: str) -> str:
        """Return what the sandbox starts from.

        Raises:
            ConfigError: there is none.
        """
        if not self.image:
            raise ConfigError(
                f'the sandbox {self.NAME!r} needs what it starts from; give "{self.NAME}:{example}"'
            )
        return self.image

    def refuse_limits(self, *names: str) -> None:
        """Refuse limits that the backend cannot enforce.

        Raises:
            ConfigError: one of them is set.
        """
        default = SandboxLimits()
        for name in names:
            if getattr(self.limits, name) != getattr(default, name):
                raise ConfigError(
                    f"the sandbox {self.NAME!r} cannot limit {name}; leave it out, or use another one"
                )

    async def _script(self, script: str, *arguments: str, stdin: bytes = b"") -> ExecResult:
        return await self.exec(["sh", "-c", script, "sh", *arguments], cwd="/", stdin=stdin)

    def _folder_path(self) -> str:
        if self._folder is None:
            raise SandboxError("the sandbox is not started; call start() first")
        return self._folder.path

    def _failure(self, action: str, ended: ExecResult) -> SandboxError:
        return SandboxError(
            f"{action} in the sandbox {self.NAME} ended with status {ended.status}: "
            f"{ended.stderr.strip()[-400:]}"
        )
