"""Recording what vLLM samples: token for token, with log-probabilities and weight versions, whatever endpoint
asked for it.

Every request passes vLLM's output processor on its way to the engine core, and every token on its way back.
So that is where they are recorded: as the tokens come, also those of a request that is not streamed and whose
client leaves.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.logprobs import LogprobsProcessor

from raylight.engines.capture_context import CONSTRAINED, CURRENT, CaptureContext, Sample
from raylight.types import FinishReason as Finish

FINISH: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.REPETITION: "stop",
    FinishReason.LENGTH: "length",
}
"""All others are "aborted"."""
DEFAULTS = SamplingParams()
ALWAYS_TOLD = ("temperature", "top_p", "top_k", "min_p")
TOLD_IF_SET = (
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logit_bias",
    "bad_words",
)


class Capture:
    """Records the requests of every current `CaptureContext`. vLLM has no hook for this, so one method each
    of the client's output processor and of its link to the engine core are replaced; a test of this module
    breaks where vLLM changes them.

    Args:
        client: an `AsyncLLM`, just made: its event loop has not turned since.
    """

    def __init__(self, client: Any) -> None:
        self.version = 0
        """Of the weights that sample now."""
        self.adapter_versions: dict[int, int] = {}
        """Version of each adapter that was ever loaded, by vLLM's integer id."""
        self._states: dict[str, Any] = client.output_processor.request_states
        self._queue: asyncio.Queue[Any] = client.engine_core.outputs_queue
        self._add_request, client.output_processor.add_request = (
            client.output_processor.add_request,
            self._record,
        )
        self._next_output, client.engine_core.get_output_async = (
            client.engine_core.get_output_async,
            self._follow,
        )
        self._idle = asyncio.Event()
        self._ended = False

    async def caught_up(self) -> None:
        """Until every token that has left the engine core is recorded."""
        if not (self._queue.empty() or self._ended):
            self._idle.clear()
        await self._idle.wait()

    async def _follow(self) -> Any:
        """The next output of the engine core. Whoever asks for it has dealt with all before."""
        if self._queue.empty():
            self._idle.set()
        try:
            output = await self._next_output()
        except BaseException:  # vLLM asks no more
            self._ended = True
            self._idle.set()
            raise
        self._idle.clear()
        return output

    def _record(
        self, request: Any, prompt: str | None, parent: Any = None, index: int = 0, queue: Any = None
    ) -> None:
        """Take up a request (one choice of it), and record it if an exchange is current."""
        exchange, params = CURRENT.get(), request.sampling_params
        if exchange is None or params is None:
            self._add_request(request, prompt, parent, index, queue)
            return
        choice = index + (parent.n if parent else 1) * prompt_index(exchange, request.external_req_id)
        if choice in exchange.samples:
            raise VLLMValidationError(
                "a request that samples a choice more than once, as beam search does, cannot be recorded"
            )
        asked = (
            parent.sampling_params if parent else params
        ).num_logprobs is not None  # the choices share theirs
        if not asked:
            params.logprobs = 0  # of the sampled token alone
        self._add_request(request, prompt, parent, index, queue)
        sample = exchange.sample(choice, request.prompt_token_ids, sampling_of(params))
        fixed = self.adapter_versions[request.lora_request.lora_int_id] if request.lora_request else None
        state = self._states[request.request_id]
        state.logprobs_processor = RecordingLogprobs.around(
            state.logprobs_processor, sample, self, fixed, asked
        )
        state.make_request_output = _noting_the_end(state.make_request_output, sample)


class RecordingLogprobs(LogprobsProcessor):
    """Stands in for a request's own `LogprobsProcessor`, which sees each output of the engine core. If the
    request did not ask for log-probabilities, none are prepared for its answer."""

    sample: Sample
    capture: Capture
    fixed_version: int | None
    asked: bool

    @classmethod
    def around(
        cls, own: LogprobsProcessor, sample: Sample, capture: Capture, version: int | None, asked: bool
    ) -> Self:
        self = cls(**{field.name: getattr(own, field.name) for field in dataclasses.fields(own)})
        self.sample, self.capture, self.fixed_version, self.asked = sample, capture, version, asked
        if not asked:
            self.logprobs = self.cumulative_logprob = self.num_logprobs = None
        return self

    def update_from_output(self, output: EngineCoreOutput) -> None:
        if count := len(output.new_token_ids):
            sample, version = (
                self.sample,
                self.capture.version if self.fixed_version is None else self.fixed_version,
            )
            assert output.new_logprobs is not None, "asked for in Capture._record"
            sample.output_ids.extend(output.new_token_ids)
            sample.logprobs.extend(
                output.new_logprobs.logprobs[:, 0].tolist()
            )  # the sampled token comes first
            sample.weight_versions.extend([version] * count)
        super().update_from_output(output)

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        if self.asked:
            super()._update_sample_logprobs(logprobs_lists)


def _noting_the_end(make_output: Any, sample: Sample) -> Any:
    """A request state's `make_request_output`, which alone is told the final finish reason: a stop string's,
    too."""

    def make_request_output(
        new_token_ids: Any, pooling_output: Any, finish_reason: FinishReason | None, *rest: Any, **named: Any
    ) -> Any:
        if finish_reason is not None:
            sample.finish_reason = FINISH.get(finish_reason, "aborted")
        return make_output(new_token_ids, pooling_output, finish_reason, *rest, **named)

    return make_request_output


def prompt_index(exchange: CaptureContext, request_id: str) -> int:
    """Which of a completions request's prompts this is: vLLM makes a request of each, whose id ends in its
    index."""
    return int(request_id.rpartition("-")[2]) if exchange.dialect == "completions" else 0


def sampling_of(params: SamplingParams) -> Mapping[str, Any]:
    """What the distribution was shaped by."""
    told = {name: getattr(params, name) for name in ALWAYS_TOLD}
    if params.structured_outputs is not None or params.allowed_token_ids:
        told[CONSTRAINED] = True
    return told | {
        name: value for name in TOLD_IF_SET if (value := getattr(params, name)) != getattr(DEFAULTS, name)
    }
