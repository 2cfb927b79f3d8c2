"""A fixed model in separate replicas, and the requests to it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylight._utils.aio import pause
from raylight.errors import EngineStartError, ServingLostError, summarize_ray_error
from raylight.trainer.components.served_model import ServedModel, ServingContext
from raylight.trainer.spec.settings import ServingSettings

RETRY_DELAY_S = 0.5


class RequestRouter:
    """An actor that divides requests among the replicas.

    Serve's client polls the controller in a thread for as long as its process lives. The driver must not have
    such a thread: Ray ends a process that uses it after the connection was closed.
    """

    def __init__(self, app_name: str) -> None:
        self._handle = serve.get_app_handle(app_name)

    async def call(self, method: str, *args: object) -> object:
        try:
            return await getattr(self._handle, method).remote(*args)
        except RayTaskError as error:  # of the engine
            raise error.cause from None


class ModelService:
    """The deployment of a fixed model, and the requests to it.

    Args:
        context: the run.
        title: name of the model in messages.
        setting: name of the setting of `timeout_s` in messages.
        timeout_s: seconds within which a request must be answered, the replacement of lost replicas included.
        requests: requests in flight for each replica.
    """

    def __init__(
        self,
        context: ServingContext,
        model: ServingSettings,
        *,
        title: str,
        setting: str,
        timeout_s: float,
        requests: int,
    ) -> None:
        self._name, self._show_stage = f"{context.name}-{model.name}", context.show_stage
        self._title, self._setting, self._timeout_s = title, setting, timeout_s
        self.slots = requests * model.engine.replicas
        """Requests in flight."""
        self._free = asyncio.Semaphore(self.slots)
        self._model = ServedModel(replace(context, name=self._name), model)
        self._router: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.retries = 0
        """Requests that were sent again because a replica was lost."""

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the coordinator of the replicas, and define their deployment."""
        self._stack = stack
        await self._model.open(stack)
        self._model.prepare(0)

    async def start(self) -> None:
        """Start the replicas. Starts of models follow each other: only one can start Serve.

        Raises:
            EngineStartError: the replicas did not start in time.
        """
        self._show_stage(f"starting {self._title}")
        self._loop = asyncio.get_running_loop()
        try:
            await self._model.start()
        except EngineStartError as error:
            raise EngineStartError(
                f"{self._title}: {error} Its settings are separate from engine's"
            ) from None
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._router = (
            ray.remote(RequestRouter)
            .options(
                name="request-router",
                namespace=self._name,
                num_cpus=0,
                max_concurrency=self.slots,
                max_restarts=-1,
                scheduling_strategy=this_node,
            )
            .remote(self._name)
        )
        self._stack.callback(ray.kill, self._router)

    @property
    def is_usable_here(self) -> bool:
        """True in the event loop in which it was started."""
        return self._loop in (None, asyncio.get_running_loop())

    async def ask(self, method: str, what: str, *args: object) -> Any:
        """Call a method of a replica; if it is lost meanwhile, of another one.

        Args:
            what: what is computed, for messages.

        Raises:
            ServingLostError: no replica answered in time.
            Exception: the error of the engine.
        """
        async with self._free:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask(method, *args)
            except TimeoutError:
                raise ServingLostError(
                    f"{self._title} did not score {what} within {self._timeout_s:g} s ({self._setting}), the "
                    "replacement of lost replicas included; see the replicas' logs with `ray logs`, give it "
                    f"more replicas, or raise timeout_s. The run can be resumed"
                ) from None

    async def _ask(self, method: str, *args: object) -> object:
        while True:
            try:
                return await self._router.call.remote(method, *args)
            except (RayTaskError, RayActorError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if not isinstance(cause, RayActorError):
                    raise cause from None
                self.retries += 1
                self._show_stage(f"a replica of {self._title} was lost: {summarize_ray_error(cause)}")
                await pause(RETRY_DELAY_S)
