"""Files of adapters, from which vLLM loads them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raylight.engines.protocol import LoraAdapter
from raylight.errors import WeightSyncError
from raylight.weights.peft_files import write_adapter

PREFIX = "raylight-adapters-"
MODEL, TEXT_PART = "base_model.model.model.", "base_model.model.model.language_model."
"""Beginning of the layers' names in peft's format, of a text model and of the text part of a published
checkpoint with a vision part."""
LOCK = "lock"
"""File in the folder of a process that it keeps locked while it lives."""


class AdapterFiles:
    """The folder of this process for its adapters.

    The folders of processes that ended without removing them are removed: nobody holds their locks.
    """

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_abandoned(folder)
        new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
        self._lock = open(new / LOCK, "wb")  # noqa: SIM115 (open until the process ends)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._folder = new.rename(new.with_name(new.name.removeprefix("new-")))  # locked from the beginning

    def write(self, adapter: LoraAdapter, prefix: str = MODEL) -> Path:
        """Write an adapter to a new folder, in peft's format.

        vLLM reads it again after evicting the adapter from memory.

        Args:
            prefix: beginning of the layers' names in the file, in place of `MODEL`.

        Raises:
            WeightSyncError: the adapter's patterns give parameters of one layer different scales.
        """
        weights = {
            prefix + name.removeprefix(MODEL) if name.startswith(MODEL) else name: array
            for name, array in _with_common_scale(adapter).items()
        }
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        write_adapter(folder, LoraAdapter(adapter.config, weights))
        return folder

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


def _with_common_scale(adapter: LoraAdapter) -> dict[str, Any]:
    """Return an adapter's weights for an engine that multiplies all layers by the same scale.

    vLLM ignores peft's `rank_pattern` and `alpha_pattern`, with which layers have other scales.
    """
    config, weights = adapter.config, dict(adapter.weights)
    ranks: dict[str, float] = config.get("rank_pattern") or {}
    alphas: dict[str, float] = config.get("alpha_pattern") or {}
    if not (ranks or alphas):
        return weights
    from peft.utils.other import get_pattern_key

    rank: float = config["r"]
    alpha: float = config["lora_alpha"]
    power = 0.5 if config.get("use_rslora") else 1.0
    for name, matrix in adapter.weights.items():
        if found := re.search(r"\.lora_(embedding_)?B(\.|$)", name):
            layer = name[: found.start()].removeprefix("base_model.model.").replace(".base_layer", "")
            scales = {
                alphas.get(get_pattern_key(list(alphas), key), alpha)
                / ranks.get(get_pattern_key(list(ranks), key), rank) ** power
                for key in _peft_keys(layer, config.get("target_parameters") or [])
            }
            if len(scales) > 1:
                raise WeightSyncError(
                    f"adapter: rank_pattern or alpha_pattern gives target_parameters of {layer} different "
                    "scales, and peft's files do not name the parameters; give all of them the same scale"
                )
            weights[name] = matrix * (scales.pop() / (alpha / rank**power))
    return weights


def _peft_keys(layer: str, targets: Sequence[str]) -> list[str]:
    """Return the names that peft may match with patterns for a layer.

    Args:
        targets: the adapter's `target_parameters`, which peft matches by the name of the parameter. Those
            without the name of a module may be in any layer.
    """
    split = [target.rpartition(".") for target in targets]
    named = [f"{layer}.{parameter}" for module, _, parameter in split if f".{layer}".endswith(f".{module}")]
    return [*(named or [layer]), *(f"{layer}.{parameter}" for module, _, parameter in split if not module)]


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user whose process has ended."""
    with contextlib.suppress(OSError):  # of another user, being made, being removed, or locked by its process
        if folder.lstat().st_uid != os.getuid():
            return
        with open(folder / LOCK, "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
