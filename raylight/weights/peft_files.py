"""LoRA adapters as files in peft's format."""

from __future__ import annotations

import json
import os
from pathlib import Path

from raylight.weights.protocol import LoraAdapter

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter: its configuration and its weights."""


def missing_files(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the files that a folder lacks to be an adapter."""
    return [name for name in ADAPTER_FILES if not Path(folder, name).is_file()]


def read_rank(folder: str | os.PathLike[str]) -> int:
    """Return the highest rank of an adapter's layers; peft's default if its configuration names none."""
    config = json.loads(Path(folder, ADAPTER_FILES[0]).read_text())
    return max([config.get("r", 8), *(config.get("rank_pattern") or {}).values()])


def read_adapter(folder: str | os.PathLike[str]) -> LoraAdapter:
    """Read an adapter, with its weights as tensors."""
    from safetensors.torch import load_file

    config, weights = (Path(folder, name) for name in ADAPTER_FILES)
    return LoraAdapter(json.loads(config.read_text()), load_file(weights))


def write_adapter(folder: Path, adapter: LoraAdapter) -> None:
    """Write an adapter, whose weights are arrays or tensors, to an existing folder."""
    import torch
    from safetensors.torch import save_file

    config, weights = (folder / name for name in ADAPTER_FILES)
    config.write_text(json.dumps(dict(adapter.config), indent=2) + "\n")
    save_file({name: torch.as_tensor(array).contiguous() for name, array in adapter.weights.items()}, weights)
