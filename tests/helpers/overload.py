"""Agents that send more requests than an engine has slots, while its weights change."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from weight_loading import load_weights

from raylight._utils.aio import BroadcastCondition, pause, task_group
from raylight.engines.capture_context import Sample

TOKENS = 250
"""Number of different tokens that the versions sample."""
Send = Callable[[list[int], int, random.Random], Awaitable[Sample]]
"""Sends a prompt, and asks for so many tokens."""


def uniform_weights(path: str) -> dict[str, Any]:
    """Return weights with which all tokens have the same logits, for `load_version` to change."""
    weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    for name, tensor in weights.items():
        tensor.fill_(1.0 if "norm" in name or "embed" in name or "lm_head" in name else 0.0)
    return weights


async def load_version(engine: Any, version: int, weights: dict[str, Any]) -> None:
    """Load weights that sample only one token, which tells their version."""
    output = weights["lm_head.weight"]
    output.fill_(1.0)
    output[version % TOKENS] = 10.0
    await load_weights(engine, version, weights)


class Load:
    """Agents that send one request after the other, until they are told to end.

    Args:
        longest: most tokens of an answer.
    """

    def __init__(self, engine: Any, send: Send, longest: int) -> None:
        self._engine, self._send, self._longest = engine, send, longest
        self._over, self._progress = False, BroadcastCondition()
        self.ended = self.cancelled = 0
        self.most_waiting = 0
        self.spanning = 0
        """Number of requests with tokens of several versions."""

    async def update(self, versions: range, weights: dict[str, Any], agents: int, delay_s: float) -> None:
        """Load all versions while agents send requests. Returns when all requests have ended.

        At least as many requests have ended as versions were loaded, and one was cancelled, however fast the
        machine is.
        """
        luck = random.Random(len(versions))
        async with task_group() as tasks:
            for number in range(agents):
                tasks.create_task(self._agent(number))
            for count, version in enumerate(versions, start=1):
                await pause(delay_s * luck.random())
                await load_version(self._engine, version, weights)
                await self._progress.wait_for(lambda count=count: self.ended >= count)
            await self._progress.wait_for(lambda: self.cancelled > 0)
            self._over = True
        state = self._engine.load()
        assert (state.running, state.waiting, state.paused) == (0, 0, False)

    async def _agent(self, number: int) -> None:
        luck = random.Random(number)
        while not self._over:
            await pause(luck.choice([0, 0, 0.002 * luck.random()]))
            prompt = [luck.randrange(TOKENS) for _ in range(luck.randint(1, 40))]
            length, first = luck.randint(1, self._longest), self._engine.version
            self.most_waiting = max(self.most_waiting, self._engine.load().waiting)
            try:
                async with asyncio.timeout(0.02 * luck.random() if luck.random() < 0.05 else None):
                    sample = await self._send(prompt, length, luck)
            except TimeoutError:
                self.cancelled += 1
            else:
                self._check(sample, length, first)
            self._progress.notify_all()

    def _check(self, sample: Sample, length: int, first: int) -> None:
        """Check that a request has all its tokens, each from the version that was current."""
        versions = sample.weight_versions
        assert len(sample.output_ids) == len(sample.logprobs) == len(versions) == length
        assert sample.finish_reason == "length"
        assert versions == sorted(versions)
        assert first <= versions[0] <= versions[-1] <= self._engine.version
        assert list(sample.output_ids) == [version % TOKENS for version in versions]
        self.ended += 1
        self.spanning += versions[0] < versions[-1]
