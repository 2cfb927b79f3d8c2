"""Treatment of an engine in a run: its capabilities decide, and not its name."""

import json
from pathlib import Path

import pytest

from raylight.config import EngineConfig, LearnerConfig
from raylight.engines.registry import ENGINES, EngineTraits, engine_traits, model_engines
from raylight.errors import ConfigError
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.cluster_fit.hardware import Hardware, Workload, choose
from raylight.trainer.cluster_fit.model_shape import read_shape
from raylight.trainer.cluster_fit.policy_checks import engine_with_routes, engine_with_transport
from raylight.trainer.cluster_fit.role_needs import engine_memory
from raylight.trainer.cluster_fit.scoring_models import longest_row

ABLE = EngineTraits(
    "package.module:Engine",
    loads_model=True,
    process_bytes=1234,
    memory_arg="share",
    sleep_arg="naps",
    vllm_transfer=True,
    scores_by_sampling=True,
    routes_arg="routes",
    routeless_args=("pieces",),
)
UNABLE = EngineTraits("package.module:Engine", loads_model=True)


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4}))
    return str(tmp_path)


def on_shared_gpu(kind: str) -> tuple[EngineConfig, LearnerConfig]:
    """Return the settings of an engine and a learner that share a GPU."""
    found = choose(Hardware(1), EngineConfig(kind=kind), LearnerConfig(), Workload(4096))
    assert found.learner is not None
    return found.engine, found.learner


@pytest.mark.parametrize("kind", ["toy", "transformers"])
def test_an_engine_with_capabilities(kind: str, mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, kind, ABLE)
    assert kind in model_engines()
    engine, learner = on_shared_gpu(kind)
    assert engine.sleep_while_learning
    assert engine.args == {"share": 0.4, "naps": True}
    assert engine_with_transport(engine, learner, overlaps=False).weight_transfer == "ipc"
    assert engine_with_routes(engine, mixture).args == engine.args | {"routes": True}
    cut = engine.model_copy(update={"args": {"pieces": 2}})
    with pytest.raises(ConfigError, match=f"{kind} does not return the experts of each token with pieces"):
        engine_with_routes(cut, mixture)
    assert longest_row(EngineConfig(kind=kind, max_model_len=100)) == 99
    items = engine_memory(str(STARTER_MODEL), read_shape(str(STARTER_MODEL)), engine, 2**33).items
    assert items[0].size == 1234
    assert [item.grows for item in items if item.name == "key-value cache"] == [False]


@pytest.mark.parametrize("kind", ["toy", "vllm"])
def test_an_engine_without_capabilities(kind: str, mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, kind, UNABLE)
    engine, learner = on_shared_gpu(kind)
    assert (engine.num_gpus, engine.sleep_while_learning, engine.args) == (0.4, False, {})
    assert engine_with_transport(engine, learner, overlaps=False).weight_transfer == "gloo"
    with pytest.raises(ConfigError, match=r"set engine\.kind to 'transformers'"):
        engine_with_routes(engine, mixture)
    assert longest_row(EngineConfig(kind=kind, max_model_len=100)) == 100
    items = engine_memory(str(STARTER_MODEL), read_shape(str(STARTER_MODEL)), engine, 2**33).items
    assert [item.grows for item in items if item.name == "key-value cache"] == [True]


def test_an_engine_by_dotted_name_has_no_capability_and_is_not_imported() -> None:
    assert engine_traits("package.module:Engine") == EngineTraits("package.module:Engine")
    assert not engine_traits("upstream").loads_model
