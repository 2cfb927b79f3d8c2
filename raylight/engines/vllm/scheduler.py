"""vLLM's scheduler, which hands on the log-probs of recorded tokens as plain numbers.

vLLM sends three arrays for each request and step, and the process that serves requests takes 20 times as long
to decode them as for everything else that it does with a token: a faster engine would wait for it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

RECORDED = "raylight_recorded"
"""Key in the `extra_args` of a request that needs log-probs of the sampled tokens only."""
LOGPROBS = "lp"
"""Key of these log-probs in an output's `kv_transfer_params`, the only field that plugins can fill."""
CANDIDATES = "raylight_candidates"
"""Key in the `extra_args` of a request whose candidates are recorded, and in `kv_transfer_params` of their
sizes and values, as bytes of `TokenSets`."""


def recording_scheduler(*, vllm_config: VllmConfig, **parts: object) -> Scheduler:
    """Make the scheduler that vLLM would make, with plain log-probs of recorded requests."""
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    made: Scheduler = type("RecordingScheduler", (PlainLogprobs, base), {})(vllm_config=vllm_config, **parts)
    made.return_sampling_mask = True
    return made


class PlainLogprobs:
    """Mixin of a scheduler."""

    requests: dict[str, Request]

    def update_from_output(self, scheduler_output: object, model_runner_output: ModelRunnerOutput) -> object:
        found = model_runner_output.logprobs
        if found is None:  # and no candidates, which are read with the log-probs
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        recorded = [_is_recorded(self.requests.get(name)) for name in model_runner_output.req_ids]
        output = dataclasses.replace(model_runner_output, logprobs=StepLogprobs(found, recorded))
        messages = super().update_from_output(scheduler_output, output)  # type: ignore[misc]
        for message in messages.values():
            move_logprobs(message.outputs)
        return messages


class StepLogprobs:
    """The log-probs of a step, which the scheduler divides among the requests.

    Args:
        recorded: for each request of the step, True if it gets numbers in place of arrays.
    """

    def __init__(self, found: LogprobsLists, recorded: list[bool]) -> None:
        self._found, self._recorded = found, recorded
        self._sampled: list[float] = found.logprobs[:, 0].tolist()  # column 0 is the sampled token
        self._starts = found.cu_num_generated_tokens

    def slice_request(self, index: int, tokens: int) -> LogprobsLists | list[float]:
        if not self._recorded[index]:
            return self._found.slice_request(index, tokens)
        start = index if self._starts is None else self._starts[index]
        return self._sampled[start : start + tokens]


def move_logprobs(outputs: list[EngineCoreOutput]) -> None:
    """Move plain log-probs and candidates to where vLLM's messages have room for them."""
    for output in outputs:
        found, output.new_sampling_mask = output.new_sampling_mask, None  # an answer would have it
        if found is not None and len(found.token_ids):
            sizes, values = np.diff(found.offsets).astype(np.int32), found.token_ids
            moved = {CANDIDATES: [sizes.tobytes(), values.tobytes()]}
            output.kv_transfer_params = (output.kv_transfer_params or {}) | moved
        if type(output.new_logprobs) is list:
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), LOGPROBS: output.new_logprobs}
            output.new_logprobs = None


def _is_recorded(request: Request | None) -> bool:
    params = None if request is None else request.sampling_params
    return params is not None and params.extra_args is not None and RECORDED in params.extra_args
