"""Placement of ranks on nodes."""

import pytest

from raylight.config import LearnerConfig
from raylight.learner.ranks.group import bundles, order_by_node


@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        ({0: "a"}, [0]),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, [0, 1, 2, 3]),
        ({0: "a", 1: "b", 2: "a", 3: "b"}, [0, 2, 1, 3]),
        ({3: "b", 2: "c", 1: "a", 0: "b"}, [0, 3, 1, 2]),
    ],
)
def test_ranks_in_a_row_share_a_node(nodes: dict[int, str], order: list[int]) -> None:
    assert order_by_node(nodes) == order


def test_a_bundle_holds_the_custom_resources_of_a_rank() -> None:
    config = LearnerConfig(n=2, num_cpus=2, num_gpus=1, resources={"learner_node": 1})
    assert bundles(config) == [{"CPU": 2, "GPU": 1, "learner_node": 1}] * 2
