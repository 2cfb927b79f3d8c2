"""Sandbox by bubblewrap: the machine's programs, read-only, in separate namespaces."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Sequence

from raylight.errors import ConfigError, SandboxError
from raylight.sandboxes.exec_sandbox import ExecSandbox
from raylight.sandboxes.process import check_size, make_folder, run_here
from raylight.sandboxes.relay import (
    INSIDE_PORT,
    RELAY_FOLDER,
    RELAYING,
    UnixRelay,
    address_of,
    start_relay,
    with_address,
)
from raylight.sandboxes.sandbox import ExecResult, SandboxLimits, SandboxProgram

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = (
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/group",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/resolv.conf",
    "/etc/ssl",
)
"""Paths of the machine that programs inside may read."""
WORKSPACE = "/workspace"
MOUNTED = ("/etc", "/run", "/dev", "/proc")
"""Folders that bubblewrap makes for each program."""
FIRST_USER = 200_000
"""First of the user ids that a runner of the user root gives to sandboxes, so that none is root outside."""


class BubblewrapSandbox(ExecSandbox):
    """Programs of this machine with a separate file system, process list and, if asked, network.

    The root folder is a temporary one with the machine's /usr, /lib and a few files of /etc, all read-only.
    Everything that a program starts ends with it. A limit of memory holds for each process, one of files for
    each process and, when a program has ended, for the root folder.

    Args:
        readable: further folders of the machine that can be read, such as Node.js's. If the runner is
            root, every user must be able to read them.

    Raises:
        ConfigError: bubblewrap is given an image.
        SandboxError: bwrap is not installed, or the machine does not allow user namespaces.
    """

    NAME = "bubblewrap"
    HAS_IMAGE = False

    def __init__(self, image: str | None, limits: SandboxLimits, *, readable: Sequence[str] = ()) -> None:
        super().__init__(image, limits)
        if image is not None:
            raise ConfigError(f'the sandbox "bubblewrap" has no images; leave {image!r} out')
        self._readable = list(readable)
        self._relay: UnixRelay | None = None
        self._user = FIRST_USER + secrets.randbelow(2**16)

    async def start(self) -> None:
        if self._folder is not None:
            return
        self._folder = await make_folder()
        await asyncio.to_thread(self._make_root, self._folder.path)
        self._workspace = WORKSPACE
        ended = await self.exec(["true"], cwd="/")
        if ended.status != 0:
            await self.stop()
            raise SandboxError(
                f"bubblewrap cannot make a sandbox on this machine: {ended.stderr.strip()[-400:]}; allow "
                "user namespaces (sysctl kernel.unprivileged_userns_clone), or use another sandbox"
            )

    async def run(self, program: SandboxProgram) -> ExecResult:
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
            "HOME": WORKSPACE,
            "LANG": "C.UTF-8",
        }
        relay = [] if self._relay is None else RELAYING
        inner = ["--chdir", self.path(program.cwd), "--", *relay, *self.limits.limited(program.command)]
        ended = await run_here(
            [*self._wrapper(), *inner],
            "bubblewrap",
            env=variables | dict(program.env),
            cwd="/",
            stdin=program.stdin,
            timeout_s=program.timeout_s,
        )
        await check_size(self._folder_path(), self.limits)
        return ended

    async def forward(self, url: str) -> str:
        if self.limits.network:
            return url
        address_of(url)
        if self._relay is None:
            folder = f"{self._folder_path()}/relay"
            await asyncio.to_thread(os.mkdir, folder)
            self._relay = await start_relay(folder, url)
        return with_address(url, "127.0.0.1", INSIDE_PORT)

    async def stop(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            await relay.stop()
        folder, self._folder, self._workspace = self._folder, None, None
        if folder is not None:
            await asyncio.to_thread(folder.remove)

    def _make_root(self, folder: str) -> None:
        for path in (WORKSPACE, "/tmp"):
            os.makedirs(f"{folder}/root{path}")
        if os.geteuid() == 0:
            for parent, folders, _ in os.walk(folder):
                for name in folders:
                    os.chown(os.path.join(parent, name), self._user, self._user)
            os.chmod(folder, 0o711)

    def _restore_system(self, root: str) -> None:
        """Remove what programs, which own the root folder, put where the system's folders are mounted.

        Else a /bin or a /lib64 of an agent would have the shell or the loader of the programs after it.
        """
        for path in (*SYSTEM_FOLDERS, *MOUNTED):
            place, target = f"{root}{path}", os.readlink(path) if os.path.islink(path) else None
            if not os.path.lexists(place):
                continue
            found = os.readlink(place) if os.path.islink(place) else None
            if found != target or (found is None and not os.path.isdir(place)):
                if os.path.isdir(place) and found is None:
                    shutil.rmtree(place)
                else:
                    os.unlink(place)

    def _wrapper(self) -> list[str]:
        """Return the command that makes the namespaces."""
        root = f"{self._folder_path()}/root"
        self._restore_system(root)
        binds = ["--bind", root, "/"]
        for path in SYSTEM_FOLDERS:
            if os.path.islink(path):
                if not os.path.lexists(f"{root}{path}"):
                    binds += ["--symlink", os.readlink(path), path]
            else:
                binds += ["--ro-bind-try", path, path]
        binds += ["--tmpfs", "/etc", "--tmpfs", "/run"]
        for path in (*SYSTEM_FILES, *self._readable):
            binds += ["--ro-bind-try", path, path]
        if self._relay is not None:
            binds += ["--ro-bind", f"{self._folder_path()}/relay", RELAY_FOLDER]
        binds += ["--remount-ro", "/etc", "--remount-ro", "/run"]
        arguments = [
            *self._as_user(),
            "bwrap",
            "--die-with-parent",
            "--new-session",
            "--unshare-user",
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            *([] if self.limits.network else ["--unshare-net"]),
            *binds,
            "--dev",
            "/dev",
            "--proc",
            "/proc",
        ]
        return arguments

    def _as_user(self) -> list[str]:
        """Return the command by which a runner of the user root becomes one who owns nothing else."""
        if os.geteuid() != 0:
            return []
        if shutil.which("setpriv") is None:
            raise SandboxError(
                "bubblewrap as root needs setpriv (of util-linux), so that programs inside are not root; "
                "install it on every machine with runners, or run raylight as another user"
            )
        return ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--clear-groups", "--"]
