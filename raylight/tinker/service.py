"""The work of each request of the Tinker API, without HTTP and Ray."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import numpy as np

from raylight.errors import AdapterLostError, LearnerLostError
from raylight.http.errors import RequestError
from raylight.tinker import requests as bodies
from raylight.tinker.checkpoints import CheckpointPath, Checkpoints
from raylight.tinker.datums import check_batch
from raylight.tinker.models import RESTARTED, AdapterTrainer, Models, TenantModel, Work
from raylight.tinker.promises import Promises, ResultBody, json_answer
from raylight.tinker.sampling import Samplers, SamplingClients
from raylight.tinker.settings import TinkerSettings
from raylight.tinker.wire import (
    PROTOBUF,
    read_data,
    read_forward_backward,
    read_settings,
    write_forward_backward,
)
from raylight.types import JsonObject

if TYPE_CHECKING:
    from raylight.tinker.trainer_actor import TrainerClient

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
logger = logging.getLogger(__name__)

DEFAULT_RANK = 32
"""Rank of a model without `lora_config`, as the SDK's default."""
Accepted = JsonObject
"""Answer to an accepted request: the id under which its result is fetched, and the model."""
MAX_SESSIONS = 1000


class TinkerService:
    """The state of a server: sessions, models in training, samplers, and results that clients fetch.

    Args:
        on_lost: called when the trainer is gone.
    """

    def __init__(
        self,
        settings: TinkerSettings,
        trainer: TrainerClient,
        engines: Samplers,
        checkpoints: Checkpoints,
        on_lost: Callable[[LearnerLostError], None],
    ) -> None:
        self.settings, self.checkpoints = settings, checkpoints
        self._trainer, self._engines, self._on_lost = trainer, engines, on_lost
        self.sessions = ClientSessions(settings.lease_s, self._end_session)
        self.models = Models(settings.max_models, settings.max_waiting)
        self.promises = Promises()
        self.samplers = SamplingClients(settings, engines, checkpoints, self.promises)
        self._tasks: set[asyncio.Task[object]] = set()
        self._start(self._watch_trainer())

    # models

    def create_model(self, body: bodies.CreateModel) -> Accepted:
        """Add an adapter."""
        self.sessions.check(body.session_id)
        self.settings.check_base_model(body.base_model)
        spec = body.lora_config or bodies.LoraSpec(rank=DEFAULT_RANK)
        if spec.rank > self.settings.max_rank:
            raise RequestError(
                f"lora_config: rank {spec.rank} is above this server's limit, {self.settings.max_rank}; "
                "ask for a lower one, or start the server with a higher --max-rank"
            )
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        answer = {"model_id": model_id, "type": "create_model"}
        return self._create(model_id, body.session_id, spec, body.user_metadata, answer)

    def forward_backward(self, content: bytes) -> Accepted:
        """Compute a loss, and add its gradient to the model's."""
        message, model_id, number = read_forward_backward(content)
        model = self.models.get(model_id)
        limits = self.settings.vocabulary, self.settings.max_model_len

        def prepare() -> Work:
            loss = self.settings.resolve_loss(message.loss_fn)
            batch = check_batch(read_data(message), loss, read_settings(message), *limits)

            async def compute() -> ResultBody:
                train = AdapterTrainer.forward_backward
                total, logprobs = await self._train(model, train, batch, not message.forward_only)
                return ResultBody(write_forward_backward(total, logprobs), PROTOBUF)

            return compute

        return self._submit(model, number, prepare)

    def optim_step(self, body: bodies.OptimStep) -> Accepted:
        """Take a step of the optimizer."""
        model = self.models.get(body.model_id)

        async def step() -> ResultBody:
            metrics = await self._train(model, AdapterTrainer.optim_step, body.adam_params)
            return json_answer({"metrics": metrics, "type": "optim_step"})

        return self._submit(model, body.seq_id, lambda: step)

    # checkpoints

    def save_weights(self, body: bodies.SaveWeights) -> Accepted:
        """Save an adapter and its optimizer."""
        model = self.models.get(body.model_id)

        def prepare() -> Work:
            path = CheckpointPath.of(model.model_id, "weights", body.path or f"state-{uuid.uuid4().hex}")

            async def save() -> ResultBody:
                optimizer = await self._train(model, AdapterTrainer.export_optimizer)
                await self._save(model, path, optimizer, body.ttl_seconds, body.overwrite)
                return json_answer({"path": str(path), "type": "save_weights"})

            return save

        return self._submit(model, body.seq_id, prepare)

    def save_weights_for_sampler(self, body: bodies.SaveWeightsForSampler) -> Accepted:
        """Save an adapter for sampling: under a name, or for one new sampling client."""
        model = self.models.get(body.model_id)

        def prepare() -> Work:
            name = body.path or f"ephemeral-{uuid.uuid4().hex}"
            path = CheckpointPath.of(model.model_id, "sampler_weights", name)

            async def save() -> ResultBody:
                await self._save(model, path, None, body.ttl_seconds, overwrite=True)
                await self._engines.drop(str(path))
                answer: JsonObject = {"type": "save_weights_for_sampler"}
                if body.path is not None:
                    return json_answer(answer | {"path": str(path)})
                sampler_id = await self.samplers.add_ephemeral(
                    model.session_id, body.sampling_session_seq_id, str(path), model.model_id
                )
                return json_answer(answer | {"sampling_session_id": sampler_id})

            return save

        return self._submit(model, body.seq_id, prepare)

    def load_weights(self, body: bodies.LoadWeights) -> Accepted:
        """Continue from a saved adapter, with or without its optimizer, in a model or in a new one."""
        if body.model_id is None:
            return self._create_from(body)
        model = self.models.get(body.model_id)

        def prepare() -> Work:
            path = CheckpointPath.parse(body.path)
            self.settings.check_base_model(self.checkpoints.record(path).base_model)

            async def load() -> ResultBody:
                await self._load(model, path, body.optimizer)
                return json_answer({"path": str(path), "model_id": model.model_id, "type": "load_weights"})

            return load

        return self._submit(model, body.seq_id, prepare)

    def _create_from(self, body: bodies.LoadWeights) -> Accepted:
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError("model_id: give it, or session_id and model_seq_id for a new model")
        self.sessions.check(body.session_id)
        path = CheckpointPath.parse(body.path)
        record = self.checkpoints.record(path)
        for name in (record.base_model, body.base_model or record.base_model):
            self.settings.check_base_model(name)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        answer = {"path": str(path), "model_id": model_id, "type": "load_weights"}
        spec = bodies.LoraSpec(**record.lora)
        load = functools.partial(self._load, path=path, with_optimizer=body.optimizer)
        return self._create(model_id, body.session_id, spec, body.user_metadata, answer, load)

    # ends

    async def close(self) -> None:
        """End all sessions."""
        self.sessions.close()
        await self.samplers.close()
        for model in self.models.find():
            await model.turns.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end_session(self, session_id: str) -> None:
        models = self.models.find(lambda model: model.session_id == session_id)
        for model in models:
            self.models.remove(model.model_id)
        logger.info("session %s has ended; it had %d models", session_id, len(models))

        async def end() -> None:
            for model in models:
                await model.turns.close()
                async with self.models.trainer_lock:
                    await self._remove(model.model_id)
            await self.samplers.end_session(session_id)

        self._start(end())

    async def _remove(self, model_id: str) -> None:
        """Remove an adapter from the trainer, unless it is lost."""
        try:
            await self._trainer.call(AdapterTrainer.remove, model_id)
        except AdapterLostError:
            logger.info("model %s went with the trainer, before it was removed", model_id)
        except LearnerLostError as error:
            self._on_lost(error)

    def _start(self, work: Coroutine[object, object, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task of the Tinker API failed", exc_info=error)

    # parts of requests

    def _create(
        self,
        model_id: str,
        session_id: str,
        spec: bodies.LoraSpec,
        user_metadata: JsonObject | None,
        answer: JsonObject,
        load: Callable[[TenantModel], Awaitable[None]] | None = None,
    ) -> Accepted:
        """Add an adapter: the request 0 of its model.

        Args:
            load: replaces its weights; None for a new adapter's.
        """
        accepted = {"request_id": f"{model_id}:0", "model_id": model_id}
        if accepted["request_id"] in self.promises:  # a repeated request
            return accepted
        model = self.models.add(model_id, session_id, spec, user_metadata)

        async def create() -> ResultBody:
            try:
                await self._train(model, AdapterTrainer.create, spec)
                if load is not None:
                    await load(model)
            except Exception as error:
                model.lost = f"model {model_id!r} was not created: {error}"
                await self._remove(model_id)
                raise
            return json_answer(answer)

        self.promises.add(accepted["request_id"], model.turns.submit(0, create))
        return accepted

    async def _load(self, model: TenantModel, path: CheckpointPath, with_optimizer: bool) -> None:
        adapter = await asyncio.to_thread(self.checkpoints.load, path)
        optimizer = None
        if with_optimizer:
            optimizer = await asyncio.to_thread(self.checkpoints.load_optimizer, path)
        await self._train(model, AdapterTrainer.load, adapter, optimizer)
        model.loaded = str(path)

    def _submit(self, model: TenantModel, number: int | None, prepare: Callable[[], Work]) -> Accepted:
        """Accept a request of a model, whose number is used up even if `prepare` rejects it.

        Args:
            prepare: checks the request, and returns the work.
        """
        request_id = f"{model.model_id}:{uuid.uuid4().hex if number is None else number}"
        if request_id not in self.promises:  # else a repeated request
            try:
                work = prepare()
            except RequestError:
                if number is not None:
                    model.turns.submit(number, None)
                raise
            self.promises.add(request_id, model.turns.submit(number, work))
        return {"request_id": request_id, "model_id": model.model_id}

    async def _save(
        self,
        model: TenantModel,
        path: CheckpointPath,
        optimizer: dict[str, np.ndarray] | None,
        ttl_s: int | None,
        overwrite: bool,
    ) -> None:
        adapter = await self._train(model, AdapterTrainer.export)
        await asyncio.to_thread(
            self.checkpoints.save,
            path,
            adapter,
            optimizer,
            base_model=self.settings.base_model,
            lora=model.spec.model_dump(exclude={"type"}),
            ttl_s=ttl_s,
            overwrite=overwrite,
        )

    async def _train(
        self, model: TenantModel, method: Callable[[AdapterTrainer, str, *Ts], T], *args: *Ts
    ) -> T:
        """Call a method of the trainer for a model. One whose adapter was lost is not called again."""
        if model.lost is None:
            try:
                return await self._trainer.call(method, model.model_id, *args)
            except AdapterLostError:
                await self._note_loss(model)
            except LearnerLostError as error:
                self._on_lost(error)
                raise
        raise AdapterLostError(model.lost)

    async def _watch_trainer(self) -> None:
        """Note the models whose adapters are lost, so that they make room even if nobody calls them."""
        while True:
            try:
                lost = await self._trainer.wait_loss()
            except LearnerLostError as error:
                self._on_lost(error)
                return
            for model in self.models.find():
                if model.model_id in lost:
                    await self._note_loss(model)

    async def _note_loss(self, model: TenantModel) -> None:
        records = await asyncio.to_thread(self.checkpoints.list, model.model_id)
        states = [record.path for record in records if CheckpointPath.parse(record.path).kind == "weights"]
        state = states[-1] if states else model.loaded
        remedy = f"continue from its last saved state, {state}" if state else "it has no saved state"
        if model.lost is None:  # by now
            model.lost = f"the adapter of model {model.model_id!r} is lost: {RESTARTED}; {remedy}"
            logger.warning(model.lost)


class ClientSessions:
    """Open sessions.

    Args:
        lease_s: seconds without a heartbeat after which a session ends.
        on_end: called with the id of an ended session.
    """

    def __init__(self, lease_s: float, on_end: Callable[[str], None]) -> None:
        self._lease_s, self._on_end = lease_s, on_end
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def ids(self) -> list[str]:
        """Ids of the open sessions, oldest first."""
        return list(self._timers)

    def open(self) -> str:
        """Open a session; return its id.

        Raises:
            RequestError: 429, too many are open.
        """
        if len(self._timers) >= MAX_SESSIONS:
            raise RequestError(f"{MAX_SESSIONS} sessions are open; try again later", 429)
        session_id = str(uuid.uuid4())
        self._timers[session_id] = self._start_timer(session_id)
        return session_id

    def renew(self, session_id: str) -> None:
        """Note a heartbeat.

        Raises:
            RequestError: 404, the session does not exist.
        """
        self.check(session_id)
        self._timers[session_id].cancel()
        self._timers[session_id] = self._start_timer(session_id)

    def check(self, session_id: str) -> None:
        """Check that a session is open.

        Raises:
            RequestError: 404, the session does not exist.
        """
        if session_id not in self._timers:
            raise RequestError(
                f"session_id: there is no session {session_id!r:.200}, or it ended after "
                f"{self._lease_s:g} s without a heartbeat; create another ServiceClient",
                404,
            )

    def finish(self, session_id: str) -> None:
        """End a session; one that has ended is ignored."""
        if (timer := self._timers.get(session_id)) is not None:
            timer.cancel()
            self._end(session_id)

    def close(self) -> None:
        """Stop all timers."""
        for timer in self._timers.values():
            timer.cancel()

    def _start_timer(self, session_id: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._lease_s, self._end, session_id)

    def _end(self, session_id: str) -> None:
        del self._timers[session_id]
        self._on_end(session_id)
