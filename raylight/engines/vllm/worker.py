"""Extension of vLLM's worker processes, which loads weights from a file and records constraints.

The module is imported by its dotted name in each worker, and so imports neither torch nor vllm itself.
"""

from __future__ import annotations

from typing import Any

WORKER_EXTENSION = "raylight.engines.vllm.worker.WorkerExtension"


class WorkerExtension:
    """Mixin of vLLM's worker class. Its methods are called through `collective_rpc`."""

    model_runner: Any

    def raylight_load_weights(self, path: str) -> int:
        """Load tensors by their Hugging Face names, while nothing is scheduled; returns their number.

        vLLM shards and repacks them for its kernels, and copies them to the worker's own device.
        """
        import torch

        weights = torch.load(path, mmap=True, weights_only=True)
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
        return len(weights)

    def raylight_record_constraints(self) -> str | None:
        """Record the policy's log-probs of constrained requests from now on.

        Returns the reason if this is not possible, else None.
        """
        from raylight.engines.vllm.constraints import ConstraintRecorder, repair_allowed_tokens

        problem = ConstraintRecorder.problem(self.model_runner)
        if problem is None:
            repair_allowed_tokens(type(self.model_runner.input_batch))
            ConstraintRecorder(self.model_runner)
        return problem
