"""The engine `auto` is the one that the GPU nodes have."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raylight.config import EngineConfig, LearnerConfig
from raylight.errors import ConfigError
from raylight.trainer.cluster_fit import engine_nodes
from raylight.trainer.cluster_fit.engine_nodes import can_run, check_image_scaling, decide, engine_on_nodes

AUTO = EngineConfig(num_gpus=1)
VLLM = EngineConfig(kind="vllm", num_gpus=1)


def chosen(kind: str) -> EngineConfig:
    return EngineConfig(kind=kind, num_gpus=1)


@pytest.mark.parametrize(
    ("requested", "driver_has", "nodes", "kind"),
    [
        (AUTO, True, {}, "vllm"),
        (AUTO, False, {}, "transformers"),
        (AUTO, True, {"a": True, "b": True}, "vllm"),
        (AUTO, True, {"a": False, "b": False}, "transformers"),
        (AUTO, False, {"a": False}, "transformers"),
        (VLLM, True, {"a": True}, "vllm"),
    ],
)
def test_the_nodes_decide(
    requested: EngineConfig, driver_has: bool, nodes: dict[str, bool], kind: str
) -> None:
    engine = chosen("vllm" if driver_has else "transformers")
    assert decide(requested, engine, driver_has, nodes).kind == kind


@pytest.mark.parametrize(
    ("requested", "driver_has", "nodes", "message"),
    [
        (
            AUTO,
            True,
            {"a": True, "b": False},
            r"not installed on the GPU node\(s\) b, and it is on other GPU",
        ),
        (AUTO, False, {"a": True}, "not installed on the driver's node, and it is on the GPU nodes"),
        (VLLM, True, {"b": False, "a": False}, r"GPU node\(s\) a, b, and it is on the driver's node"),
    ],
)
def test_a_cluster_with_vllm_on_some_nodes_is_refused(
    requested: EngineConfig, driver_has: bool, nodes: dict[str, bool], message: str
) -> None:
    engine = chosen("vllm" if driver_has else "transformers")
    with pytest.raises(ConfigError, match=message):
        decide(requested, engine, driver_has, nodes)


def test_arguments_of_vllm_are_refused_if_the_nodes_have_none() -> None:
    requested = EngineConfig(num_gpus=1, args={"gpu_memory_utilization": 0.5})
    with pytest.raises(ConfigError, match="transformers engine has no argument 'gpu_memory_utilization'"):
        decide(requested, requested.model_copy(update={"kind": "vllm"}), True, {"a": False})


@pytest.mark.parametrize(
    ("requested", "engine"),
    [
        (EngineConfig(), EngineConfig(kind="transformers")),
        (chosen("transformers"), chosen("transformers")),
        (EngineConfig(url="http://x/v1"), EngineConfig(kind="upstream", url="http://x/v1")),
    ],
    ids=["on a CPU", "chosen", "upstream"],
)
def test_no_node_is_asked_without_need(
    requested: EngineConfig, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(engine_nodes.ray, "nodes", fail)
    assert engine_on_nodes(requested, engine) is engine


def test_only_nodes_with_the_engines_resources_count() -> None:
    engine = EngineConfig(num_gpus=1, resources={"engine_node": 1})
    assert can_run(engine, {"GPU": 8.0, "engine_node": 8.0})
    assert not can_run(engine, {"GPU": 8.0})
    assert not can_run(engine, {"engine_node": 8.0})


@pytest.mark.parametrize(
    ("with_it", "fails"), [("b", True), ("ab", False), ("", False), ("abc", False), ("c", False)]
)
def test_torchvision_on_some_nodes_alone_is_refused(
    with_it: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's node is a, and c runs agents alone. The driver need not be able to load the processor."""
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    (tmp_path / "preprocessor_config.json").touch()
    resources = {"a": {"CPU": 2.0}, "b": {"GPU": 1.0}, "c": {"CPU": 8.0}}
    nodes = [
        {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": resources[name]}
        for name in "abc"
    ]
    monkeypatch.setattr(engine_nodes.ray, "nodes", lambda: nodes)
    context = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(engine_nodes.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(engine_nodes, "ask_nodes", lambda asked, _: {name: name in with_it for name in asked})
    expected = pytest.raises(ConfigError, match="not installed on a, and it is on other nodes")
    with expected if fails else contextlib.nullcontext():
        check_image_scaling(str(tmp_path), AUTO, LearnerConfig(num_gpus=1))
