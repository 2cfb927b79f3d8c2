"""Several clusters on one machine, one after another or at once: each run uses its own cluster's Serve."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ray_cluster import BIN, Cluster, free_port

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


@pytest.mark.slow
def test_two_runs_side_by_side_beside_a_cluster(
    cluster: Cluster, tmp_path: Path, no_processes_left: None
) -> None:
    """Each run starts its own cluster, although RAY_ADDRESS names another one."""
    runs = []
    for name in ("a", "b"):
        command = [str(BIN / "raylight"), "quickstart", "--steps", "1", "--address", "local"]
        runs.append(
            subprocess.Popen(
                [*command, "--output-dir", str(tmp_path / name)],
                env=cluster.env(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for run in runs:
        output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output
        assert "started the Ray cluster at" in output
        assert cluster.address not in output
    cluster.assert_clean()
