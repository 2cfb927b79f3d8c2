"""Execution of single tasks in this process, for debugging an agent without a cluster."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Generic, Self, TypeVar

from raylight.agent.hooks import Hook, HookDispatcher
from raylight.agent.litagent import LitAgent, TrainerView
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import ConfigError, RolloutsFailedError
from raylight.runner.runner import Runner
from raylight.store.client import StoreClient
from raylight.traces.tracer import OtelTracer, Tracer
from raylight.types import AttemptedRollout, RolloutMode

Task = TypeVar("Task")


class LitAgentRunner(Generic[Task]):
    """Runner of single tasks in this process: breakpoints work, and errors are raised.

    Example:
        runner = LitAgentRunner(OtelTracer())
        with runner.run_context(agent=agent, store=StoreClient(StoreService())):
            await runner.step(task, resources={"llm": llm})

    It serves no model, so every LLM needs an endpoint.

    Args:
        tracer: records the spans. None: an OtelTracer.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer = OtelTracer() if tracer is None else tracer
        self._runner: Runner | None = None

    @contextlib.contextmanager
    def run_context(
        self,
        *,
        agent: LitAgent[Task],
        store: StoreClient,
        hooks: Sequence[Hook] | None = None,
        worker_id: int | None = None,
    ) -> Iterator[Self]:
        """Run tasks with an agent, a store and hooks in this block.

        Args:
            worker_id: number of the runner in the store. None: 0.

        Raises:
            ConfigError: the agent is not a LitAgent.
        """
        if not isinstance(agent, LitAgent):
            raise ConfigError(
                f"agent is {agent!r:.80}; give a function decorated with @rollout or an instance of LitAgent"
            )
        self._runner = Runner(
            f"worker-{worker_id or 0}",
            store,
            agent,
            self.tracer,
            HookDispatcher(hooks or ()),
            secrets.token_hex(16),
            max_concurrent=1,
            trainer=TrainerView(self.tracer, tuple(hooks or ())),
        )
        try:
            with self.tracer.lifespan():
                yield self
        finally:
            self._runner = None

    async def step(
        self, input: Task, *, resources: NamedResources | None = None, mode: RolloutMode | None = None
    ) -> AttemptedRollout:
        """Run the agent on one task, and return the rollout.

        Args:
            resources: named resources, which override those that the agent declares. None: the latest in the
                store.

        Raises:
            ConfigError: it is called outside `run_context`, or an LLM has no endpoint.
            AgentSignatureError: the agent lacks a resource.
            RolloutsFailedError: the rollout failed; the message has the agent's error and traceback.
        """
        runner = self._runner
        if runner is None:
            raise ConfigError("step() needs an agent and a store; call it inside `with run_context(...)`")
        agent, store = runner.get_agent(), runner.get_store()
        if resources is None:
            latest = await store.get_latest_resources()
            resources = {} if latest is None else latest.resources
        resources = {
            name: _called_directly(name, resource)
            for name, resource in (agent.declared_resources | resources).items()
        }
        agent.check(resources, [mode] if mode else ())
        update = await store.add_resources(resources)
        started = await store.start_rollout(input, mode, update.resources_id, worker_id=runner.worker_id)
        await runner.run_attempt(started)
        finished = await store.get_rollout_by_id(started.rollout_id)
        assert isinstance(finished, AttemptedRollout), "it was started with an attempt"
        if finished.attempt.status != "succeeded":
            failure = finished.attempt.failure
            reason = f"{failure.error}\n{failure.trace}" if failure else finished.attempt.status
            raise RolloutsFailedError(f"rollout {started.rollout_id} failed: {reason}")
        return finished


def _called_directly(name: str, resource: object) -> object:
    """Return a resource as the agent uses it without a model that raylight serves."""
    if not isinstance(resource, LLM) or resource.tokenizer_only:
        return resource
    if not resource.endpoint:
        raise ConfigError(
            f"the resource {name!r} is an LLM without an endpoint, and LitAgentRunner serves no model; give "
            "its URL, such as LLM(endpoint='http://127.0.0.1:8000/v1', model='...')"
        )
    return resource.model_copy(update={"traced": False})
