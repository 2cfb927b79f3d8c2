"""The transport of weights of a run: it follows the hardware, which is known after the connection to Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit_helpers import ReachedRay

from raylight.algorithms.policy import GRPO
from raylight.errors import ConfigError
from raylight.trainer.hardware import Hardware, choose
from raylight.trainer.trainer import Trainer


def planned(run: Any, gpus: float) -> str:
    """Return the transport of a run that found GPUs."""
    engine = run.plan.engine.model_copy(update={"kind": "vllm"})
    choice = choose(Hardware(gpus), engine, run.plan.learner, 4096)
    object.__setattr__(run.plan, "engine", choice.engine)
    object.__setattr__(run.plan, "learner", choice.learner)
    run.finalize_plan()
    return str(run.plan.engine.weight_transfer)


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        (0, "auto", "gloo"),
        (1, "auto", "ipc"),
        (2, "auto", "nccl"),
        (2, "sharded_rdt", "sharded_rdt"),
    ],
)
def test_the_transport_follows_the_gpus_that_a_run_takes(
    gpus: float,
    asked: str,
    expected: str,
    planned_runs: list[Any],
    hollow_model: str,
    tmp_path: Path,
) -> None:
    trainer = Trainer(
        algorithm=GRPO(model=hollow_model), output_dir=str(tmp_path), engine={"weight_transfer": asked}
    )
    with pytest.raises(ReachedRay):
        trainer.fit(lambda task, llm: 1.0, [1, 2, 3])
    assert planned(planned_runs[0], gpus) == expected


def test_an_unknown_transport_is_refused_before_ray(hollow_model: str) -> None:
    trainer = Trainer(algorithm=GRPO(model=hollow_model), engine={"weight_transfer": "ncl"})
    with pytest.raises(ConfigError, match="no transport 'ncl'"):
        trainer.fit(lambda task, llm: 1.0, [1, 2, 3])


def test_a_transport_that_the_cluster_cannot_use_is_refused(
    planned_runs: list[Any], hollow_model: str, tmp_path: Path
) -> None:
    trainer = Trainer(
        algorithm=GRPO(model=hollow_model), output_dir=str(tmp_path), engine={"weight_transfer": "nccl"}
    )
    with pytest.raises(ReachedRay):
        trainer.fit(lambda task, llm: 1.0, [1, 2, 3])
    with pytest.raises(ConfigError, match="needs GPUs on both sides"):
        planned(planned_runs[0], 0)


@pytest.mark.parametrize("correction", [None, "token"])
def test_a_warning_above_the_default_limit_is_refused_unless_the_run_corrects(
    correction: str | None, planned_runs: list[Any], hollow_model: str, tmp_path: Path
) -> None:
    algorithm = GRPO(model=hollow_model, warn_logprob_mismatch=0.9, rollout_is=correction)
    with pytest.raises(ReachedRay):
        Trainer(algorithm=algorithm, output_dir=str(tmp_path)).fit(lambda task, llm: 1.0, [1, 2, 3])
    if correction is None:
        with pytest.raises(ConfigError, match="above the limit at which the run fails, 0"):
            planned(planned_runs[0], 0)
    else:
        planned(planned_runs[0], 0)
