"""Log-probs of the policy itself, and tokens that could have been sampled, recorded in vLLM's workers.

vLLM masks the logits in place (grammar) or adds to them (bias, penalties) before it samples, and returns the
log-probs of the result only. A learner needs the policy's. They must be taken in the worker between
the forward pass and the mask, so that they belong to the same weights as the sampled token. They travel to
the API process as two more columns of the log-probs, which only steps with a constrained request have.

Tokens that could have been sampled are recorded for requests that truncate or penalise. They travel in the
fields of vLLM's own record of them, which needs its V2 model runner.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists

from raylight.engines.candidates import find_candidates
from raylight.engines.grammar import limit_white_space
from raylight.engines.vllm.scheduler import CANDIDATES
from raylight.types import GREEDY_BELOW, NEVER_SAMPLED_BELOW, TokenSets

TOLERANCE = 1e-5
"""Difference of log-probs by rounding."""
_IS_CONSTRAINED = "raylight_is_constrained"


def is_constrained(params: SamplingParams) -> bool:
    """True if a request does more to the policy's distribution than temperature and truncation."""
    return bool(
        params.structured_outputs is not None
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or getattr(params, "thinking_token_budget", None) is not None
    )


def limit_json(params: SamplingParams) -> None:
    """Limit white space in a request's JSON. vLLM itself can only forbid it, in all requests.

    A JSON schema becomes xgrammar's structural tag of the same schema. Requests that vLLM constrains with
    another library stay as they are.
    """
    outputs = params.structured_outputs
    if outputs is None or outputs._backend != "xgrammar":
        return
    if outputs.structural_tag is not None:
        tag = json.loads(outputs.structural_tag)
        if "format" not in tag:  # the deprecated form, which has no such option
            return
        structure = tag["format"]
    elif outputs.json is not None or outputs.json_object:
        schema = {"type": "object"} if outputs.json is None else outputs.json
        schema = json.loads(schema) if isinstance(schema, str) else schema
        structure = {"type": "json_schema", "json_schema": schema}
    else:
        return
    outputs.json = outputs.json_object = None
    outputs.structural_tag = json.dumps({"type": "structural_tag", "format": limit_white_space(structure)})


def read_columns(logprobs: np.ndarray) -> tuple[list[float], list[int]]:
    """Return the policy's log-probs and the counts of allowed tokens from a constrained request's log-probs.

    Args:
        logprobs: shape (tokens, columns), as `ConstraintRecorder` extended them.
    """
    policy, allowed = logprobs[:, -2], logprobs[:, -1]
    assert not (policy < 1).any(), "the worker records all constrained requests that ask for log-probs"
    return (1.0 - policy.astype(np.float64)).tolist(), allowed.astype(np.int64).tolist()


