"""What raylight adds to vLLM's workers, which are processes of their own: loading weights from a file."""

from __future__ import annotations

from typing import Any

WORKER_EXTENSION = "raylight.engines.vllm.worker.WeightLoading"


class WeightLoading:
    """Mixed into vLLM's worker class; its methods are called through `collective_rpc`."""

    model_runner: Any

    def raylight_load_weights(self, path: str) -> int:
        """Load a checkpoint's tensors, by the names of its Hugging Face model, while nothing is scheduled.
        Returns how many.

        vLLM shards and repacks them for its kernels, and copies them to the worker's own device.
        """
        import torch

        weights = torch.load(path, mmap=True, weights_only=True)
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
        return len(weights)
