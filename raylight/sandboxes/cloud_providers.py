"""Sandboxes of Modal, Daytona, E2B and Kubernetes, each over the provider's own Python package.

They follow modal 1.6, daytona 0.226, e2b 2.63 and k8s-agent-sandbox 1.0. They are tested against fakes with
the signatures of these packages, and not against the services.
"""

from __future__ import annotations

import base64
import math
from typing import Any

from raylight.errors import ConfigError
from raylight.sandboxes.cloud import CALL_S, START_S, CloudSandbox
from raylight.sandboxes.sandbox import SandboxLimits

UPLOAD_PART = 48 * 1024
"""Bytes of a file in one call; as base64 in a command line, which Linux limits to 128 KiB."""


class ModalSandbox(CloudSandbox):
    """Sandbox of Modal from an image of a registry: `modal:python:3.12`.

    Args:
        arguments: further arguments of `modal.Sandbox.create`, such as `{"gpu": "T4"}`.
    """

    NAME = PACKAGE = "modal"
    INSTALL = "modal>=1.6"
    REJECTIONS = frozenset(
        {"AuthError", "InvalidError", "NotFoundError", "PermissionDeniedError", "ImageBuildError"}
    )
    APP = "raylight"
    """Modal's app to which the sandboxes belong."""

    async def create(self) -> None:
        modal = self.package()
        app = await modal.App.lookup.aio(self.APP, create_if_missing=True)
        memory = self.limits.memory_mb
        self._sandbox = await modal.Sandbox.create.aio(
            "sleep",
            "infinity",
            app=app,
            image=modal.Image.from_registry(self.image),
            timeout=self.lifetime_s,
            **({} if memory is None else {"memory": (memory, memory)}),
            **self.arguments,
        )

    async def shell(self, script: str) -> str:
        process = await self._sandbox.exec.aio("sh", "-c", script, timeout=CALL_S)
        output = await process.stdout.read.aio()
        await process.wait.aio()
        return output

    async def upload(self, path: str, content: bytes) -> None:
        await self._sandbox.filesystem.write_bytes.aio(content, path)

    async def delete(self) -> None:
        await self._sandbox.terminate.aio()


class DaytonaSandbox(CloudSandbox):
    """Sandbox of Daytona from an image of a registry: `daytona:python:3.12`. Memory is rounded up to GiB.

    Args:
        arguments: further arguments of `daytona.CreateSandboxFromImageParams`.
    """

    NAME = PACKAGE = "daytona"
    INSTALL = "daytona>=0.226"
    REJECTIONS = frozenset(
        {
            "DaytonaAuthenticationError",
            "DaytonaForbiddenError",
            "DaytonaNotFoundError",
            "DaytonaBadRequestError",
            "DaytonaUnprocessableEntityError",
        }
    )

    async def create(self) -> None:
        daytona = self.package()
        memory = self.limits.memory_mb
        resources = None if memory is None else daytona.Resources(memory=math.ceil(memory / 1024))
        params = {
            "image": self.image,
            "resources": resources,
            "ttl_minutes": math.ceil(self.lifetime_s / 60),
            "auto_stop_interval": 0,  # a program that waits for the model is no event
            **self.arguments,
        }
        self._client = daytona.AsyncDaytona()
        self._sandbox = await self._client.create(
            daytona.CreateSandboxFromImageParams(**params), timeout=START_S
        )

    async def shell(self, script: str) -> str:
        return (await self._sandbox.process.exec(script, timeout=CALL_S)).result

    async def upload(self, path: str, content: bytes) -> None:
        await self._sandbox.fs.upload_file(content, path)

    async def delete(self) -> None:
        await self._client.delete(self._sandbox)


class E2BSandbox(CloudSandbox):
    """Sandbox of E2B from a template: `e2b:base`. The template has the limits.

    Args:
        arguments: further arguments of `e2b.AsyncSandbox.create`.
    """

    NAME = PACKAGE = "e2b"
    INSTALL = "e2b>=2.63"
    REJECTIONS = frozenset({"AuthenticationException", "InvalidArgumentException", "TemplateException"})
    REFUSED = ("memory_mb", "processes", "file_mb", "network")

    async def create(self) -> None:
        create = self.package().AsyncSandbox.create
        self._sandbox = await create(self.image, timeout=self.lifetime_s, **self.arguments)

    async def shell(self, script: str) -> str:
        return (await self._sandbox.commands.run(script, timeout=CALL_S)).stdout

    async def upload(self, path: str, content: bytes) -> None:
        await self._sandbox.files.write(path, content)

    async def delete(self) -> None:
        await self._sandbox.kill()


class KubernetesSandbox(CloudSandbox):
    """Sandbox of Kubernetes' agent-sandbox from a warm pool: `kubernetes:POOL`. Its template has the limits.

    Its pods reach private addresses of the cluster's network.

    Args:
        router_url: address of agent-sandbox's router. None: runners run in the cluster.
        namespace: Kubernetes' namespace of the sandboxes.
        arguments: further arguments of `AsyncSandboxClient.create_sandbox`.
    """

    NAME = "kubernetes"
    PACKAGE = "k8s_agent_sandbox.async_sandbox_client"
    INSTALL = "k8s-agent-sandbox[async]>=1.0.8"
    REJECTIONS = frozenset(
        {
            "SandboxTemplateNotFoundError",
            "SandboxWarmPoolNotFoundError",
            "SandboxClaimFailedError",
            "ValueError",
        }
    )
    REFUSED = E2BSandbox.REFUSED
    REACHES = ("network", "internet")

    def __init__(
        self,
        image: str | None,
        limits: SandboxLimits,
        *,
        router_url: str | None = None,
        namespace: str = "default",
        **options: Any,
    ) -> None:
        super().__init__(image, limits, **options)
        if "warmpool" in self.arguments:
            raise ConfigError(
                'the warm pool of the sandbox "kubernetes" is its image; give "kubernetes:POOL"'
            )
        self._router_url, self._namespace = router_url, namespace

    async def create(self) -> None:
        models = self.package("k8s_agent_sandbox.models")
        connection = (
            models.SandboxInClusterConnectionConfig()
            if self._router_url is None
            else models.SandboxDirectConnectionConfig(api_url=self._router_url)
        )
        self._client = self.package().AsyncSandboxClient(connection_config=connection)
        self._sandbox = await self._client.create_sandbox(
            self.image,
            namespace=self._namespace,
            sandbox_ready_timeout=int(START_S),
            shutdown_after_seconds=self.lifetime_s,
            **self.arguments,
        )

    async def shell(self, script: str) -> str:
        return (await self._sandbox.commands.run(script, timeout=CALL_S)).stdout

    async def upload(self, path: str, content: bytes) -> None:
        # the package's own upload is confined to the folder of the sandbox's server
        append = 'printf %s "$1" | base64 -d >> "$2"'
        for at in range(0, max(1, len(content)), UPLOAD_PART):
            part = base64.b64encode(content[at : at + UPLOAD_PART]).decode()
            await self.run_script(append, part, path)

    async def delete(self) -> None:
        await self._client.delete_sandbox(self._sandbox.claim_name, namespace=self._namespace)
