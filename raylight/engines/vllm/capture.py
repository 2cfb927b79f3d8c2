"""Capture of all tokens that vLLM samples, with log-probabilities and weight versions, for every endpoint.

Every request passes vLLM's output processor on its way to the engine core, and every token on its way back.
They are recorded there as they arrive, so that a request is recorded even if it is not streamed and its
client disconnects.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Self

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from raylight.engines.capture_context import CONSTRAINED, CURRENT, CaptureContext, Sample
from raylight.engines.vllm.args import SCHEDULER
from raylight.engines.vllm.constraints import is_constrained, limit_json, read_columns
from raylight.engines.vllm.images import place_images
from raylight.engines.vllm.scheduler import CANDIDATES, LOGPROBS, RECORDED
from raylight.types import FinishReason as Finish
from raylight.types import TokenSets

FINISH: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.REPETITION: "stop",
    FinishReason.LENGTH: "length",
}
"""All others are "aborted"."""
DEFAULTS = SamplingParams()
OWN_ARGS = {RECORDED, CANDIDATES}
ALWAYS_RECORDED = ("temperature", "top_p", "top_k", "min_p")
RECORDED_IF_SET = (
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logit_bias",
    "bad_words",
)


class Capture:
    """Records the sampled tokens of requests that have a current `CaptureContext`.

    vLLM has no hook for this, so one method of the client's output processor and one of its link to the
    engine core are replaced. The tests of this module fail if vLLM changes them.

    Args:
        client: an `AsyncLLM` whose event loop has not run since it was made.
    """

    def __init__(self, client: AsyncLLM) -> None:
        self.version = 0
        """Version of the current weights."""
        self.adapter_versions: dict[int, int] = {}
        """vLLM's integer id of an adapter -> its version, for all adapters ever loaded."""
        self.constraint_problem: str | None = None
        """Reason why constrained requests cannot be recorded; None if they can."""
        self.expert_layers: list[int] = []
        """Indices of the layers of experts, if routes are recorded; vLLM returns rows of other layers too."""
        config = client.vllm_config
        self._forbids_white_space: bool = config.structured_outputs_config.disable_any_whitespace
        self._gets_numbers = config.scheduler_config.scheduler_cls == SCHEDULER
        self._states: dict[str, RequestState] = client.output_processor.request_states
        self._queue: asyncio.Queue[object] = client.engine_core.outputs_queue
        self._add_request, client.output_processor.add_request = (
            client.output_processor.add_request,
            self._record,
        )
        self._next_output, client.engine_core.get_output_async = (
            client.engine_core.get_output_async,
            self._get_output,
        )
        self._idle = asyncio.Event()
        self._ended = False

    async def wait_until_recorded(self) -> None:
        """Wait until every token that has left the engine core is recorded."""
        if not (self._queue.empty() or self._ended):
            self._idle.clear()
        await self._idle.wait()

    async def _get_output(self) -> object:
        """Return the next output of the engine core.

        The caller has processed all earlier ones when it calls.
        """
        if self._queue.empty():
            self._idle.set()
        try:
            output = await self._next_output()
        except BaseException:  # vLLM does not call again
            self._ended = True
            self._idle.set()
            raise
        self._idle.clear()
        return output

    def _record(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None = None,
        index: int = 0,
        queue: object = None,
    ) -> None:
        """Add one choice of a request to vLLM; record it if there is a current capture context."""
        capture, params = CURRENT.get(), request.sampling_params
        if params is not None and params.extra_args is not None and OWN_ARGS & params.extra_args.keys():
            # of a client; only requests that are recorded here may have them
            params.extra_args = {k: v for k, v in params.extra_args.items() if k not in OWN_ARGS}
        if params is not None:
            params.routed_experts_prompt_start = 0  # a client's would cut routes off, or end the engine core
            if not self._forbids_white_space:
                limit_json(params)
        if capture is None or params is None:
            self._add_request(request, prompt, parent, index, queue)
            return
        choice = index + (parent.n if parent else 1) * prompt_index(capture, request.external_req_id)
        if choice in capture.samples:
            raise VLLMValidationError(
                "a request that samples a choice more than once (beam search) cannot be recorded; use n"
            )
        if self.constraint_problem is not None and is_constrained(params):
            raise VLLMValidationError(
                "an answer under a constraint (schema, required tool, bias, penalty) cannot be recorded for "
                f"training: {self.constraint_problem}"
            )
        if capture.max_tokens is not None:
            params.max_tokens = min(params.max_tokens or capture.max_tokens, capture.max_tokens)
        # the choices of a request share its parameters
        requested = (parent.sampling_params if parent else params).num_logprobs is not None
        if not requested:
            params.logprobs = 0  # only the sampled token's
            if self._gets_numbers and not is_constrained(params):
                params.extra_args = {**(params.extra_args or {}), RECORDED: True}
        record = sampling_record(params)
        records_candidates = self._gets_numbers and self.constraint_problem is None
        keeps_candidates = records_candidates and capture.keeps_candidates(record)
        if keeps_candidates:
            params.extra_args = {**(params.extra_args or {}), CANDIDATES: True}
        self._add_request(request, prompt, parent, index, queue)
        sample = capture.sample(choice, request.prompt_token_ids, record, place_images(request))
        sample.keeps_candidates = keeps_candidates
        version = self.adapter_versions[request.lora_request.lora_int_id] if request.lora_request else None
        state = self._states[request.request_id]
        state.logprobs_processor = RecordingLogprobs.wrap(
            state.logprobs_processor, sample, self, version, requested, is_constrained(params)
        )
        state.make_request_output = _wrap_output(state, sample)


