"""Tokens that could have been sampled, recorded in vLLM's workers for requests that truncate or penalise.

They travel to the API process in the fields of vLLM's own record of them, which needs its V2 model runner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists

from raylight.engines.candidates import find_candidates
from raylight.engines.vllm.scheduler import CANDIDATES
from raylight.types import TokenSets


class CandidateRecorder:
    """Extends a model runner, so that its outputs have the candidates of requests that ask for them.

    vLLM has no hook for this, so one method of the runner and one of its sampler are replaced. A runner that
    `ConstraintRecorder.problem` refuses cannot be extended.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._rows: list[int] = []
        """Rows of the current step whose candidates are recorded."""
        self._found = TokenSets()
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self._add_candidates
        sampler = runner.sampler
        self._gather, sampler.gather_logprobs = sampler.gather_logprobs, self._read

    def _add_candidates(self, grammar_output: Any) -> Any:
        """Sample as vLLM does, and add the candidates to the output."""
        rows = [row for row, name in enumerate(self._runner.input_batch.req_ids) if self._is_asked(name)]
        count, self._rows = len(self._runner.input_batch.req_ids), rows
        try:
            output = self._sample_tokens(grammar_output)
        finally:
            found, self._rows, self._found = self._found, [], TokenSets()
        if len(found.values):
            sizes = np.zeros(count, np.int64)
            sizes[rows] = found.sizes
            # an asynchronous output is completed later
            target = getattr(output, "_model_runner_output", output)
            target.sampling_masks = SamplingMaskLists(found.values, np.concatenate([[0], sizes.cumsum()]))
        return output

    def _is_asked(self, request_id: str) -> bool:
        params = self._runner.requests[request_id].sampling_params
        return params is not None and params.extra_args is not None and CANDIDATES in params.extra_args

    def _read(self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        """Gather as vLLM does, after reading the candidates of the step.

        Args:
            logprobs: of the distribution sampled from, shape (rows, vocabulary).
        """
        rows, self._rows = self._rows, []  # later in the step, vLLM gathers log-probs of prompts
        if rows:
            self._found = find_candidates(logprobs[rows])
        gathered: LogprobsTensors = self._gather(logprobs, num_logprobs, token_ids)
        return gathered
