"""Sandboxes that are instances of Apptainer, for machines on which users may not run containers otherwise."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence

from raylight.sandboxes.sandbox import ExecResult, SandboxLimits
from raylight.sandboxes.tool_sandbox import STOP_S, ToolSandbox, runner_id, runner_lives

WORKSPACE = "/workspace"
NAME_PREFIX = "raylight"


class ApptainerSandbox(ToolSandbox):
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

    NAME = TOOL = "apptainer"
    START_S = 600.0  # the first start of an image converts it
    MISSING_IMAGE = ("no such file", "could not open image", "manifest unknown", "unauthorized", "denied")
    ENV_PREFIX = "APPTAINERENV_"

    def __init__(self, image: str | None, limits: SandboxLimits, *, arguments: Sequence[str] = ()) -> None:
        super().__init__(image, limits, f"{NAME_PREFIX}-{runner_id('-')}-{secrets.token_hex(8)}")
        self.refuse_limits("file_mb", "network")
        self._arguments = list(arguments)

    async def _start_inside(self, folder: str) -> tuple[ExecResult, str]:
        return await self._tool(self._start_arguments(folder), self.START_S), WORKSPACE

    def _exec_arguments(
        self, program: Sequence[str], variables: Mapping[str, str], cwd: str
    ) -> Sequence[str]:
        # Apptainer does not let a variable of the machine set HOME
        home = ["env", f"HOME={variables['HOME']}"] if "HOME" in variables else []
        return ["exec", "--cleanenv", "--pwd", cwd, f"instance://{self._name}", *home, *program]

    def _stop_arguments(self) -> Sequence[str]:
        return ["instance", "stop", "--force", self._name]

    async def forward(self, url: str) -> str:
        return url

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
