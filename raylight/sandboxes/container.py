"""Sandboxes that a command-line tool starts and enters.

They are containers of podman or docker, or instances of Apptainer, for machines on which users may not run
containers otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import psutil

from raylight.errors import SandboxError, SandboxUnavailableError
from raylight.sandboxes.exec_sandbox import ExecSandbox
from raylight.sandboxes.process import make_folder, run_here
from raylight.sandboxes.relay import (
    INSIDE_PORT,
    RELAY_FOLDER,
    RELAYING,
    UnixRelay,
    address_of,
    start_relay,
    with_address,
)
from raylight.sandboxes.remote_program import READ_BY_TOOLS, run_remote_program
from raylight.sandboxes.sandbox import ExecResult, SandboxLimits, SandboxProgram

STOP_S = 60.0


class ToolSandbox(ExecSandbox):
    """A sandbox of a tool such as podman. It has a unique name, and a folder of this machine.

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
        """Return the tool's arguments that run a program, with values of `READ_BY_TOOLS` only."""

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

    async def run(self, program: SandboxProgram) -> ExecResult:
        folder = self.path(program.cwd)
        return await run_remote_program(
            lambda command, variables: [self.TOOL, *self._exec_arguments(command, variables, folder)],
            program,
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

    def _start_error(self, ended: ExecResult) -> SandboxError:
        message = f"no answer within {self.START_S:g} s" if ended.timed_out else ended.stderr.strip()[-400:]
        if any(part in message.lower() for part in self.MISSING_IMAGE):
            return SandboxError(
                f"{self.TOOL} has no image {self.image} ({message}); pull or build it on every machine"
            )
        return SandboxUnavailableError(f"{self.TOOL} cannot start {self.image}: {message}")

    async def _tool(self, arguments: Sequence[str], timeout_s: float) -> ExecResult:
        # what was started stays, and so does a network's service
        return await run_here([self.TOOL, *arguments], timeout_s=timeout_s, ends_children=False)


OLD_LABELS = 1e9
"""Starts above this are seconds since 1970, as version 0.3.0 wrote them."""


def runner_id(separator: str) -> str:
    """Return this process's id and its start in seconds since boot. Setting the machine's clock would move
    a wall-clock time such as psutil's `create_time`."""
    return f"{os.getpid()}{separator}{_seconds_at_start(os.getpid())}"


def runner_lives(pid: str, start: str) -> bool:
    """Return True if a process of this machine with this `runner_id` is alive."""
    try:
        if float(start) > OLD_LABELS:
            return abs(psutil.Process(int(pid)).create_time() - float(start)) < 2
        return abs(_seconds_at_start(int(pid)) - float(start)) < 2
    except (psutil.NoSuchProcess, ValueError):
        return False


def _seconds_at_start(pid: int) -> int:
    boot = psutil.boot_time()  # first: some releases of psutil compute the other from the last one read
    return round(psutil.Process(pid).create_time() - boot)


LABEL = "raylight.runner"
"""Label of a container: the machine and process that made it, so that one without its runner is removed."""
IDLE = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"
"""First program of a container. It reaps the processes that others leave behind."""
START_S, BUILD_S = 120.0, 3600.0
SLIRP_HOST = "10.0.2.2"
"""Address of the machine's loopback in a network of slirp4netns."""


class ContainerSandbox(ToolSandbox):
    """A container, which is removed with everything in it.

    Programs run as the image's user in the image's working directory, which is the workspace. What they leave
    behind ends with the container. Limits hold for the whole container.

    Args:
        image: image to start.
        limits: memory, processes and network. The size of files is not limited.
        network: network of the container in the tool's own words; by default one in which the machine's
            loopback can be reached.
        arguments: further arguments of `run`, such as `["--gpus=all"]`.

    Raises:
        ConfigError: the image is missing, or a limit cannot be enforced.
        SandboxError: the tool or the image is missing. SandboxUnavailableError: the tool failed otherwise.
    """

    START_S = START_S
    MISSING_IMAGE = (
        "no such image",
        "not known",
        "pull access denied",
        "manifest unknown",
        "unable to find image",
    )

    def __init__(
        self,
        image: str | None,
        limits: SandboxLimits,
        *,
        network: str | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(image, limits, f"raylight-{secrets.token_hex(8)}")
        self.refuse_limits("file_mb")
        self._network = network
        self._arguments = list(arguments)
        self._relay: UnixRelay | None = None

    async def _start_inside(self, folder: str) -> tuple[ExecResult, str]:
        ended = await self._tool(self._run_arguments(folder), START_S)
        if ended.status == 0:
            ended = await self._tool(["inspect", "--format", "{{.Config.WorkingDir}}", self._name], START_S)
        return ended, ended.stdout.strip() or "/"

    def _exec_arguments(
        self, program: Sequence[str], variables: Mapping[str, str], cwd: str
    ) -> Sequence[str]:
        given = [
            part
            for name, value in variables.items()  # other values are inherited
            for part in ("--env", f"{name}={value}" if READ_BY_TOOLS.fullmatch(name) else name)
        ]
        return ["exec", "--interactive", "--workdir", cwd, *given, self._name, *program]

    def _stop_arguments(self) -> Sequence[str]:
        return ["rm", "--force", "--volumes", self._name]

    async def forward(self, url: str) -> str:
        if self.limits.network:
            host, port = address_of(url) if self._is_slirp() else ("", 0)
            return with_address(url, SLIRP_HOST, port) if host in ("127.0.0.1", "localhost") else url
        address_of(url)
        if self._relay is None:
            self._relay = await start_relay(self._folder_path(), url)
            ended = await self.exec([*RELAYING, "true"], cwd="/", timeout_s=START_S)
            if ended.status != 0:
                raise SandboxError(
                    f"the image {self.image} cannot reach the model without a network, because it has no "
                    f"python3 for the relay ({ended.stderr.strip()[-200:]}); add it, or allow the network"
                )
        return with_address(url, "127.0.0.1", INSIDE_PORT)

    async def stop(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            await relay.stop()
        await super().stop()

    async def remove_orphans(self) -> None:
        """Remove the containers whose runner on this machine has ended."""
        form = f'{{{{.ID}}}} {{{{index .Config.Labels "{LABEL}"}}}}'
        listed = await self._tool(["ps", "--all", "--quiet", "--filter", f"label={LABEL}"], START_S)
        ids = listed.stdout.split()
        if listed.status != 0 or not ids:
            return
        labels = await self._tool(["inspect", "--format", form, *ids], START_S)
        orphans = [
            parts[0]
            for parts in map(str.split, labels.stdout.splitlines())
            if len(parts) == 4 and parts[1] == socket.gethostname() and not runner_lives(parts[2], parts[3])
        ]
        if orphans:
            await self._tool(["rm", "--force", "--volumes", *orphans], STOP_S)

    @classmethod
    async def build(cls, folder: Path, timeout_s: float = BUILD_S) -> str:
        """Build the image of a folder with a Dockerfile, and return its id. The tool keeps what it has built.

        Raises:
            SandboxError: the build failed.
        """
        with tempfile.NamedTemporaryFile(prefix="raylight-image-") as file:
            command = [cls.TOOL, "build", "--quiet", "--iidfile", file.name, os.fspath(folder)]
            ended = await run_here(command, timeout_s=timeout_s)
            image = await asyncio.to_thread(Path(file.name).read_text)
        if ended.status != 0 or not image:
            reason = (
                f"took longer than {timeout_s:g} s"
                if ended.timed_out
                else f"ended with status {ended.status}"
            )
            raise SandboxError(f"{cls.TOOL} build of {folder} {reason}: {ended.stderr.strip()[-400:]}")
        return image.strip()

    def _run_arguments(self, folder: str) -> list[str]:
        limits = self.limits
        label = f"{socket.gethostname()} {runner_id(' ')}"
        arguments = ["run", "--detach", "--name", self._name, "--label", f"{LABEL}={label}"]
        arguments += ["--volume", f"{folder}:{RELAY_FOLDER}:ro", "--entrypoint", "sh"]
        if limits.memory_mb is not None:
            arguments += ["--memory", f"{limits.memory_mb}m"]
        if limits.processes is not None:
            arguments += ["--pids-limit", str(limits.processes)]
        network = self._network if limits.network else "none"
        arguments += ["--network", network or self._default_network()]
        return [*arguments, *self._arguments, self.require_image("python:3.12"), "-c", IDLE]

    def _default_network(self) -> str:
        return "host"

    def _is_slirp(self) -> bool:
        return (self._network or self._default_network()).startswith("slirp4netns")


class PodmanSandbox(ContainerSandbox):
    """Container of podman, in a separate network by slirp4netns where that is installed."""

    NAME = TOOL = "podman"

    def _default_network(self) -> str:
        return "slirp4netns:allow_host_loopback=true" if shutil.which("slirp4netns") else "host"


class DockerSandbox(ContainerSandbox):
    """Container of docker, in the machine's network."""

    NAME = TOOL = "docker"


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
        ConfigError: the image is missing, or a limit cannot be enforced.
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
