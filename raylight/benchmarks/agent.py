"""The agent of all benchmarks: it asks a row's question once, and scores the answer."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys

from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, NamedResources
from raylight.benchmarks.answers import Check
from raylight.benchmarks.catalogue import find_benchmark
from raylight.environments.tool_loop import next_message
from raylight.errors import ConfigError, SandboxError
from raylight.sandboxes.registry import SandboxPool, SandboxSpec
from raylight.sandboxes.sandbox import SandboxLimits
from raylight.types import JsonObject, Rollout

LIMITS = SandboxLimits(memory_mb=4096)
ENDED_BY_SHELL = (126, 127)
"""Exit statuses of a shell that could not start the program."""


class BenchmarkAgent(LitAgent[JsonObject]):
    """Asks a model the question of a row, and scores its answer.

    Args:
        name: name of the benchmark.
        sandbox: place in which code of the model runs: bubblewrap, which reaches neither files nor network,
            or process, which protects nothing.

    Raises:
        ConfigError: the benchmark does not exist, it needs packages that are missing, or the sandbox is not
            installed.
    """

    def __init__(self, name: str, sandbox: str = "bubblewrap") -> None:
        super().__init__()
        self._name = name
        benchmark = find_benchmark(name)
        benchmark.check_packages()
        if sandbox not in ("bubblewrap", "process"):
            raise ConfigError(f"sandbox is {sandbox!r}; choose bubblewrap or process")
        if name == "humaneval" and sandbox == "bubblewrap" and shutil.which("bwrap") is None:
            raise ConfigError(
                "humaneval runs code that the model wrote, and bwrap is not installed; install bubblewrap on "
                "every machine with runners, or give --sandbox process if you trust the model"
            )
        limits = SandboxLimits(memory_mb=LIMITS.memory_mb, network=sandbox == "process")
        self._untrusted = SandboxSpec(sandbox, limits=limits)
        self._pool = SandboxPool(os.cpu_count())

    @property
    def display_name(self) -> str:
        return self._name

    async def rollout_async(
        self, task: JsonObject, resources: NamedResources, rollout: Rollout
    ) -> float | dict[str, float]:
        """Return the score of the model's answer.

        Raises:
            SandboxError: the answer cannot be checked.
        """
        benchmark = find_benchmark(self._name)
        llm = next(resource for resource in resources.values() if isinstance(resource, LLM))
        question = {"role": "user", "content": benchmark.prompt.format(**task)}
        tools = benchmark.tools(task) if benchmark.tools else None
        message = await next_message(llm, [question], benchmark.sampling_parameters, tools)
        score = await asyncio.to_thread(benchmark.score, task, message)
        return float(await self._passes(score)) if isinstance(score, Check) else score

    async def _passes(self, check: Check) -> bool:
        """Run a check; return True if the answer is right."""
        spec = SandboxSpec("process", limits=LIMITS) if check.trusted else self._untrusted
        async with self._pool.started(spec) as sandbox:
            await sandbox.write("check.py", check.program.encode())
            command = [sys.executable if check.trusted else "python3", "check.py"]
            ended = await sandbox.exec(command, stdin=check.stdin.encode(), timeout_s=check.timeout_s)
        failed = ended.status != 0 and not ended.timed_out
        if (failed and check.trusted) or ended.status in ENDED_BY_SHELL:
            raise SandboxError(
                f"the check of an answer to {self._name} failed with status {ended.status}: "
                f"{ended.stderr.strip()[-400:]}; run the evaluation on machines with the packages of "
                "raylight[benchmarks] and with python3"
            )
        return ended.stdout.rstrip().endswith(check.passed)
