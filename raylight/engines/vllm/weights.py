"""Full weights for vLLM: validation, tied tensors, and a file that its workers can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from raylight.errors import WeightSyncError


class ExpectedWeights:
    """Names and shapes of a model's tensors, as transformers names them.

    Args:
        path: folder or hub name of a Hugging Face model. Only its configuration is read.
    """

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)
        """Name of a tied tensor -> name of the tensor that it shares."""

    def complete(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return `weights` as tensors, completed with every tied tensor.

        vLLM on a CPU keeps a repacked copy of the output layer, which would otherwise stay unchanged
        without any error.

        Raises:
            WeightSyncError: a tensor is missing, unknown, or of another shape.
        """
        import torch

        tensors = {name: torch.as_tensor(array) for name, array in weights.items()}
        for name, source in self.tied.items():
            if name not in tensors and source in tensors:
                tensors[name] = tensors[source]
        missing, unknown = self.shapes.keys() - tensors.keys(), tensors.keys() - self.shapes.keys()
        if missing or unknown:
            raise WeightSyncError(
                f"weights do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
            )
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != self.shapes[name]:
                raise WeightSyncError(
                    f"{name} has shape {tuple(tensor.shape)}; the engine's has {self.shapes[name]}"
                )
        return tensors


@contextlib.contextmanager
def shared_file(tensors: Mapping[str, Any]) -> Iterator[str]:
    """Write tensors to an in-memory file and yield its path, for other processes of this machine.

    The file is deleted with the context, or with this process.
    """
    import torch

    with os.fdopen(os.memfd_create("raylight-weights"), "wb") as file:
        torch.save(dict(tensors), file)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
