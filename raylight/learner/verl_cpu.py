"""CPU platform for verl, registered through verl's plugin point. Imported by `verl_api` only."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

ZERO_FUNCTIONS = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
NO_OPS = (
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "set_device",
    "manual_seed",
    "manual_seed_all",
)


class _CpuModule(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name)


def _cpu_module() -> types.ModuleType:
    module = _CpuModule("cpu_device")
    for name in ZERO_FUNCTIONS:
        setattr(module, name, lambda *args, **kwargs: 0)
    for name in NO_OPS:
        setattr(module, name, lambda *args, **kwargs: None)
    values: dict[str, object] = {
        "get_device_name": lambda *args, **kwargs: "cpu",
        "mem_get_info": lambda *args, **kwargs: (0, 0),
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    for name, value in values.items():
        setattr(module, name, value)
    return module


def install_platform() -> None:
    """Make the CPU verl's platform. This must run before `verl.workers.engine` is imported."""
    if PlatformRegistry.get("cpu") is None:
        PlatformRegistry.register(platform="cpu")(_platform_class())
    platform: Any = PlatformRegistry.get("cpu")
    set_platform(platform())


def _platform_class() -> type:
    module = _cpu_module()
    constants: dict[str, object] = {
        "is_available": True,
        "current_device": torch.device("cpu"),
        "device_count": 1,
        "set_device": None,
        "synchronize": None,
        "set_allocator_settings": None,
        "empty_cache": None,
        "get_device_capability": (None, None),
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "profiler_start": None,
        "profiler_stop": None,
        "ray_resource_name": "CPU",
        "ray_resource_options": {"num_gpus": 0},
        "ray_noset_envvars": [],
        "is_ipc_supported": False,
        "cudart": None,
    }
    body: dict[str, object] = {name: _constant(value) for name, value in constants.items()}
    body.update(
        device_name="cpu",
        vendor_name="cpu",
        device_module=module,
        manual_seed=lambda self, seed: torch.manual_seed(seed),
        manual_seed_all=lambda self, seed: torch.manual_seed(seed),
        nvtx_range=lambda self, message: contextlib.nullcontext(),
    )
    return type("PlatformCPU", (PlatformBase,), body)


def _constant(value: object) -> object:
    return lambda self, *args, **kwargs: value
