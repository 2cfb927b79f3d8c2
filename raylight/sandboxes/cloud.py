"""Sandboxes of cloud providers, each over the provider's own Python package.

Every call of a provider's API is short: a program runs detached in the sandbox, its outputs go to files, and
calls wait for its end a few seconds each. So a program may run longer than any connection lasts.

They follow modal 1.6, daytona 0.226, e2b 2.63 and k8s-agent-sandbox 1.0. They are tested against fakes with
the signatures of these packages, and not against the services.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import math
import secrets
import shlex
import signal
import time
from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit, urlunsplit

from raylight.errors import ConfigError, SandboxError, SandboxUnavailableError
from raylight.sandboxes.exec_sandbox import ExecSandbox
from raylight.sandboxes.relay import reach_of
from raylight.sandboxes.remote_program import END_MARKED, MARK_VARIABLE, PAUSE
from raylight.sandboxes.sandbox import MAX_STDERR, MAX_STDOUT, ExecResult, SandboxLimits, SandboxProgram

T = TypeVar("T")
START_S = 600.0
CALL_S = 60
"""Time limit of one call."""
WAIT_S = 20.0
"""Time for which one call waits for the end of a program."""
RUN = f"""d=$1; chmod 700 "$d"; s=$(command -v setsid || true); export {MARK_VARIABLE}="$2"
$s sh "$d/program" > "$d/out" 2> "$d/err" < "$d/in" &"""
"""Shell script that starts a program with a mark, by which it is ended. It goes on after the script."""
END_ALL = f"{END_MARKED}true\n"
DONE = "raylight-done"
"""Last output of a script that has succeeded."""
WAIT = f"""n=0; s=1; while [ $n -lt "$2" ] && [ -d "$1" ] && [ ! -f "$1/status" ]; do {PAUSE}; done
test -f "$1/status" || exit 0
echo "ended $(cat "$1/status")" """
"""Shell script that waits for a program, for at most its second argument times 10 ms."""
COLLECT = f"""tail -c {MAX_STDOUT} "$1/out" | base64 | tr -d '\\n'; echo
tail -c {MAX_STDERR} "$1/err" | base64 | tr -d '\\n'
rm -rf "$1" """
"""Shell script that prints both outputs, a line each, and removes the files of a program."""


class CloudSandbox(ExecSandbox):
    """A sandbox of a cloud provider. Everything that programs leave behind ends with it.

    Args:
        image: what the sandbox starts from.
        limits: limits, most of which providers do not have.
        gateway_url: public address that leads to the model's gateway, such as a reverse proxy's or a
            tunnel. None: the gateway's own address is public.
        lifetime_s: seconds after which the provider ends the sandbox, even if its runner was lost.
        arguments: further arguments of the provider's call that makes a sandbox.

    Raises:
        ConfigError: a limit cannot be enforced.
        SandboxError: the package is not installed, or the provider rejects the request.
        SandboxUnavailableError: the provider failed otherwise.
    """

    PACKAGE: ClassVar[str]
    """Name of the provider's package, as it is imported."""
    INSTALL: ClassVar[str]
    """Its name for pip."""
    REJECTIONS: ClassVar[frozenset[str]]
    """Names of the package's exceptions that would be raised the next time too."""
    REFUSED: ClassVar[tuple[str, ...]] = ("processes", "file_mb", "network")
    """Limits that the provider does not enforce."""
    REACHES: ClassVar[tuple[str, ...]] = ("internet",)
    """Kinds of addresses that programs inside reach, see `reach_of`."""

    def __init__(
        self,
        image: str | None,
        limits: SandboxLimits,
        *,
        gateway_url: str | None = None,
        lifetime_s: int = 3600,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(image, limits)
        self.require_image("NAME")
        self.refuse_limits(*self.REFUSED)
        self.lifetime_s = lifetime_s
        self.arguments = dict(arguments or {})
        self._gateway_url = gateway_url
        self._creation: asyncio.Future[None] | None = None
        self._client: Any = None
        self._sandbox: Any = None

    @abstractmethod
    async def create(self) -> None:
        """Make the provider's sandbox and set `_sandbox`, and `_client` if it needs one; `delete` is called
        only after that."""

    @abstractmethod
    async def shell(self, script: str) -> str:
        """Run a script of the shell, which takes seconds, and return its standard output."""

    @abstractmethod
    async def upload(self, path: str, content: bytes) -> None:
        """Write a file in an existing folder."""

    @abstractmethod
    async def delete(self) -> None:
        """Remove the provider's sandbox."""

    def package(self, module: str | None = None) -> Any:
        """Return the provider's package, or one of its modules.

        Raises:
            SandboxError: it is not installed.
        """
        try:
            return importlib.import_module(module or self.PACKAGE)
        except ImportError as error:
            raise SandboxError(
                f"the sandbox {self.NAME!r} needs a package that cannot be imported ({error}); install it "
                f'for the runners: pip install "{self.INSTALL}"'
            ) from None

    async def run_script(self, script: str, *arguments: str) -> str:
        """Run a script with arguments and return its standard output.

        Raises:
            SandboxUnavailableError: it failed, for example because the disk is full.
        """
        command = shlex.join(["sh", "-c", f"({script}\n) && printf {DONE}", "sh", *arguments])
        output = (await self._guard(self.shell(command))).rstrip()
        if not output.endswith(DONE):
            raise SandboxUnavailableError(
                f"{self.NAME}: the sandbox does not run the scripts of raylight: {output[-400:]!r}"
            )
        return output.removesuffix(DONE)

    async def start(self) -> None:
        if self._creation is not None:
            return
        self.package()
        self._creation = asyncio.ensure_future(self.create())
        try:
            # a request that was sent makes a sandbox, which only its answer lets `stop` remove
            await self._guard(asyncio.shield(self._creation), START_S)
            self._workspace = (await self.run_script("pwd")).strip() or "/"
        except SandboxError:
            await self.stop()
            raise

    async def run(self, program: SandboxProgram) -> ExecResult:
        started_at = time.monotonic()
        mark = secrets.token_hex(16)
        folder = f"/tmp/raylight-{mark}"
        lines = [f"export {name}={shlex.quote(value)}" for name, value in program.env.items()]
        lines += [f"cd {shlex.quote(self.path(program.cwd))} && {shlex.join(program.command)}"]
        lines += [f'echo $? > "{folder}/written" && mv "{folder}/written" "{folder}/status"']
        try:
            await self.run_script(f"mkdir -p {folder}")
            await self._guard(self.upload(f"{folder}/in", program.stdin))
            await self._guard(self.upload(f"{folder}/program", "\n".join(lines).encode()))
            await self.run_script(RUN, folder, mark)
            status = await self._wait(folder, started_at, program.timeout_s)
            if status is None:
                await self.run_script(END_ALL, mark)
            outputs = [
                base64.b64decode(line) for line in (await self.run_script(COLLECT, folder)).split("\n")
            ]
        except asyncio.CancelledError:
            await asyncio.shield(self.run_script(END_ALL + 'rm -rf "/tmp/raylight-$1"', mark))
            raise
        stdout, stderr = (part.decode(errors="replace") for part in (*outputs, b"", b"")[:2])
        ended = -signal.SIGTERM if status is None else status
        return ExecResult(ended, stdout, stderr, status is None, time.monotonic() - started_at)

    async def forward(self, url: str) -> str:
        if self._gateway_url is not None:
            public = urlsplit(self._gateway_url)
            return urlunsplit(urlsplit(url)._replace(scheme=public.scheme, netloc=public.netloc))
        if reach_of(url) not in self.REACHES:
            raise SandboxError(
                f"the sandbox {self.NAME!r} cannot reach the model at {urlsplit(url).netloc}, which is not "
                "public; give SandboxSpec(options={'gateway_url': 'https://...'}) the address of a proxy or "
                "tunnel that leads there, or set engine.host to a public address"
            )
        return url

    async def stop(self) -> None:
        creation, self._creation, self._workspace = self._creation, None, None
        if creation is None:
            return
        await asyncio.wait([creation], timeout=START_S)
        try:
            if self._sandbox is not None:
                await self._guard(self.delete())
        finally:
            client, self._client, self._sandbox = self._client, None, None
            if client is not None:
                await self._guard(client.close())

    async def _wait(self, folder: str, started_at: float, timeout_s: float | None) -> int | None:
        """Return the status of a program when it has ended; None if it runs longer than it may."""
        while True:
            left = WAIT_S if timeout_s is None else started_at + timeout_s - time.monotonic()
            answer = await self.run_script(WAIT, folder, str(round(100 * max(0.0, min(left, WAIT_S)))))
            if answer.startswith("ended "):
                return int(answer.split()[1])
            if left <= 0:
                return None

    async def _guard(self, call: Awaitable[T], timeout_s: float = CALL_S) -> T:
        """Wait for a call of the provider's package.

        Raises:
            SandboxError: the provider rejects it. SandboxUnavailableError: it failed otherwise.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except SandboxError:
            raise
        except Exception as error:
            names = {kind.__name__ for kind in type(error).__mro__}
            message = f"{self.NAME}: {type(error).__name__}: {str(error)[-400:]}"
            if names & self.REJECTIONS:
                raise SandboxError(
                    f"{message}; correct the image, its arguments or the credentials"
                ) from error
            if isinstance(error, TypeError | AttributeError):
                raise
            raise SandboxUnavailableError(message) from error


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
            "auto_stop_interval": 0,  # a program that waits for the model is not an event
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