class ConstraintRecorder:
    """Extends a model runner, so that the log-probs of constrained rows have two more columns.

    The columns are 1 minus the policy's log-prob of the sampled token, which is positive unlike all
    log-probs, and the number of tokens that could have been sampled, 0 if the constraint changed nothing. A
    client never sees them, because vLLM's answers have as many columns as the request asked for.

    vLLM has no hook for this, so one method of the runner and one of its sampler are replaced. The tests of
    this module fail if vLLM changes them.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._rows: list[int] = []
        self._policy: torch.Tensor | None = None
        """Logits of the constrained rows of the current step, before the constraint."""
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self._keep_logits
        sampler = runner.sampler
        self._gather, sampler.gather_logprobs = sampler.gather_logprobs, self._add_columns

    @staticmethod
    def problem(runner: Any) -> str | None:
        """Return the reason why a runner cannot be extended; None if it can."""
        if not (hasattr(runner, "input_batch") and hasattr(runner, "execute_model_state")):
            return "vLLM runs its V2 model runner; start the run with VLLM_USE_V2_MODEL_RUNNER=0"
        if runner.speculative_config is not None:
            return "vLLM runs with speculative decoding; leave out speculative_config"
        return None

    def _keep_logits(self, grammar_output: object) -> object:
        """Sample as vLLM does, with the constrained rows' logits kept aside."""
        state, metadata = self._runner.execute_model_state, self._runner.input_batch.sampling_metadata
        if state is not None and state.logits is not None and metadata.max_num_logprobs is not None:
            self._rows = self._constrained_rows()
            if self._rows:
                self._policy = state.logits[self._rows].float()
        try:
            return self._sample_tokens(grammar_output)
        finally:
            self._rows, self._policy = [], None

    def _constrained_rows(self) -> list[int]:
        requests = self._runner.requests
        rows = []
        for row, request_id in enumerate(self._runner.input_batch.req_ids):
            request = requests[request_id]
            known = vars(request).get(_IS_CONSTRAINED)
            if known is None:
                params = request.sampling_params
                known = params is not None and is_constrained(params)
                setattr(request, _IS_CONSTRAINED, known)
            if known:
                rows.append(row)
        return rows

    def _add_columns(
        self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """Gather as vLLM does, and add the columns.

        Args:
            logprobs: of the distribution sampled from, shape (rows, vocabulary).
            token_ids: the sampled tokens.
        """
        gathered = self._gather(logprobs, num_logprobs, token_ids)
        kept, self._policy = self._policy, None  # later in the step, vLLM gathers log-probs of prompts
        if kept is None:
            return gathered
        rows = torch.tensor(self._rows, device=logprobs.device)
        policy = (kept / self._temperatures(rows)).log_softmax(-1)
        sampled = logprobs[rows]
        changed = ~torch.isclose(sampled, policy, rtol=0, atol=TOLERANCE)
        allowed = (sampled > NEVER_SAMPLED_BELOW).sum(-1).where(changed.any(-1), 0)
        columns = torch.full((len(logprobs), 2), -torch.inf, device=logprobs.device)
        columns[rows, 0] = 1 - policy.gather(-1, token_ids[rows][:, None])[:, 0]
        columns[rows, 1] = allowed.float()
        no_tokens = torch.zeros_like(columns, dtype=gathered.logprob_token_ids.dtype)
        return gathered._replace(
            logprob_token_ids=torch.cat([gathered.logprob_token_ids, no_tokens], 1),
            logprobs=torch.cat([gathered.logprobs, columns], 1),
        )

    def _temperatures(self, rows: torch.Tensor) -> torch.Tensor | float:
        """Return the temperatures of rows, shape (rows, 1), 1 for greedy ones."""
        temperature = self._runner.input_batch.sampling_metadata.temperature
        if temperature is None:
            return 1.0
        chosen = temperature[rows]
        return torch.where(chosen < GREEDY_BELOW, 1.0, chosen)[:, None]


def repair_allowed_tokens(batch: type[Any]) -> None:
    """Make a class of vLLM's batches keep the allowed tokens of each request apart.

    vLLM leaves a request's allowed tokens in a row that it has moved, and restricts the row's next
    request to them. It also swaps two rows as views of one tensor, so that both get the tokens of one. The
    record of the other request does not show it.
    """
    if getattr(batch, "raylight_repaired", False):
        return
    add, swap = batch.add_request, batch.swap_states

    def add_request(self: Any, request: Any) -> int:
        row: int = add(self, request)
        mask, params = self.allowed_token_ids_mask_cpu_tensor, request.sampling_params
        if mask is not None and not (params and params.allowed_token_ids):
            mask[row] = False
        return row

    def swap_states(self: Any, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        swapped = None if mask is None else mask[[i2, i1]].clone()
        swap(self, i1, i2)
        if swapped is not None:
            mask[[i1, i2]] = swapped

    batch.add_request, batch.swap_states = add_request, swap_states
    batch.raylight_repaired = True


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

    def _add_candidates(self, grammar_output: object) -> object:
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
        return self._gather(logprobs, num_logprobs, token_ids)
