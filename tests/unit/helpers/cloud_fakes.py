"""Fakes of the packages of cloud providers: the same names and arguments, but programs run on this machine.

A class or function here has only the parameters that raylight uses. `compared_callables` lists them for a
test that compares them with the installed package.
"""

from __future__ import annotations

import asyncio
import functools
import subprocess
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class FakeCloud:
    """A provider: what it was asked for, and what it fails with."""

    folder: Path
    """Working directory of programs."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)
    """Errors by the name of the call that they end."""

    def record(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name in self.failures:
            raise self.failures[name]

    async def run(self, command: str | list[str]) -> str:
        """Run a command line of a shell, or a program, and return its standard output."""
        arguments = ["sh", "-c", command] if isinstance(command, str) else command
        return await asyncio.to_thread(self._run, arguments)

    def _run(self, arguments: list[str]) -> str:
        return subprocess.run(arguments, cwd=self.folder, capture_output=True, text=True, check=False).stdout

    def names(self) -> list[str]:
        return [name for name, _ in self.calls if name != "run"]


def write(path: str, content: bytes) -> None:
    """Write a file."""
    Path(path).write_bytes(content)


class WithAio:
    """A method that is awaited as `method.aio(...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: Any) -> Any:
        bound = self.function if instance is None else functools.partial(self.function, instance)
        return types.SimpleNamespace(aio=bound)


class InvalidError(Exception):
    """Fake of modal.exception.InvalidError."""


def fake_modal(cloud: FakeCloud) -> dict[str, Any]:
    class Reader:
        def __init__(self, text: str) -> None:
            self.text = text

        async def _read(self) -> str:
            return self.text

        read = WithAio(_read)

    class ContainerProcess:
        def __init__(self, text: str) -> None:
            self.stdout = Reader(text)

        async def _wait(self) -> int:
            return 0

        wait = WithAio(_wait)

    class SandboxFilesystem:
        async def _write_bytes(self, data: bytes, remote_path: str) -> None:
            write(remote_path, data)

        write_bytes = WithAio(_write_bytes)

    class Sandbox:
        filesystem = SandboxFilesystem()

        @staticmethod
        async def _create(
            *args: str,
            app: Any = None,
            image: Any = None,
            timeout: int | None = 300,
            gpu: str | None = None,
            memory: Any = None,
        ) -> Sandbox:
            cloud.record("create", args=args, app=app, image=image, timeout=timeout, gpu=gpu, memory=memory)
            return Sandbox()

        create = WithAio(_create)

        async def _exec(self, *args: str, timeout: int | None = None) -> ContainerProcess:
            cloud.record("run", timeout=timeout)
            return ContainerProcess(await cloud.run(list(args)))

        exec = WithAio(_exec)

        async def _terminate(self) -> None:
            cloud.record("delete")

        terminate = WithAio(_terminate)

    class App:
        async def _lookup(name: str, *, create_if_missing: bool = False) -> str:
            return f"app {name} {create_if_missing}"

        lookup = WithAio(_lookup)

    class Image:
        @staticmethod
        def from_registry(tag: str) -> str:
            return f"image {tag}"

    return {"modal": types.SimpleNamespace(Sandbox=Sandbox, App=App, Image=Image)}


class DaytonaAuthenticationError(Exception):
    """Fake of daytona.DaytonaAuthenticationError."""


def fake_daytona(cloud: FakeCloud) -> dict[str, Any]:
    @dataclass
    class Resources:
        memory: int | None = None

    @dataclass
    class CreateSandboxFromImageParams:
        image: str
        resources: Resources | None = None
        ttl_minutes: int | None = None
        auto_stop_interval: int | None = None
        os_user: str | None = None

    class AsyncProcess:
        async def exec(self, command: str, timeout: int | None = None) -> Any:
            cloud.record("run", timeout=timeout)
            return types.SimpleNamespace(exit_code=0, result=await cloud.run(command))

    class AsyncFileSystem:
        async def upload_file(self, src: bytes, dst: str) -> None:
            write(dst, src)

    class AsyncSandbox:
        process, fs = AsyncProcess(), AsyncFileSystem()

    class AsyncDaytona:
        async def create(self, params: Any = None, *, timeout: float = 60) -> AsyncSandbox:
            cloud.record("create", params=params, timeout=timeout)
            return AsyncSandbox()

        async def delete(self, sandbox: AsyncSandbox) -> None:
            cloud.record("delete")

        async def close(self) -> None:
            cloud.record("close")

    parts = (Resources, CreateSandboxFromImageParams, AsyncDaytona, AsyncSandbox)
    return {"daytona": types.SimpleNamespace(**{part.__name__: part for part in parts})}


class AuthenticationException(Exception):
    """Fake of e2b.AuthenticationException."""


def fake_e2b(cloud: FakeCloud) -> dict[str, Any]:
    class Commands:
        async def run(self, cmd: str, timeout: float | None = 60) -> Any:
            cloud.record("run", timeout=timeout)
            return types.SimpleNamespace(stdout=await cloud.run(cmd), stderr="", exit_code=0)

    class Filesystem:
        async def write(self, path: str, data: bytes) -> None:
            write(path, data)

    class AsyncSandbox:
        commands, files = Commands(), Filesystem()

        @classmethod
        async def create(
            cls,
            template: str | None = None,
            timeout: int | None = None,
            metadata: dict[str, str] | None = None,
        ) -> AsyncSandbox:
            cloud.record("create", template=template, timeout=timeout, metadata=metadata)
            return cls()

        async def kill(self) -> bool:
            cloud.record("delete")
            return True

    return {"e2b": types.SimpleNamespace(AsyncSandbox=AsyncSandbox)}


class SandboxWarmPoolNotFoundError(RuntimeError):
    """Fake of k8s_agent_sandbox.exceptions.SandboxWarmPoolNotFoundError."""


def fake_kubernetes(cloud: FakeCloud) -> dict[str, Any]:
    @dataclass
    class SandboxInClusterConnectionConfig:
        pass

    @dataclass
    class SandboxDirectConnectionConfig:
        api_url: str

    class AsyncCommandExecutor:
        async def run(self, command: str, timeout: int = 60) -> Any:
            cloud.record("run", timeout=timeout)
            assert len(command) < 128 * 1024
            return types.SimpleNamespace(stdout=await cloud.run(command), stderr="", exit_code=0)

    class AsyncSandbox:
        commands, claim_name = AsyncCommandExecutor(), "claim"

    class AsyncSandboxClient:
        def __init__(self, connection_config: Any = None) -> None:
            cloud.record("connect", connection_config=connection_config)

        async def create_sandbox(
            self,
            warmpool: str,
            namespace: str = "default",
            sandbox_ready_timeout: int = 180,
            *,
            shutdown_after_seconds: int | None = None,
            pod_labels: dict[str, str] | None = None,
        ) -> AsyncSandbox:
            cloud.record(
                "create",
                warmpool=warmpool,
                namespace=namespace,
                timeout=shutdown_after_seconds,
                pod_labels=pod_labels,
            )
            return AsyncSandbox()

        async def delete_sandbox(self, claim_name: str, namespace: str = "default") -> None:
            cloud.record("delete", claim_name=claim_name, namespace=namespace)

        async def close(self) -> None:
            cloud.record("close")

    models = types.SimpleNamespace(
        SandboxInClusterConnectionConfig=SandboxInClusterConnectionConfig,
        SandboxDirectConnectionConfig=SandboxDirectConnectionConfig,
    )
    client = types.SimpleNamespace(AsyncSandboxClient=AsyncSandboxClient, AsyncSandbox=AsyncSandbox)
    return {"k8s_agent_sandbox.async_sandbox_client": client, "k8s_agent_sandbox.models": models}


FAKES = {"modal": fake_modal, "daytona": fake_daytona, "e2b": fake_e2b, "kubernetes": fake_kubernetes}
REJECTIONS = {
    "modal": InvalidError("no such image"),
    "daytona": DaytonaAuthenticationError("no such image"),
    "e2b": AuthenticationException("no such image"),
    "kubernetes": SandboxWarmPoolNotFoundError("no such image"),
}
"""Errors of the packages that report a wrong request."""


def compared_callables(backend: str, cloud: FakeCloud) -> list[tuple[str, Any]]:
    """Return the dotted names of what raylight calls in a provider's package, and the fake of each."""
    fakes = FAKES[backend](cloud)
    if backend == "modal":
        modal = fakes["modal"]
        sandbox = modal.Sandbox
        return [
            ("modal.App.lookup.aio", modal.App.lookup.aio),
            ("modal.Image.from_registry", modal.Image.from_registry),
            ("modal.Sandbox.create.aio", sandbox.create.aio),
            ("modal.Sandbox.exec.aio", sandbox._exec),
            ("modal.Sandbox.terminate.aio", sandbox._terminate),
            (
                "modal.sandbox.sandbox.SandboxFilesystem.write_bytes.aio",
                type(sandbox.filesystem)._write_bytes,
            ),
        ]
    if backend == "daytona":
        daytona = fakes["daytona"]
        return [
            ("daytona.Resources", daytona.Resources),
            ("daytona.CreateSandboxFromImageParams", daytona.CreateSandboxFromImageParams),
            ("daytona.AsyncDaytona.create", daytona.AsyncDaytona.create),
            ("daytona.AsyncDaytona.delete", daytona.AsyncDaytona.delete),
            ("daytona.AsyncDaytona.close", daytona.AsyncDaytona.close),
            ("daytona._async.process.AsyncProcess.exec", type(daytona.AsyncSandbox.process).exec),
            (
                "daytona._async.filesystem.AsyncFileSystem.upload_file",
                type(daytona.AsyncSandbox.fs).upload_file,
            ),
        ]
    if backend == "e2b":
        sandbox = fakes["e2b"].AsyncSandbox
        return [
            ("e2b.AsyncSandbox.create", sandbox.create),
            ("e2b.AsyncSandbox.kill", sandbox.kill),
            ("e2b.sandbox_async.commands.command.Commands.run", type(sandbox.commands).run),
            ("e2b.sandbox_async.filesystem.filesystem.Filesystem.write", type(sandbox.files).write),
        ]
    client, models = fakes["k8s_agent_sandbox.async_sandbox_client"], fakes["k8s_agent_sandbox.models"]
    package = "k8s_agent_sandbox.async_sandbox_client.AsyncSandboxClient"
    return [
        (package, client.AsyncSandboxClient),
        (f"{package}.create_sandbox", client.AsyncSandboxClient.create_sandbox),
        (f"{package}.delete_sandbox", client.AsyncSandboxClient.delete_sandbox),
        (f"{package}.close", client.AsyncSandboxClient.close),
        (
            "k8s_agent_sandbox.commands.async_command_executor.AsyncCommandExecutor.run",
            type(client.AsyncSandbox.commands).run,
        ),
        (
            "k8s_agent_sandbox.models.SandboxInClusterConnectionConfig",
            models.SandboxInClusterConnectionConfig,
        ),
        ("k8s_agent_sandbox.models.SandboxDirectConnectionConfig", models.SandboxDirectConnectionConfig),
    ]
