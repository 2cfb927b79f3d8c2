"""Facts of the connected cluster."""

from __future__ import annotations

from functools import cached_property

import ray

from raylight._utils.machine import available_cpus
from raylight.config import EngineConfig
from raylight.trainer.cluster_fit.engine_nodes import engine_on_nodes
from raylight.trainer.cluster_fit.hardware import Hardware, connected_hardware


class ClusterFacts:
    """Facts of the connected cluster that settings of a run depend on, each read when first needed."""

    @cached_property
    def resources(self) -> dict[str, float]:
        """Total resources, as Ray names them."""
        return ray.cluster_resources()

    @cached_property
    def cores(self) -> int:
        """CPUs that compute. A local cluster has more in Ray than the machine, so that small ones suffice."""
        cores = int(self.resources.get("CPU", 0))
        return min(cores, available_cpus()) if len(ray.nodes()) == 1 else cores

    @cached_property
    def hardware(self) -> Hardware:
        """GPUs and CPUs; see `connected_hardware`."""
        return connected_hardware()

    def engine_on_nodes(self, requested: EngineConfig, engine: EngineConfig) -> EngineConfig:
        """Return the settings of an engine that the nodes can run; see the function of this name."""
        return engine_on_nodes(requested, engine)
