"""Sandboxes that are instances of Apptainer, for machines on which users may not run containers otherwise."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from typing import ClassVar

import psutil

from raylight.errors import SandboxError, SandboxUnavailableError
from raylight.sandboxes.container import runner_lives
from raylight.sandboxes.exec_sandbox import ExecSandbox
from raylight.sandboxes.local_program import run_program
from raylight.sandboxes.process import inherited_environment, remove_folder
from raylight.sandboxes.remote_program import run_remote_program
from raylight.sandboxes.sandbox import ExecResult, SandboxLimits

WORKSPACE = "/workspace"
START_S, STOP_S = 600.0, 60.0
"""Time limits; the first start of an image converts it."""
NAME_PREFIX = "raylight"
MISSING_IMAGE = ("no such file", "could not open image", "manifest unknown", "unauthorized", "denied")
"""Parts of the messages of an image that is not there."""


class ApptainerSandbox(ExecSandbox):
    """An instance of Apptainer: `apptainer:python:3.12`, or `apptainer:/images/python.sif`.

    The image is read-only below a file system in memory; the workspace is a temporary folder of the machine.
    Processes and the folders /tmp and home are the instance's own, the network is the machine's. Programs
    run as the runner's user. The command lines follow Apptainer 1.3's manual; they are tested against a
    program that records them, because Apptainer is not among Debian's packages.

    Args:
        image: a file, a folder, a URI such as `docker://...`, or the name of an image of a registry.
        limits: memory and processes, for which Apptainer needs cgroups v2.
        arguments: further arguments of `instance start`, such as `["--nv"]`.

    Raises:
        ConfigError: there is no image, or a limit that cannot be enforced.
        SandboxError: the tool or the image is missing. SandboxUnavailableError: the tool failed otherwise.
    """

    NAME = "apptainer"
    removed_orphans: ClassVar[bool] = False
    """True when this process has stopped the instances without a runner."""

    def __init__(self, image: str | None, limits: SandboxLimits, *, arguments: Sequence[str] = ()) -> None:
        super().__init__(image, limits)
        self.require_image("python:3.12")
        self.refuse_limits("file_mb", "network")
        self._arguments = list(arguments)
        process = psutil.Process()
        self._name = f"{NAME_PREFIX}-{process.pid}-{process.create_time():.0f}-{secrets.token_hex(8)}"
        self._folder: str | None = None

    async def start(self) -> None:
        if self._folder is not None:
            return
        if not ApptainerSandbox.removed_orphans:
            ApptainerSandbox.removed_orphans = True
            await self.remove_orphans()
        self._folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="raylight-")
        ended = await self._tool(self._start_arguments(self._folder), START_S)
        if ended.status != 0:
            await self.stop()
            raise self._start_error(ended)
        self._workspace = WORKSPACE

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

        def wrap(program: Sequence[str], variables: Mapping[str, str]) -> list[str]:
            # Apptainer does not let a variable of the machine set HOME
            home = ["env", f"HOME={variables['HOME']}"] if "HOME" in variables else []
            place = ["--cleanenv", "--pwd", folder, f"instance://{self._name}"]
            return ["apptainer", "exec", *place, *home, *program]

        return await run_remote_program(
            wrap, command, env=env or {}, stdin=stdin, timeout_s=timeout_s, env_prefix="APPTAINERENV_"
        )

    async def forward(self, url: str) -> str:
        return url

    async def stop(self) -> None:
        folder, self._folder, self._workspace = self._folder, None, None
        if folder is None:
            return
        try:
            await self._tool(["instance", "stop", "--force", self._name], STOP_S)
        finally:
            await asyncio.to_thread(remove_folder, folder)

    async def remove_orphans(self) -> None:
        """Stop the instances whose runner has ended."""
        listed = await self._tool(["instance", "list", "--json"], STOP_S)
        if listed.status != 0 or not listed.stdout.strip():
            return
        for entry in json.loads(listed.stdout).get("instances") or []:
            parts = entry["instance"].split("-")
            if len(parts) == 4 and parts[0] == NAME_PREFIX and not runner_lives(parts[1], parts[2]):
                await self._tool(["instance", "stop", "--force", entry["instance"]], STOP_S)

    def _start_arguments(self, folder: str) -> list[str]:
        arguments = [
            "instance",
            "start",
            "--containall",
            "--writable-tmpfs",
            "--bind",
            f"{folder}:{WORKSPACE}",
        ]
        if self.limits.memory_mb is not None:
            arguments += ["--memory", f"{self.limits.memory_mb}M"]
        if self.limits.processes is not None:
            arguments += ["--pids-limit", str(self.limits.processes)]
        image = self.require_image("python:3.12")
        if "://" not in image and not image.endswith(".sif") and not os.path.exists(image):
            image = f"docker://{image}"
        return [*arguments, *self._arguments, image, self._name]

    def _start_error(self, ended: ExecResult) -> SandboxError:
        message = f"no answer within {START_S:g} s" if ended.timed_out else ended.stderr.strip()[-400:]
        if any(part in message.lower() for part in MISSING_IMAGE):
            return SandboxError(
                f"apptainer has no image {self.image} ({message}); pull or build it on every machine"
            )
        return SandboxUnavailableError(f"apptainer cannot start an instance of {self.image}: {message}")

    async def _tool(self, arguments: Sequence[str], timeout_s: float) -> ExecResult:
        try:
            return await run_program(
                ["apptainer", *arguments],
                env=inherited_environment(),
                timeout_s=timeout_s,
                ends_children=False,  # the instance stays
            )
        except (OSError, ValueError) as error:
            raise SandboxError(
                f"apptainer cannot be started: {error}; install it on every machine with runners"
            ) from None
