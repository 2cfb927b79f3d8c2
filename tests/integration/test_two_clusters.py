"""A process that uses one cluster after another, like a notebook: each run uses its own cluster's Serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_cluster import free_port

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder


@pytest.mark.slow
def test_a_run_on_a_new_cluster_starts_its_own_serve(tmp_path: Path, no_processes_left: None) -> None:
    for number in (
        1,
        2,
    ):  # the second run requests another port, which a Serve that is already running would reject
        trainer = rl.Trainer(
            output_dir=tmp_path / str(number),
            n_runners=1,
            progress=False,
            address="local",
            port=free_port(),
            seed=0,
        )
        summary = trainer.evaluate(adder, additions(0)[1][:2], model=STARTER_MODEL)
        assert (summary["rollouts"], summary["failed"]) == (2, 0)
