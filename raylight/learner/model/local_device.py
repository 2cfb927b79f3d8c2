"""Device of a model that the driver's process holds."""

from __future__ import annotations

import torch

from raylight.errors import ConfigError


def select_device(name: str) -> torch.device:
    """Return the torch device of a setting; "auto" is cuda if there is a GPU, else cpu.

    Raises:
        ConfigError: torch has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"device={name!r} is not a torch device; use 'auto', 'cpu', 'cuda' or 'cuda:1'"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch finds no GPU; use 'cpu' or 'auto'")
    return device
