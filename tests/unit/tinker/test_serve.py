"""The engines and the trainer of a Tinker server share what the cluster has."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_settings import KnownFacts, served_settings

from raylight.config import EngineConfig
from raylight.tinker import serve
from raylight.tinker.serve import TinkerConfig, fit_trainer


@pytest.mark.parametrize(
    ("gpus", "asked", "given", "engine", "trainer"),
    [
        (0, {}, {}, {"num_threads": 1}, {"num_threads": 1}),
        (0, {}, {"learner_cpus": 1.5}, {"num_threads": 1}, {"num_cpus": 1.5}),
        (1, {}, {}, {"num_gpus": 0.4, "args": {"gpu_memory_utilization": 0.4}}, {"num_gpus": 0.6}),
        (1, {}, {"learner_gpus": 0.5}, {"num_gpus": 0.5}, {"num_gpus": 0.5}),
        (2, {}, {}, {"num_gpus": 1}, {"num_gpus": 1}),
        (1, {}, {"learner_gpus": 0}, {"num_gpus": 1}, {"num_gpus": 0, "num_threads": 2}),
        (1, {}, {"learner_gpus": 1}, {"num_gpus": 0, "num_threads": 2}, {"num_gpus": 1}),
        (1, {"num_gpus": 1}, {}, {"num_gpus": 1}, {"num_gpus": 0}),
        (3, {"replicas": 3, "num_gpus": 0.6}, {}, {"num_gpus": 0.6}, {"num_gpus": 0}),
        (1, {"replicas": 2}, {}, {"num_gpus": 0}, {"num_gpus": 0}),
        (2, {"replicas": 2}, {}, {"num_gpus": 1}, {"num_gpus": 0}),
    ],
)
def test_the_engine_and_the_trainer_share_the_cluster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    asked: Any,
    given: Any,
    engine: Any,
    trainer: Any,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    monkeypatch.setattr(serve, "count_parameters", lambda folder: 135_000_000)
    requested = EngineConfig(kind="vllm", **asked)
    serving = served_settings(str(tmp_path), requested).serving
    found, learner, notes = fit_trainer(serving, requested, TinkerConfig(**given), KnownFacts(gpus))
    on_gpu = {"dtype": "bfloat16", "max_model_len": 4096} if engine.get("num_gpus") else {}
    expected = {"sleep_while_learning": False, **on_gpu, **engine}
    assert {name: getattr(found.engine, name) for name in expected} == expected
    assert {name: getattr(learner, name) for name in trainer} == trainer
    shares = f"{found.engine.num_gpus:g} for each engine, {learner.num_gpus:g} for the trainer"
    uses_gpus = bool(found.engine.num_gpus or learner.num_gpus)
    assert (f"GPUs: {gpus} in the cluster; {shares}" in notes) == uses_gpus
    assert any("on a CPU" in note for note in notes) == (asked == {"replicas": 2} and gpus == 1)
