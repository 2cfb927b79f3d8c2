"""Routes that the engine recorded are replayed in the learner's passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from routed_rows import GLM, check_routes, sample
from tiny_models import build_model
from transformers import AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.experience.settings.supervised_settings import SupervisedSettings
from raylight.learner.model.verl_engines import build_policy
from raylight.learner.model.weights import save_model
from raylight.types import Trajectory

SETTINGS = PolicySettings(lr=1e-3, max_logprob_mismatch=1e-3)
MIXTURES = {"qwen3_moe": {}, "gpt_oss": {}, "glm4_moe": GLM}


pytestmark = pytest.mark.usefixtures("one_rank")


PROMPTS = [[90, 84, 82], [90, 84, 82], [20, 31, 5, 6, 7, 8, 9], [44]]


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",
        *(
            pytest.param(name, marks=pytest.mark.slow("the routes that the learner replays show it"))
            for name in ("gpt_oss", "glm4_moe")
        ),
    ],
)
def test_the_engine_records_the_routes_of_every_token_but_the_last(model_type, tmp_path):
    """Prompts are equal, have several lengths, or begin with an earlier call."""
    path = build_model(model_type, tmp_path, **MIXTURES[model_type])
    rows = sample(path, PROMPTS)
    continued = [*rows[0].token_ids.tolist(), 7, 9]
    rows += sample(path, [PROMPTS[0], PROMPTS[0], continued, continued[:20]])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for row in rows:
        check_routes(model, row)


def other_routes(row: Trajectory, experts: int = 4) -> Trajectory:
    """Return a row whose tokens go to the next experts."""
    return replace(row, routed_experts=((row.routed_experts + 1) % experts).astype(np.uint8))


def by_hand(path: str, row: Trajectory) -> tuple[list[float], float]:
    """Return the log-probs of a Qwen3-MoE's row and the norm of the gradient of their mean, computed with
    routers whose choice is replaced."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    routes = torch.from_numpy(row.routed_experts.astype(np.int64))
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.forward = chosen_router(block.mlp.gate, routes[:, layer])
    start = int(row.mask.argmax())
    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    logits = model(ids[None, :-1], use_cache=False).logits[0, start - 1 :]
    found = logits.log_softmax(-1).gather(-1, ids[start:, None])[:, 0]
    (-found.mean()).backward()
    norms = [param.grad.norm() for param in model.parameters() if param.grad is not None]
    return found.tolist(), float(torch.stack(norms).norm())


def chosen_router(router, chosen: torch.Tensor):
    def forward(hidden: torch.Tensor):
        logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
        weights = logits.softmax(-1).gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return forward


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.slow("the others show it")),
        {"packed": True},
        {"gradient_checkpointing": True},
    ],
)
def test_replayed_routes_give_the_log_probs_and_gradient_of_a_reference(config, tmp_path):
    from raylight.learner.updates.policy import Policy

    path = build_model("qwen3_moe", tmp_path, norm_topk_prob=True)
    row = other_routes(sample(path, [[90, 84, 82], [1, 2]])[0])
    logprobs, norm = by_hand(path, row)
    settings = PolicySettings(lr=1e-3, max_logprob_mismatch=50.0)
    policy = Policy(path, LearnerConfig(router_replay=True, **config), settings, 2)
    metrics = policy.engine.train(minibatch_of(row), mean_loss)
    assert metrics["logprobs"] == pytest.approx(logprobs, abs=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)


def test_an_adapter_of_packed_experts_is_trained_on_replayed_routes(tmp_path):
    """The merged model has the log-probs of the learner, on the routes of the engine."""
    from raylight.learner.updates.policy import Policy

    path, merged = build_model("qwen3_moe", tmp_path / "model", norm_topk_prob=True), str(tmp_path / "merged")
    row = other_routes(sample(path, [[90, 84, 82], [1, 2]])[0])
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = {"rank": 3, "target_modules": ["q_proj"], "target_parameters": experts}
    settings = PolicySettings(lr=1e-2, max_logprob_mismatch=50.0)
    policy = Policy(path, LearnerConfig(router_replay=True, lora=lora), settings, 5)
    before, *_ = (policy.engine.train(minibatch_of(row), mean_loss)["logprobs"] for _ in range(4))
    save_model(policy.engine, merged)
    trained = policy.engine.train(minibatch_of(row), mean_loss)["logprobs"]
    assert trained == pytest.approx(by_hand(merged, row)[0], abs=1e-4)
    assert sum(trained) > sum(before) + 1
    forgotten = replace(row, routed_experts=other_routes(row).routed_experts)
    assert by_hand(merged, forgotten)[0] != pytest.approx(trained, abs=0.05)


def minibatch_of(*rows: Trajectory):
    from raylight.experience.batches.shards import shard_batch
    from raylight.learner.tokens.rows import build_minibatches, build_rows

    count = len(rows)
    batch = TrainBatch([1.0] * count, ["g"] * count, list(rows), list(range(count)))
    (shard,) = shard_batch(batch, PolicySettings(), 1)
    built = build_rows(shard.rows, shard.outline.owners.tolist())
    return build_minibatches(built, shard.minibatches)[0]


def mean_loss(outputs, batch):
    logprobs = outputs["log_probs"]
    return -logprobs[batch.mask].mean(), {"logprobs": logprobs.detach()[0].tolist()}


@pytest.mark.parametrize(
    "model_type",
    ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "glm4_moe"))],
)
def test_the_engines_own_routes_change_nothing_in_float32(model_type, tmp_path):
    from raylight.learner.updates.policy import Policy

    path = build_model(model_type, tmp_path, **MIXTURES[model_type])
    rows = sample(path, PROMPTS)
    policy = Policy(path, LearnerConfig(router_replay=True), SETTINGS, 2)
    found = policy.update(TrainBatch([1.0, 0.0, 1.0, 0.0], ["g"] * 4, rows, [0, 1, 2, 3]))
    assert found["mismatch/logprob_abs_mean"] < 1e-5


def test_rows_without_routes_and_models_without_experts_are_refused(tmp_path):
    from raylight.learner.updates.policy import Policy

    replay = LearnerConfig(router_replay=True)
    path = build_model("qwen3_moe", tmp_path / "moe")
    bare = Trajectory("r", [1, 2, 3], [0, 1, 1], [0.0, -1.0, -1.0], [-1, 0, 0])
    policy = Policy(path, replay, PolicySettings(), 1)
    with pytest.raises(ConfigError, match=r"row 0 has no routes.*set learner\.router_replay=False"):
        policy.update(TrainBatch([1.0], ["g"], [bare], [0]))
    wrong = replace(bare, routed_experts=np.zeros((2, 1, 2), np.uint8))
    with pytest.raises(ConfigError, match=r"routes have \(1, 2\) layers and experts .* \(2, 2\)"):
        policy.update(TrainBatch([1.0], ["g"], [wrong], [0]))
    with pytest.raises(ConfigError, match="has no layers of packed experts"):
        build_policy(build_model("qwen3", tmp_path / "dense"), replay, PolicySettings(), 1)
    with pytest.raises(ConfigError, match=r"nothing reads learner\.router_replay"):
        build_policy(path, replay, SupervisedSettings(), 1)
    with pytest.raises(ConfigError, match="router_replay cannot be computed with torch_compile"):
        LearnerConfig(router_replay=True, torch_compile=True)
