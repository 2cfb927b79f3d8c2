"""Sandbox on another machine, by the OpenSSH client."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raylight.errors import SandboxError, SandboxUnavailableError
from raylight.sandboxes.exec_sandbox import ExecSandbox
from raylight.sandboxes.process import make_folder, run_here
from raylight.sandboxes.relay import address_of, with_address
from raylight.sandboxes.remote_program import MARK_VARIABLE, run_remote_program
from raylight.sandboxes.sandbox import ExecResult, SandboxLimits, SandboxProgram

CONNECT_S, STOP_S = 30, 60.0
PERSIST_S = 600
"""Time for which the connection of a runner that was killed stays open."""
FAILED = 255
"""Exit status of ssh for its own failures; a program may have it too."""


class SshSandbox(ExecSandbox):
    """A temporary folder on another machine, with that machine's programs: `"ssh:user@host"`.

    Keys, ports and jump hosts come from ~/.ssh/config; nothing is asked. Programs reach the model through the
    connection. Processes that a program leaves behind end with it, if that machine has /proc. A limit of
    memory or files holds for each process. The folder of a runner that was killed stays there.

    Args:
        arguments: further arguments of ssh, such as `["-p", "2222"]`.

    Raises:
        ConfigError: the host is missing, or a limit cannot be enforced.
        SandboxUnavailableError: the machine does not answer, or the connection was lost.
    """

    NAME = "ssh"
    HAS_IMAGE = False

    def __init__(self, image: str | None, limits: SandboxLimits, *, arguments: Sequence[str] = ()) -> None:
        super().__init__(image, limits)
        self._host = self.require_image("user@host")
        self.refuse_limits("processes", "network")
        self._arguments = list(arguments)
        self._forwarded: dict[tuple[str, int], int] = {}

    @property
    def root(self) -> str:
        return self.workspace

    async def start(self) -> None:
        if self._folder is not None:
            return
        self._folder = await make_folder()
        # the connection stays in the background for the programs that follow
        ended = await self._ssh(
            ["-oControlMaster=auto", f"-oControlPersist={PERSIST_S}"],
            "mktemp -d -t raylight-XXXXXXXX",
            timeout_s=2 * CONNECT_S,
            ends_children=False,
        )
        if ended.status != 0 or not ended.stdout.strip():
            await self.stop()
            reason = f"no answer within {2 * CONNECT_S} s" if ended.timed_out else ended.stderr.strip()[-400:]
            raise SandboxUnavailableError(f"no sandbox can be made on {self._host} by ssh: {reason}")
        self._workspace = ended.stdout.strip().splitlines()[-1]

    async def run(self, program: SandboxProgram) -> ExecResult:
        folder = self.path(program.cwd)
        variables = await self._send_variables(program.env)

        def wrap(command: Sequence[str], given: Mapping[str, str]) -> list[str]:
            settings = [
                f"cd {shlex.quote(folder)}",
                *self.limits.shell_commands(),
                *([variables] if given else []),
            ]
            if mark := given.get(MARK_VARIABLE):
                settings.append(f"export {MARK_VARIABLE}={mark}")
            script = f"{' && '.join(settings)} && exec {shlex.join(command)}"
            return self._command([], f"exec sh -c {shlex.quote(script)}")

        ended = await run_remote_program(wrap, replace(program, env={}), ends_children=True)
        if ended.status == FAILED and (await self._ssh(["-O", "check"], None)).status != 0:
            raise SandboxUnavailableError(
                f"the connection to {self._host} was lost: {ended.stderr.strip()[-400:]}"
            )
        return ended

    async def forward(self, url: str) -> str:
        address = address_of(url)
        if address not in self._forwarded:
            ended = await self._ssh(["-O", "forward", "-R", f"127.0.0.1:0:{address[0]}:{address[1]}"], None)
            if ended.status != 0 or not ended.stdout.strip().isdigit():
                raise SandboxError(
                    f"{self._host} does not forward a port to the model: {ended.stderr.strip()[-400:]}; set "
                    "AllowTcpForwarding of its sshd"
                )
            self._forwarded[address] = int(ended.stdout)
        return with_address(url, "127.0.0.1", self._forwarded[address])

    async def stop(self) -> None:
        folder, workspace = self._folder, self._workspace
        self._folder = self._workspace = None
        if folder is None:
            return
        self._folder = folder  # for the last commands
        try:
            if workspace is not None:
                remove = f"chmod -R u+rwx {shlex.quote(workspace)}; rm -rf {shlex.quote(workspace)}"
                await self._ssh([], remove)
            await self._ssh(["-O", "exit"], None)
        finally:
            self._folder = None
            await asyncio.to_thread(folder.remove)

    async def _send_variables(self, variables: Mapping[str, str]) -> str:
        """Write variables to a file there, and return the script that reads and removes it.

        Arguments can be read by all users of both machines, and sshd accepts no variables by default.
        """
        if not variables:
            return "true"
        path = shlex.quote(f"{self.workspace}/.{secrets.token_hex(8)}")
        lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        ended = await self._ssh([], f"umask 077 && cat > {path}", stdin=lines.encode())
        if ended.status != 0:
            raise SandboxUnavailableError(
                f"{self._host} does not take a program's variables: {ended.stderr.strip()[-400:]}"
            )
        return f". {path} && rm {path}"

    def _command(self, arguments: Sequence[str], remote: str | None) -> list[str]:
        fixed = ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT_S}", f"-S{self._folder_path()}/connection"]
        return ["ssh", *fixed, *self._arguments, *arguments, self._host, *([remote] if remote else [])]

    async def _ssh(self, arguments: Sequence[str], remote: str | None, **options: Any) -> ExecResult:
        return await run_here(self._command(arguments, remote), **{"timeout_s": STOP_S} | options)
