"""Engine settings for a small machine, shared by the benchmark and the training's `--debug`."""

from __future__ import annotations

from typing import Any


def engine(max_model_len: int = 1024) -> dict[str, Any]:
    """Return engine settings for 4 GB: half precision on a GPU, few concurrent sequences."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "kind": "transformers",
        "num_gpus": 1 if on_gpu else 0,
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_model_len": max_model_len,
        "max_concurrent": 16,
    }
