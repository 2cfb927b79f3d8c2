"""The backends of sandboxes, the description of a sandbox, and the limit on those that exist at once."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import cast

from raylight.components import import_dotted_name
from raylight.errors import ConfigError
from raylight.sandboxes.sandbox import Sandbox, SandboxLimits
from raylight.types import JsonObject

BACKENDS = {
    "apptainer": "raylight.sandboxes.container.ApptainerSandbox",
    "bubblewrap": "raylight.sandboxes.bubblewrap.BubblewrapSandbox",
    "daytona": "raylight.sandboxes.cloud.DaytonaSandbox",
    "docker": "raylight.sandboxes.container.DockerSandbox",
    "e2b": "raylight.sandboxes.cloud.E2BSandbox",
    "kubernetes": "raylight.sandboxes.cloud.KubernetesSandbox",
    "modal": "raylight.sandboxes.cloud.ModalSandbox",
    "podman": "raylight.sandboxes.container.PodmanSandbox",
    "process": "raylight.sandboxes.process.ProcessSandbox",
    "ray": "raylight.sandboxes.ray_node.RaySandbox",
    "ssh": "raylight.sandboxes.ssh.SshSandbox",
}
"""Dotted name of the class of each backend. It is called with an image, or None, and the limits."""
MEMBERS = ("HAS_IMAGE", "workspace", "root", "start", "exec", "read", "write", "forward", "stop")
"""Parts of `Sandbox` that a backend's class must have."""


@dataclass(frozen=True)
class SandboxSpec:
    """Description of a sandbox, which travels to the runners."""

    backend: str = "process"
    """Name of a backend, or the dotted name of a class with the methods of `Sandbox`."""
    image: str | None = None
    """Start of the sandbox: an image, a template, a host."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Limits of the sandbox."""
    options: JsonObject = field(default_factory=dict)
    """Further keyword arguments of the backend's class."""

    @classmethod
    def parse(cls, value: SandboxSpec | str) -> SandboxSpec:
        """Read a description such as "process" or "podman:python:3.12".

        Raises:
            ConfigError: the backend is unknown, or lacks what it starts from.
        """
        if isinstance(value, str):
            backend, _, image = value.partition(":")
            value = cls(backend, image or None)
        if not isinstance(value, SandboxSpec):
            raise ConfigError(f"sandbox is {value!r:.80}; give a text such as 'process', or a SandboxSpec")
        if value.image is None and value.backend_class().HAS_IMAGE:
            value = replace(value, image="of the task")  # which a task may bring
            value.create()
            return replace(value, image=None)
        value.create()
        return value

    def backend_class(self) -> type[Sandbox]:
        """Return the class of the backend.

        Raises:
            ConfigError: it is unknown.
        """
        name = BACKENDS.get(self.backend, self.backend)
        if "." not in name:
            raise ConfigError(
                f"the sandbox {self.backend!r} is unknown; known are {', '.join(BACKENDS)}, and the "
                "dotted name of your class"
            )
        backend = import_dotted_name(name, "sandbox")
        missing = [part for part in MEMBERS if not hasattr(backend, part)]
        missing += getattr(backend, "__abstractmethods__", ())
        if missing:
            raise ConfigError(
                f"the sandbox {name} has no {', '.join(missing)}; see raylight.sandboxes.sandbox.Sandbox"
            )
        return cast(type[Sandbox], backend)

    def create(self) -> Sandbox:
        """Return a sandbox, which is not started.

        Raises:
            ConfigError: the backend is unknown, or cannot do what is described.
        """
        make = cast(Callable[..., Sandbox], self.backend_class())
        return make(self.image, self.limits, **self.options)


class SandboxPool:
    """Starts sandboxes, at most so many at once in this process, and stops every one of them.

    Those that wait are started in their order. A copy in another process has a separate limit.

    Args:
        max_sandboxes: sandboxes at once; None: no limit.

    Raises:
        ConfigError: the limit is not a positive number.
    """

    def __init__(self, max_sandboxes: int | None = None) -> None:
        if max_sandboxes is not None and (isinstance(max_sandboxes, bool) or max_sandboxes < 1):
            raise ConfigError(
                f"max_sandboxes is {max_sandboxes!r}; give a number from 1, or None for no limit"
            )
        self._max_sandboxes = max_sandboxes
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[object, ...]:
        return SandboxPool, (self._max_sandboxes,)

    @contextlib.asynccontextmanager
    async def started(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Yield a started sandbox, and stop it at the end: also one whose start failed or was cancelled.

        A further cancellation does not cut the stop short.

        Raises:
            SandboxUnavailableError, SandboxError: it cannot be started.
        """
        async with self._slot():
            sandbox = spec.create()
            try:
                await sandbox.start()
                yield sandbox
            finally:
                stopping = asyncio.ensure_future(sandbox.stop())
                try:
                    await asyncio.shield(stopping)
                except asyncio.CancelledError:
                    await asyncio.wait([stopping])
                    raise

    def _slot(self) -> contextlib.AbstractAsyncContextManager[None]:
        if self._max_sandboxes is None:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self._max_sandboxes)
        return self._slots[loop]
