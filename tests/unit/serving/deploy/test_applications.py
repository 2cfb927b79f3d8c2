"""Engines that fit the cluster's nodes, and those that do not."""

import pytest

from raylight.config import EngineConfig
from raylight.errors import EngineStartError
from raylight.serving.deploy.deployment import check_node_size

EIGHT = {"CPU": 64.0, "GPU": 8.0}


def config(gpus: float = 1, **args: int) -> EngineConfig:
    return EngineConfig(kind="vllm", num_gpus=gpus, args=args)


@pytest.mark.parametrize(
    ("engine", "nodes"),
    [
        (config(), [EIGHT]),
        (config(tensor_parallel_size=8), [{"CPU": 4.0}, EIGHT]),
        (config(tensor_parallel_size=16), [{"CPU": 4.0}]),
        (config(tensor_parallel_size=8, pipeline_parallel_size=2), [EIGHT, EIGHT]),
        (config(0, tensor_parallel_size=2), [EIGHT]),
    ],
    ids=["one GPU", "a whole node", "no GPU node yet", "two stages", "on CPUs"],
)
def test_an_engine_that_may_fit(engine: EngineConfig, nodes: list[dict[str, float]]) -> None:
    check_node_size(engine, nodes)


def test_an_engine_that_is_larger_than_every_node_is_refused() -> None:
    with pytest.raises(
        EngineStartError, match=r"needs 16 GPUs on one node, and the largest node has 8\. Lower it to 8"
    ):
        check_node_size(config(tensor_parallel_size=16), [EIGHT, EIGHT, {"CPU": 8.0}])
