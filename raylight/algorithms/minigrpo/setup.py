"""The engine and the tuner of a run, made once the memory for them is known to suffice."""

from __future__ import annotations

import logging

import torch

from raylight.algorithms.minigrpo.engine import TrainableEngine
from raylight.algorithms.minigrpo.memory import MemoryAccount, account, free_bytes
from raylight.algorithms.minigrpo.settings import MiniSettings
from raylight.algorithms.minigrpo.tuner import Tuner
from raylight.errors import ConfigError, DeviceMemoryError

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""The name under which the model is served."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def device_of(settings: MiniSettings) -> torch.device:
    """Where the run computes.

    Raises:
        ConfigError: there is no such device.
    """
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        raise ConfigError(
            f"MiniSettings.device: {settings.device!r} is no device; write 'auto', 'cpu', 'cuda' or 'cuda:1'"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"MiniSettings.device: {settings.device!r}, and torch finds no GPU; write 'cpu' or 'auto'"
        )
    return device


def dtype_of(settings: MiniSettings, device: torch.device) -> torch.dtype:
    chosen = ("bf16" if device.type == "cuda" else "fp32") if settings.dtype == "auto" else settings.dtype
    return DTYPES[chosen]


def check_memory(
    path: str, settings: MiniSettings, device: torch.device, dtype: torch.dtype
) -> MemoryAccount:
    """Tell what the run will need.

    Raises:
        DeviceMemoryError: there is less.
    """
    needed = account(path, settings, dtype)
    logger.info("MiniGRPO on %s: %s", device, needed)
    limit = int(settings.memory_limit_gb * 1e9) if settings.memory_limit_gb else free_bytes(device)
    if needed.peak > limit:
        raise DeviceMemoryError(
            f"the run needs {needed} on {device}, where {limit / 1e9:.2f} GB may be had; lower max_model_len, max_concurrent or "
            f"max_tokens_per_micro_batch{'' if settings.gradient_checkpointing else ', set gradient_checkpointing=True'}"
            f"{', set dtype=bf16' if dtype == torch.float32 else ''}, or take a smaller model"
        )
    return needed


def build(path: str, settings: MiniSettings) -> tuple[TrainableEngine, Tuner, MemoryAccount]:
    """Load the model, put the adapter into it, and have it sample."""
    device = device_of(settings)
    dtype = dtype_of(settings, device)
    needed = check_memory(path, settings, device, dtype)
    torch.manual_seed(settings.seed)
    engine = TrainableEngine(
        path,
        MODEL_NAME,
        max_new_tokens=settings.max_new_tokens,
        dtype=str(dtype).removeprefix("torch."),
        slots=settings.max_concurrent,
        max_waiting=4096,
        max_model_len=settings.max_model_len,
        seed=settings.seed,
        device=str(device),
    )
    mismatch = settings.max_logprob_mismatch or (1e-3 if dtype == torch.float32 else 0.5)
    try:
        tuner = Tuner(
            engine.module, settings, mismatch
        )  # before the first request; later only the engine's thread may
    except BaseException:
        engine.close()
        raise
    return engine, tuner, needed