class RecordingLogprobs(LogprobsProcessor):
    """Replaces a request's `LogprobsProcessor`, which receives each output of the engine core.

    If the request did not ask for log-probabilities, its response has none.
    """

    sample: Sample
    capture: Capture
    fixed_version: int | None
    requested: bool
    constrained: bool

    @classmethod
    def wrap(
        cls,
        original: LogprobsProcessor,
        sample: Sample,
        capture: Capture,
        version: int | None,
        requested: bool,
        constrained: bool,
    ) -> Self:
        """Take over the state of a processor.

        Args:
            version: version of the request's adapter; None: the version of the weights at each token.
            requested: True if the request asked for log-probabilities.
            constrained: True if the request has a constraint.
        """
        self = cls(**{field.name: getattr(original, field.name) for field in dataclasses.fields(original)})
        self.sample, self.capture, self.fixed_version = sample, capture, version
        self.requested, self.constrained = requested, constrained
        if not requested:
            self.logprobs = self.cumulative_logprob = self.num_logprobs = None
        return self

    def update_from_output(self, output: EngineCoreOutput) -> None:
        if count := len(output.new_token_ids):
            sample = self.sample
            version = self.capture.version if self.fixed_version is None else self.fixed_version
            sample.output_ids.extend(output.new_token_ids)
            if output.new_logprobs is None:
                assert output.kv_transfer_params is not None, "requested in Capture._record"
                sample.logprobs.extend(output.kv_transfer_params.pop(LOGPROBS))
            else:  # column 0 is the sampled token
                sample.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            if sample.keeps_candidates:
                parts = (output.kv_transfer_params or {}).pop(CANDIDATES, None)
                sample.candidates.append(
                    TokenSets.unrestricted(count)
                    if parts is None
                    else TokenSets(*(np.frombuffer(part, np.int32) for part in parts))
                )
            if self.constrained:
                policy_logprobs, allowed = read_columns(output.new_logprobs.logprobs)
                sample.policy_logprobs.extend(policy_logprobs)
                sample.allowed.extend(allowed)
            if output.routed_experts is not None:
                sample.routes.append(output.routed_experts[:, self.capture.expert_layers])
            sample.weight_versions.extend([version] * count)
        super().update_from_output(output)

    def _update_sample_logprobs(self, logprobs_lists: object) -> None:
        if self.requested:
            super()._update_sample_logprobs(logprobs_lists)


def _wrap_output(state: RequestState, sample: Sample) -> Callable[..., object]:
    """Wrap a request state's `make_request_output`, which alone receives the final finish reason. An answer
    has neither routes nor the emptied field in which the log-probs came."""
    make_output = state.make_request_output

    def make_request_output(
        new_token_ids: object,
        pooling_output: object,
        finish_reason: FinishReason | None,
        stop_reason: object,
        kv_transfer_params: object,
        ec_transfer_params: object,
    ) -> object:
        if finish_reason is not None:
            sample.finish_reason = FINISH.get(finish_reason, "aborted")
        state.routed_experts_chunks.clear()
        params = kv_transfer_params or None
        return make_output(
            new_token_ids, pooling_output, finish_reason, stop_reason, params, ec_transfer_params
        )

    return make_request_output


def prompt_index(capture: CaptureContext, request_id: str) -> int:
    """Return the index of a completions request's prompt, in which vLLM's request id ends."""
    return int(request_id.rpartition("-")[2]) if capture.dialect == "completions" else 0


def sampling_record(params: SamplingParams) -> Mapping[str, object]:
    """Return the parameters that shaped the sampling distribution."""
    record = {name: getattr(params, name) for name in ALWAYS_RECORDED}
    if params.structured_outputs is not None or params.allowed_token_ids:
        record[CONSTRAINED] = True
    return record | {
        name: value for name in RECORDED_IF_SET if (value := getattr(params, name)) != getattr(DEFAULTS, name)
    }
