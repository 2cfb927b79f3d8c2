"""The trainer of all tenants as a Ray actor around LoraTrainer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from raylight._utils.aio import pause
from raylight.config import LearnerConfig, cpu_threads
from raylight.errors import AdapterLostError, EngineStartError, LearnerLostError, summarize_ray_error
from raylight.tinker.models import RESTARTED, AdapterTrainer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
logger = logging.getLogger(__name__)

TRAINER_NAME = "trainer"
"""Name of the actor, in the namespace of the server."""
DEAD = (RayActorError, OutOfMemoryError)
"""Errors of Ray for an actor that is gone, or cannot be reached; the second is not a RayActorError."""
MAX_RESTARTS = 20
"""Deaths of the trainer after which it is started again."""
RETRY_DELAY_S = 0.5
"""Delay between two tries of a call that does not reach the trainer."""
LIVENESS_GROUP, END_GROUP = "liveness", "end"
"""Concurrency groups with a thread each, for `ready`, which must answer during a pass, and `wait_forever`."""


class TrainerActor:
    """One process with the model and the adapters of all tenants."""

    def __init__(self, model_path: str, dtype: str, max_tokens: int, threads: int) -> None:
        import torch

        from raylight.learner.model.local_device import select_device
        from raylight.tinker.lora_trainer import LoraTrainer

        torch.set_num_threads(threads)
        trainer: AdapterTrainer = LoraTrainer(model_path, dtype, select_device("auto"), max_tokens)
        self._calls = NumberedCalls(trainer)
        self._process_id = uuid.uuid4().hex

    @ray.method(concurrency_group=LIVENESS_GROUP)
    def ready(self) -> str:
        """Return the id of this process, once the model is loaded."""
        return self._process_id

    @ray.method(concurrency_group=END_GROUP)
    def wait_forever(self) -> None:
        """Never return. The call, executed or not, fails when the actor ends: the server awaits that."""
        threading.Event().wait()

    def call(self, number: int, method: str, *args: object) -> Any:
        """Call a method of the trainer; see `NumberedCalls`."""
        return self._calls.call(number, method, *args)


def start_trainer(namespace: str, model_path: str, dtype: str, max_tokens: int, config: LearnerConfig) -> Any:
    """Start the actor; return its handle."""
    remote: Any = ray.remote  # its type stubs lack concurrency groups
    options = {"name": TRAINER_NAME, "namespace": namespace, "max_restarts": MAX_RESTARTS}
    return (
        remote(concurrency_groups={LIVENESS_GROUP: 1, END_GROUP: 1})(TrainerActor)
        .options(num_cpus=config.num_cpus, num_gpus=config.num_gpus, **options)
        .remote(model_path, dtype, max_tokens, cpu_threads(config))
    )


class TrainerClient:
    """The actor as the server calls it, one call after another.

    A call that does not reach the actor is repeated. Ray cannot say if such a call was executed, so calls
    are numbered, and the actor executes each number once. Ray starts an actor that died again, without the
    adapters of its tenants: it is recognized by the id of its process. The methods raise AdapterLostError
    then, and LearnerLostError if the actor has died too often, or cannot be reached within `timeout_s`.

    Args:
        actor: its handle.
        timeout_s: longest time until the actor has loaded the model, or can be reached again.
    """

    def __init__(self, actor: Any, timeout_s: float) -> None:
        self._actor, self._timeout_s = actor, timeout_s
        self._numbers = itertools.count(1)
        self._process_id = ""
        self._held: set[str] = set()
        """Models whose adapters the process has."""
        self._lost: list[str] = []
        """Models whose adapters are lost, until `wait_loss` returns them."""

    async def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            EngineStartError: it cannot be loaded, or not in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                self._process_id = await self._actor.ready.remote()
        except TimeoutError:
            raise EngineStartError(
                f"the trainer did not start within {self._timeout_s:g} s; check that the cluster has the "
                "CPUs and GPUs that it asks for in addition to the engine, or raise --start-timeout"
            ) from None
        except DEAD as error:
            raise EngineStartError(f"the trainer did not start: {summarize_ray_error(error)}") from None

    async def wait_loss(self) -> list[str]:
        """Wait until the actor was started again after its death; return the models whose adapters it had.

        Raises:
            LearnerLostError: it cannot be started again.
        """
        while not self._lost:
            try:
                await self._actor.wait_forever.remote()
            except DEAD:
                await self._reconnect(self._deadline())
        lost, self._lost = self._lost, []
        return lost

    def stop(self) -> None:
        ray.kill(self._actor)

    async def call(self, method: Callable[[AdapterTrainer, str, *Ts], T], model_id: str, *args: *Ts) -> T:
        """Call a method of the trainer for a model."""
        name = method.__name__
        if name == "create":
            await self._reconnect(self._deadline())  # after a death while nobody called
            self._held.add(model_id)
        number, process_id, deadline = next(self._numbers), self._process_id, None
        while True:
            try:
                found: T = await self._actor.call.remote(number, name, model_id, *args)
                break
            except RayTaskError as error:
                raise error.cause from None
            except DEAD as error:  # or unreachable for a moment, or being started again
                if deadline is None:
                    deadline = self._deadline()
                    logger.warning("%s did not reach the trainer: %s", name, summarize_ray_error(error))
                await self._reconnect(deadline)
                if self._process_id != process_id:
                    raise AdapterLostError(RESTARTED) from None
                await pause(RETRY_DELAY_S)
        if name == "remove":
            self._held.discard(model_id)
        return found

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _reconnect(self, deadline: float) -> None:
        """Wait until the actor can be reached. If it is another process then, all adapters are lost."""
        try:
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError
            async with asyncio.timeout_at(deadline):
                process_id = await self._actor.ready.options(max_task_retries=-1).remote()
        except TimeoutError:
            raise _lost(f"it could not be reached again within {self._timeout_s:g} s") from None
        except DEAD as error:
            raise _lost(summarize_ray_error(error)) from None
        if process_id != self._process_id:
            self._process_id = process_id
            self._lost += sorted(self._held)
            self._held.clear()


def _lost(reason: str) -> LearnerLostError:
    return LearnerLostError(
        f"the trainer is gone, and with it the adapters in training: {reason}; start the server again, and "
        "continue from the saved states"
    )


class NumberedCalls:
    """Calls of an object's methods, one after another. A call that comes again is not executed again: it has
    the answer of its first time. The answer of the last call is kept.

    Args:
        target: the object.
    """

    def __init__(self, target: object) -> None:
        self._target = target
        self._number = 0
        self._answer: Future[object] = Future()

    def call(self, number: int, method: str, *args: object) -> Any:
        """Call a method, and raise its error.

        Args:
            number: higher than earlier calls'; the last call's for the same call again.
        """
        if number < self._number:
            raise AssertionError(f"call {number} ({method}) came after call {self._number}")
        if number > self._number:
            self._number, self._answer = number, Future()  # the last answer is freed before the call
            try:
                self._answer.set_result(getattr(self._target, method)(*args))
            except BaseException as error:  # of any kind: it is the answer
                self._answer.set_exception(error)
        return self._answer.result()
