"""The adapter that the engines serve under the name of the model."""

from typing import Any, cast

import pytest
from run_settings import policy_settings
from unit_helpers import within

from raylight.algorithms.policy import GRPO
from raylight.config import (
    EngineConfig,
    LearnerConfig,
    LoraConfig,
)
from raylight.engines.protocol import LoraAdapter
from raylight.errors import ConfigError, EngineStartError, WeightSyncError
from raylight.learner.adapter import adapted_layers
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.cluster_fit.cluster_settings import finish_trained
from raylight.trainer.spec import served_adapter
from raylight.trainer.spec.settings import MODEL_NAME

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_the_adapted_layers_of_a_model():
    assert adapted_layers(str(STARTER_MODEL), LoraConfig()) == LINEAR
    chosen = LoraConfig(target_modules=["q_proj", "v_proj"], exclude_modules=["v_proj"])
    assert adapted_layers(str(STARTER_MODEL), chosen) == ["q_proj"]
    for settings, message in [
        ({"target_modules": ["nowhere"]}, "do not fit"),
        ({"target_modules": ["embed_tokens"]}, "matches model.embed_tokens, which cannot be adapted"),
        ({"target_modules": ["lm_head"]}, "matches lm_head, which cannot be adapted"),
    ]:
        with pytest.raises(ConfigError, match=message):
            adapted_layers(str(STARTER_MODEL), LoraConfig(**settings))


def with_adapter(engine: dict[str, Any], lora: dict[str, Any] | None, staleness: int = 0) -> EngineConfig:
    """Return the engine of a run whose learners have an adapter."""
    learner = LearnerConfig(lora=None if lora is None else LoraConfig(**lora))
    algorithm = GRPO(model="m", max_staleness=staleness)
    settings = policy_settings(str(STARTER_MODEL), EngineConfig(**engine), learner, algorithm)
    return finish_trained(settings).serving.engine


def test_an_engine_gets_room_for_the_adapter_and_vllm_its_layers():
    for engine, lora in [({"kind": "vllm"}, None), ({"kind": "vllm"}, {"serve": "merged"})]:
        assert with_adapter(engine, lora) == EngineConfig(**engine, weight_transfer="gloo")
    changed = with_adapter({"kind": "transformers"}, {})
    assert (changed.max_adapters, changed.args) == (1, {})
    changed = with_adapter({"kind": "vllm", "max_adapters": 3}, {"rank": 4})
    assert changed.max_adapters == 3
    assert changed.args == {"max_lora_rank": 4, "lora_target_modules": LINEAR}
    assert with_adapter({"kind": "vllm"}, {}, staleness=2).max_adapters == 2, "one is pinned"
    own = {"max_lora_rank": 32, "enforce_eager": True}
    changed = with_adapter({"kind": "vllm", "args": own}, {})
    assert changed.args == own | {"lora_target_modules": LINEAR}


class Learners:
    async def export_adapter(self) -> tuple[int, LoraAdapter]:
        return 0, LoraAdapter({}, {})


class Replicas:
    """Replicas that fail to load anything."""

    async def publish(self, version: int, payload_ref: list[Any], timeout: float, *, adapter: str) -> int:
        assert (version, adapter) == (0, MODEL_NAME)
        raise WeightSyncError("replica a: expected target modules in ['q_proj']")


async def test_an_engine_that_cannot_serve_the_adapter_fails_at_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served_adapter.ray, "put", lambda value: value)
    learners, replicas = cast(Any, Learners()), cast(Any, Replicas())
    with pytest.raises(EngineStartError, match=r"expected target modules.*lora\.serve='merged'"):
        async with within():
            await served_adapter.publish_initial(learners, replicas, 1.0)
