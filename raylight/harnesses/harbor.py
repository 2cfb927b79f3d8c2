"""Tasks in Harbor's format as demands on a command: any `CommandAgent` in any sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raylight.errors import ConfigError
from raylight.harbor.attempt import HarborAttempt
from raylight.harbor.task_folder import HarborTask, TaskEnvironment, read_task
from raylight.harbor.tasks import RUN_STEPS_KEY, TASK_KEY
from raylight.harnesses.task import HarnessTask
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import Sandbox


def is_harbor_task(task: Any) -> bool:
    """Return True for a row of `HarborTasks`."""
    return isinstance(task, Mapping) and TASK_KEY in task


async def describe_harbor_task(row: Mapping[str, Any], spec: SandboxSpec) -> HarnessTask:
    """Return the demands of a row of `HarborTasks`.

    An image that its Dockerfile describes is built, which the sandbox's tool does once for each machine.

    Args:
        spec: the agent's sandbox; the task chooses its image, and limits that it does not set itself.

    Raises:
        DatasetError: the task's folder is not on this machine, or is damaged.
        ConfigError: the sandbox cannot build an image, or enforce a limit of the task.
        SandboxError: the image cannot be built.
    """
    task = read_task(row[TASK_KEY])
    attempt = HarborAttempt(task, row.get(RUN_STEPS_KEY, "error"))
    place = await _place(spec, task, task.environment)

    async def prepare(sandbox: Sandbox) -> HarnessTask:
        workdir = await attempt.prepare(sandbox)
        return replace(described, cwd=workdir, prompt=attempt.prompt(sandbox))

    async def score(sandbox: Sandbox) -> Any:
        if task.tests_environment is None:
            return await attempt.judge(sandbox)
        async with contextlib.AsyncExitStack() as stack:
            tests_sandbox = (await _place(spec, task, task.tests_environment)).create()
            stack.push_async_callback(tests_sandbox.stop)
            await tests_sandbox.start()
            return await attempt.judge(sandbox, tests_sandbox)

    described = HarnessTask(
        prompt=task.instruction,
        sandbox=place,
        env=attempt.environment_variables(),
        timeout_s=task.agent_timeout_s,
        scores_timeouts=True,
        prepare=prepare,
        score=score,
    )
    return described


async def _place(spec: SandboxSpec, task: HarborTask, environment: TaskEnvironment) -> SandboxSpec:
    """Return the sandbox of an environment."""
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
