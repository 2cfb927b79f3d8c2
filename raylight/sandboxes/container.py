"""Sandboxes that are containers of podman or docker, by their command lines."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from raylight.errors import SandboxError
from raylight.sandboxes import relay_inside
from raylight.sandboxes.local_program import run_program
from raylight.sandboxes.process import inherited_environment
from raylight.sandboxes.relay import INSIDE_PORT, UnixRelay, address_of, with_address
from raylight.sandboxes.sandbox import ExecResult, SandboxLimits
from raylight.sandboxes.tool_sandbox import STOP_S, ToolSandbox, runner_id, runner_lives

LABEL = "raylight.runner"
"""Label of a container: the machine and process that made it, so that one without its runner is removed."""
RELAY_FOLDER = "/run/raylight"
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
        ConfigError: there is no image, or a limit that cannot be enforced.
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
        names = [part for name in variables for part in ("--env", name)]  # the values are inherited
        return ["exec", "--interactive", "--workdir", cwd, *names, self._name, *program]

    def _stop_arguments(self) -> Sequence[str]:
        return ["rm", "--force", "--volumes", self._name]

    async def forward(self, url: str) -> str:
        if self.limits.network:
            host, port = address_of(url) if self._is_slirp() else ("", 0)
            return with_address(url, SLIRP_HOST, port) if host in ("127.0.0.1", "localhost") else url
        address_of(url)
        if self._relay is None:
            folder = self._folder_path()
            relay = UnixRelay(f"{folder}/relay.sock", url)
            await relay.start()
            self._relay = relay
            await asyncio.to_thread(shutil.copy, relay_inside.__file__, f"{folder}/relay.py")
            program, path = f"{RELAY_FOLDER}/relay.py", f"{RELAY_FOLDER}/relay.sock"
            relaying = ["python3", "-I", program, path, str(INSIDE_PORT), "true"]
            ended = await self.exec(relaying, cwd="/", timeout_s=START_S)
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
            try:
                ended = await run_program(command, env=inherited_environment(), timeout_s=timeout_s)
            except OSError as error:
                raise SandboxError(
                    f"{cls.TOOL} cannot be started: {error}; install it on every machine"
                ) from None
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
    """Container of podman, in a network of its own by slirp4netns where that is installed."""

    NAME = TOOL = "podman"

    def _default_network(self) -> str:
        return "slirp4netns:allow_host_loopback=true" if shutil.which("slirp4netns") else "host"


class DockerSandbox(ContainerSandbox):
    """Container of docker, in the machine's network."""

    NAME = TOOL = "docker"
