"""Sandbox on a node of the Ray cluster, chosen by a label."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import urlsplit

from raylight.errors import ConfigError, SandboxError, SandboxUnavailableError, summarize_ray_error
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.relay import reach_of
from raylight.sandboxes.sandbox import ExecResult, Sandbox, SandboxLimits, SandboxProgram

STOP_S = 60.0
"""Time that the sandbox on the node has to stop before its actor is killed."""
KILLED = (-9, 137)
"""Exit statuses of a killed program; a shell or a container returns the second."""


class NodeSandbox:
    """Actor that holds the sandbox on the node."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._sandbox: Sandbox = spec.create()

    async def address(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    async def start(self) -> tuple[str, str]:
        """Start the sandbox; return its workspace and its root."""
        await self._sandbox.start()
        return self._sandbox.workspace, self._sandbox.root

    async def call(self, method: str, *args: object, **options: object) -> Any:
        return await getattr(self._sandbox, method)(*args, **options)


class RaySandbox(Sandbox):
    """Another sandbox, held by an actor on a node with a label: `ray:LABEL=VALUE`.

    A node gets labels from `ray start --labels="LABEL=VALUE"`. VALUE may also be `!VALUE` or `in(A,B)`, as in
    Ray's label selectors. The actor ends with `stop`, and with the runner that made it. Images of tasks are
    not used: an image is part of `inner`.

    Args:
        image: the label and its value.
        limits: limits of the inner sandbox.
        inner: sandbox on the node, such as "bubblewrap" or "podman:python:3.12".
        num_cpus: CPUs that each sandbox takes of its node.
        start_s: seconds within which a node must take the sandbox, including an autoscaler's.

    Raises:
        ConfigError: the label or the inner sandbox is invalid.
        SandboxError: this process has no connection to a cluster.
        SandboxUnavailableError: no node took the sandbox, or the node or the actor died.
    """

    HAS_IMAGE = False

    def __init__(
        self,
        image: str | None,
        limits: SandboxLimits,
        *,
        inner: str = "process",
        num_cpus: float = 0.1,
        start_s: float = 120.0,
    ) -> None:
        label, separator, value = (image or "").partition("=")
        if not (label and separator and value):
            raise ConfigError(
                f'the sandbox "ray" needs a label of nodes, not {image!r}; give "ray:LABEL=VALUE"'
            )
        backend, _, inner_image = inner.partition(":")
        self._spec = SandboxSpec(backend, inner_image or None, limits)
        self._spec.create()  # which checks it
        self._selector = {label: value}
        self._num_cpus, self._start_s = num_cpus, start_s
        self._actor: Any = None
        self._address = ""
        self._paths: tuple[str, str] | None = None

    @property
    def workspace(self) -> str:
        return self._started_paths()[0]

    @property
    def root(self) -> str:
        return self._started_paths()[1]

    async def start(self) -> None:
        import ray

        if self._actor is not None:
            return
        if not ray.is_initialized():
            raise SandboxError(
                'the sandbox "ray" needs a Ray cluster, to which this process has no connection; use it in '
                "a run of the Trainer, or call ray.init()"
            )
        options = {"num_cpus": self._num_cpus, "label_selector": self._selector}
        try:
            self._actor = ray.remote(NodeSandbox).options(**options).remote(self._spec)
        except ValueError as error:
            raise ConfigError(f'the label of the sandbox "ray" is invalid: {error}') from None
        try:
            async with asyncio.timeout(self._start_s):
                self._address = await self._await(self._actor.address.remote())
        except TimeoutError:
            await self.stop()
            (label, value), *_ = self._selector.items()
            raise SandboxUnavailableError(
                f"no node with the label {label}={value} and {self._num_cpus:g} free CPUs took one within "
                f'{self._start_s:g} s; start nodes by `ray start --labels="{label}={value}"`'
            ) from None
        self._paths = await self._await(self._actor.start.remote())

    async def run(self, program: SandboxProgram) -> ExecResult:
        options = {"env": dict(program.env), "cwd": program.cwd, "stdin": program.stdin}
        result = await self._call("exec", list(program.command), **options, timeout_s=program.timeout_s)
        if result.status in KILLED:  # perhaps by the end of the actor, which kills what it has started
            await self._await(self._actor.address.remote())
        return result

    async def read(self, path: str) -> bytes:
        return await self._call("read", path)

    async def write(self, path: str, content: bytes, *, executable: bool = False) -> None:
        await self._call("write", path, content, executable=executable)

    async def forward(self, url: str) -> str:
        import ray

        if reach_of(url) == "machine" and self._address != ray.util.get_node_ip_address():
            raise SandboxError(
                f"the sandbox on the node {self._address} cannot reach {urlsplit(url).netloc}, which is a "
                "loopback address of another machine; set engine.host to an address that all nodes reach"
            )
        return await self._call("forward", url)

    async def stop(self) -> None:
        import ray
        from ray.exceptions import RayError

        actor, self._actor, self._paths = self._actor, None, None
        if actor is None:
            return
        try:
            if self._address:  # else no node has taken the actor, and a call would wait for one
                with contextlib.suppress(RayError, TimeoutError):  # what a dead actor held has ended with it
                    async with asyncio.timeout(STOP_S):
                        await actor.call.remote("stop")
        finally:
            self._address = ""
            ray.kill(actor)

    def _started_paths(self) -> tuple[str, str]:
        if self._paths is None:
            raise SandboxError("the sandbox has no workspace, because it is not started; call start() first")
        return self._paths

    async def _call(self, method: str, *args: object, **options: object) -> Any:
        self._started_paths()
        return await self._await(self._actor.call.remote(method, *args, **options))

    async def _await(self, reference: Any) -> Any:
        """Wait for a call. If this is cancelled, so is the call, and its end is waited for.

        Raises:
            SandboxUnavailableError: the actor or its node died. Otherwise the error of the call.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        result = asyncio.ensure_future(reference.as_future())
        try:
            await asyncio.wait([result])
            return result.result()
        except asyncio.CancelledError:
            ray.cancel(reference)
            if self._paths is not None:  # else it may wait for a node
                await asyncio.wait([result], timeout=STOP_S)
            raise
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise SandboxUnavailableError(
                f"the sandbox on a node of the cluster is lost: {summarize_ray_error(error)}"
            ) from None
