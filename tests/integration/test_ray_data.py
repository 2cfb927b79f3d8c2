"""Datasets of Ray as training tasks."""

from __future__ import annotations

import gc

import pytest
from ray_cluster import Cluster

import raylight as rl
from raylight.errors import DatasetError
from raylight.trainer.spec.inputs import as_train_set


@pytest.mark.slow
def test_rows_are_read_in_the_order_of_the_blocks(shared_cluster: Cluster) -> None:
    with shared_cluster.connected():
        import ray.data

        dataset = ray.data.from_items([{"n": number} for number in range(40)], override_num_blocks=8)
        tasks = as_train_set(dataset)
        assert [task for _, task in tasks.parts()] == [{"n": number} for number in range(40)]
        sampler = rl.tasks.Stream(dataset).sampler(0)
        assert sampler.draw(41).task["n"] in range(40)  # it has begun again
        with pytest.raises(DatasetError, match="is empty"):
            as_train_set(dataset.filter(lambda row: False))
        sampler.close()
    del sampler, tasks, dataset
    gc.collect()
    assert not ray.is_initialized()
