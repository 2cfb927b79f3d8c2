"""Custom resources in settings, and amounts in messages."""

import pytest

from raylight._utils.ray_resources import format_amounts
from raylight.config import EngineConfig, LearnerConfig, RunnerConfig
from raylight.errors import ConfigError


@pytest.mark.parametrize("config", [EngineConfig, LearnerConfig, RunnerConfig])
def test_roles_take_custom_resources(config: type) -> None:
    assert config(resources={"learner_node": 1, "accelerator_type:H100": 0.001}).resources == {
        "learner_node": 1.0,
        "accelerator_type:H100": 0.001,
    }


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"GPU": 1}, r"resources: .*'GPU' is not a custom resource; use num_gpus"),
        ({"CPU": 1}, "use num_cpus"),
        ({"memory": 1}, "nodes that have enough memory"),
        ({"fast": 0}, "greater than 0"),
        ({"fast": 1e300}, "less than or equal to 10000"),
        ({"fast": float("nan")}, "finite"),
    ],
)
def test_other_resources_are_refused(resources: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnerConfig(resources=resources)


def test_amounts_leave_out_memory_and_addresses() -> None:
    cluster = {"CPU": 8.0, "memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.7": 1.0, "agents": 2.0}
    assert format_amounts(cluster) == "8 CPU, 2 agents"
    assert format_amounts({}) == "none"
