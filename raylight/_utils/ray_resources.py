"""Resources of Ray: custom ones in settings, and amounts in messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from raylight._utils.bounds import MAX_PROCESSES

OWN_SETTINGS = {
    "CPU": "num_cpus",
    "GPU": "num_gpus",
    "memory": "a custom resource of the nodes that have enough memory",
    "object_store_memory": "a custom resource of the nodes that have enough memory",
}
"""Ray's own resources -> what to set instead of a custom resource of that name."""


def _check_names(resources: dict[str, float]) -> dict[str, float]:
    for name in resources:
        if name in OWN_SETTINGS:
            raise ValueError(f"{name!r} is not a custom resource; use {OWN_SETTINGS[name]}")
    return resources


CustomResources = Annotated[
    dict[str, Annotated[float, Field(gt=0, le=MAX_PROCESSES)]], AfterValidator(_check_names)
]
"""Amounts of Ray's custom resources by name."""


def format_amounts(resources: Mapping[str, object]) -> str:
    """Return the CPUs, the GPUs and the custom resources among resources as text."""
    custom = sorted(name for name in resources if name not in OWN_SETTINGS and ":" not in name)
    amounts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU", *custom) if resources.get(name)]
    return ", ".join(amounts) or "none"
