"""Log-probs of a prompt at a temperature other than 1, for a teacher, computed in vLLM's workers."""

from __future__ import annotations

from typing import Any

import torch

PROMPT_TEMPERATURE = "raylight_prompt_temperature"
"""Extra argument of a request: the temperature of its prompt's log-probs."""


class PromptTemperatures:
    """Extends a model runner, which computes prompt log-probs at temperature 1 only.

    vLLM has no hook for this, so one method of the runner and one of its sampler are replaced. The former
    runs once for all requests of a temperature.
    """

    METHOD = "_get_prompt_logprobs_dict"

    def __init__(self, runner: Any) -> None:
        self._runner, self._temperature = runner, 1.0
        self._compute = getattr(runner, self.METHOD)
        setattr(runner, self.METHOD, self._compute_each)
        sampler = runner.sampler
        self._normalise, sampler.compute_logprobs = sampler.compute_logprobs, self._scale

    def _compute_each(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, object]:
        runner, found = self._runner, dict[str, object]()
        pending: dict[str, int] = runner.num_prompt_logprobs
        by_temperature: dict[float, dict[str, int]] = {}
        for request_id, count in pending.items():
            arguments = runner.requests[request_id].sampling_params.extra_args or {}
            temperature = arguments.get(PROMPT_TEMPERATURE, 1.0)
            by_temperature.setdefault(temperature, {})[request_id] = count
        try:
            for self._temperature, part in by_temperature.items():
                runner.num_prompt_logprobs = part
                found |= self._compute(hidden_states, scheduled)
        finally:
            self._temperature, runner.num_prompt_logprobs = 1.0, pending
        for request_id in found:  # the runner removes those that it has computed
            del pending[request_id]
        return found

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        scaled = logits if self._temperature == 1 else logits.float() / self._temperature
        return self._normalise(scaled)
