"""vLLM with tensor parallelism on a separate node, which is lost and replaced while the run learns."""

from pathlib import Path

import pytest
from two_nodes import assert_survived_a_loss, run_on_two_nodes

ENGINE = {
    "kind": "vllm",
    "num_cpus": 1,
    "args": {"tensor_parallel_size": 2},
    "start_timeout_s": 400,  # it starts twice, for minutes on a busy machine
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("no_processes_left")
def test_a_run_learns_with_a_tensor_parallel_engine_on_another_node(tmp_path: Path) -> None:
    found = run_on_two_nodes(
        "replace", timeout_s=870, folder=str(tmp_path), steps=10, lost_after=3, engine=ENGINE
    )
    assert_survived_a_loss(found, steps=10)
