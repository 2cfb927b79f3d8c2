"""Conversion of Harbor tasks to `HarnessTask`, for any `CommandAgent` in any sandbox."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace

from raylight.errors import ConfigError
from raylight.harbor.attempt import HarborAttempt, RunSteps, mean_rewards
from raylight.harbor.task_folder import PRIMARY, HarborTask, TaskEnvironment, read_task
from raylight.harbor.tasks import RUN_STEPS_KEY, TASK_KEY
from raylight.harnesses.task import HarnessTask
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import Sandbox
from raylight.types import JsonObject


def is_harbor_task(task: object) -> bool:
    """Return True for a row of `HarborTasks`."""
    return isinstance(task, Mapping) and TASK_KEY in task


async def describe_harbor_task(row: JsonObject, spec: SandboxSpec) -> HarnessTask:
    """Return the requirements of a row of `HarborTasks`.

    An image that its Dockerfile describes is built, which the sandbox's tool does once for each machine.

    Args:
        spec: the agent's sandbox; the task chooses its image, and limits that it does not set itself.

    Raises:
        DatasetError: the task's folder is not on this machine, or is damaged.
        ConfigError: the sandbox cannot build an image, or enforce a limit of the task.
        SandboxError: the image cannot be built.
    """
    task = read_task(row[TASK_KEY])
    return await HarborRun(task, row.get(RUN_STEPS_KEY, "error"), spec).describe()


class HarborRun:
    """One run of a task: its steps one after another in one sandbox, and their rewards.

    Args:
        run_steps: as in `HarborAttempt`.
        spec: the agent's sandbox.
    """

    def __init__(self, task: HarborTask, run_steps: RunSteps, spec: SandboxSpec) -> None:
        self._task = task
        self._spec = spec
        self._attempts = [HarborAttempt(step, run_steps) for step in task.steps or (task,)]
        self._rewards: list[float | dict[str, float]] = []
        """Rewards of the steps that have ended."""

    async def describe(self) -> HarnessTask:
        """Return the requirements of the first step."""
        place = await _sandbox_for(self._spec, self._task, self._task.environment)
        return replace(self._requirements(), sandbox=place, prepare=self._prepare)

    def _requirements(self) -> HarnessTask:
        """Return the requirements of the next step, whose paths are not known."""
        return HarnessTask(
            prompt=self._attempt.task.instruction,
            env=self._attempt.environment_variables(),
            timeout_s=self._attempt.task.agent_timeout_s,
            scores_timeouts=True,
            score=self._score,
            follow=self._follow,
        )

    @property
    def _attempt(self) -> HarborAttempt:
        """The next step."""
        return self._attempts[len(self._rewards)]

    async def _prepare(self, sandbox: Sandbox) -> HarnessTask:
        workdir = await self._attempts[0].prepare(sandbox)
        return await (self._begin(sandbox) if self._task.steps else self._placed(sandbox, workdir))

    async def _begin(self, sandbox: Sandbox) -> HarnessTask:
        return await self._placed(sandbox, await self._attempt.begin(sandbox))

    async def _placed(self, sandbox: Sandbox, workdir: str) -> HarnessTask:
        # a sandbox in the requirements keeps the files of the agent apart from the runner's
        return replace(
            self._requirements(),
            sandbox=self._spec,
            cwd=workdir,
            prompt=self._attempt.prompt(sandbox),
            image_env=await self._attempt.image_variables(sandbox),
        )

    async def _score(self, sandbox: Sandbox) -> float | dict[str, float]:
        environment = self._task.tests_environment
        if environment is None:
            self._rewards.append(await self._attempt.judge(sandbox))
        else:
            async with contextlib.AsyncExitStack() as stack:
                tests_sandbox = (await _sandbox_for(self._spec, self._task, environment)).create()
                stack.push_async_callback(tests_sandbox.stop)
                await tests_sandbox.start()
                self._rewards.append(await self._attempt.judge(sandbox, tests_sandbox))
        if len(self._attempts) == 1 or self._task.reward_strategy == "final":
            return self._rewards[-1]
        return mean_rewards(self._rewards)

    async def _follow(self, sandbox: Sandbox) -> HarnessTask | None:
        """Begin the next step, unless the last one missed the reward that it needs."""
        if len(self._rewards) == len(self._attempts):
            return None
        reward, least = self._rewards[-1], self._task.steps[len(self._rewards) - 1].min_rewards
        named = reward if isinstance(reward, dict) else {PRIMARY: reward}
        if any(named.get(name, -math.inf) < value for name, value in least.items()):
            return None
        return await self._begin(sandbox)


async def _sandbox_for(spec: SandboxSpec, task: HarborTask, environment: TaskEnvironment) -> SandboxSpec:
    backend = spec.backend_class()
    limits = replace(spec.limits, network=spec.limits.network and environment.network)
    # without images, a limit would hold for the address space of each process, of which many reserve more
    if backend.HAS_IMAGE and limits.memory_mb is None:
        limits = replace(limits, memory_mb=environment.memory_mb)
    place = replace(spec, limits=limits)
    if not backend.HAS_IMAGE:
        return place
    if environment.image is not None:
        return replace(place, image=environment.image)
    if environment.dockerfile is None or environment.folder is None:
        return place
    build = getattr(backend, "build", None)
    if build is None:
        raise ConfigError(
            f"the task {task.name} describes its image by a Dockerfile, which the sandbox {spec.backend!r} "
            "cannot build; push the image and set [environment].docker_image, or use podman or docker"
        )
    return replace(place, image=await build(environment.folder, environment.build_timeout_s))
