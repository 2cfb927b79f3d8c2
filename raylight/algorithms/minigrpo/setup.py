"""Construction of a run's engine and adapter trainer, after a check of the device's memory."""

from __future__ import annotations

import logging

import torch

from raylight.algorithms.minigrpo.adapter_trainer import AdapterTrainer
from raylight.algorithms.minigrpo.memory import MemoryEstimate, estimate_memory, free_bytes
from raylight.algorithms.minigrpo.settings import MiniGRPOSettings
from raylight.engines.transformers.trainable import TrainableEngine
from raylight.errors import ConfigError, DeviceMemoryError
from raylight.experience.correction_settings import default_limit

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""Name of the served model."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def select_device(settings: MiniGRPOSettings) -> torch.device:
    """Return the device of the run.

    Raises:
        ConfigError: torch has no such device.
    """
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        raise ConfigError(
            f"device={settings.device!r} is not a torch device; use 'auto', 'cpu', 'cuda' or 'cuda:1'"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={settings.device!r}, but torch finds no GPU; use 'cpu' or 'auto'")
    return device


def select_dtype(settings: MiniGRPOSettings, device: torch.device) -> torch.dtype:
    """Return the data type of the run."""
    chosen = ("bf16" if device.type == "cuda" else "fp32") if settings.dtype == "auto" else settings.dtype
    return DTYPES[chosen]


def check_memory(
    path: str, settings: MiniGRPOSettings, device: torch.device, dtype: torch.dtype
) -> MemoryEstimate:
    """Return the memory that the run needs.

    Raises:
        DeviceMemoryError: the limit, or the free memory of the device, is lower.
    """
    needed = estimate_memory(path, settings, dtype)
    logger.info("MiniGRPO on %s: %s", device, needed)
    limit = int(settings.memory_limit_gb * 1e9) if settings.memory_limit_gb else free_bytes(device)
    if needed.peak > limit:
        checkpointing = "" if settings.gradient_checkpointing else ", set gradient_checkpointing=True"
        bf16 = ", set dtype=bf16" if dtype == torch.float32 else ""
        raise DeviceMemoryError(
            f"the run needs {needed} on {device}, where {limit / 1e9:.2f} GB are available; "
            f"lower max_model_len, max_concurrent or max_tokens_per_micro_batch{checkpointing}{bf16}, "
            "or use a smaller model"
        )
    return needed


def build_engine_and_trainer(
    path: str, settings: MiniGRPOSettings
) -> tuple[TrainableEngine, AdapterTrainer, MemoryEstimate]:
    """Load the model into an engine and add the adapter to it."""
    device = select_device(settings)
    dtype = select_dtype(settings, device)
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
    mismatch = settings.max_logprob_mismatch or default_limit(dtype == torch.float32, routed=False)
    try:
        # before the first request; after it only the engine's thread may use the module
        trainer = AdapterTrainer(engine.module, settings, mismatch)
    except BaseException:
        engine.close()
        raise
    return engine, trainer, needed
