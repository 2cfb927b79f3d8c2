"""Losses, log-probs and steps of many adapters equal plain torch and peft with one model each."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build_model

from raylight.errors import AdapterLostError, ConfigError, NonFiniteGradientError
from raylight.tinker.datums import Batch, Datum, check_batch
from raylight.tinker.lora_trainer import ALPHA, LoraTrainer
from raylight.tinker.requests import AdamParams, LoraSpec

VOCABULARY = 288
ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=0.5)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def trainer(model_path: str) -> LoraTrainer:
    return LoraTrainer(model_path, "float32", torch.device("cpu"), max_tokens=40)


def make_batch(loss: str, seed: int = 0, **settings: float) -> Batch:
    """Return examples of several lengths, which need several micro-batches."""
    draw = np.random.default_rng(seed)

    def datum(length: int) -> Datum:
        inputs: dict[str, np.ndarray] = {
            "target_tokens": draw.integers(0, VOCABULARY, length),
            "weights": draw.random(length),
        }
        if loss != "cross_entropy":
            inputs |= {"sequence_ratio_mask": np.arange(length) >= length // 3} if loss == "gspo" else {}
            inputs |= {"logprobs": draw.normal(-5.6, 0.5, length), "advantages": draw.normal(0, 1, length)}
        tokens = draw.integers(0, VOCABULARY, length)
        return Datum(tokens, {n: v if n == "target_tokens" else v.astype("f4") for n, v in inputs.items()})

    return check_batch([datum(n) for n in (3, 17, 9, 30)], loss, settings, VOCABULARY, 512)


class PlainModel:
    """A model with one adapter of peft, trained by torch alone."""

    def __init__(self, model_path: str, rank: int, weights: Any) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        config = peft.LoraConfig(r=rank, lora_alpha=int(ALPHA), target_modules="all-linear")
        self.model: Any = peft.get_peft_model(model, config)
        tensors = {name: torch.tensor(array) for name, array in weights.items()}
        peft.set_peft_model_state_dict(self.model, tensors)
        self.params = [param for param in self.model.parameters() if param.requires_grad]

    def logprobs(self, datum: Datum) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor(datum.tokens)[None]).logits[0]
        return logits.log_softmax(-1).gather(-1, torch.tensor(datum.inputs["target_tokens"])[:, None])[:, 0]

    def loss(self, batch: Batch) -> torch.Tensor:
        return torch.stack([self._loss_of(batch, datum) for datum in batch.data]).sum()

    def _loss_of(self, batch: Batch, datum: Datum) -> torch.Tensor:
        logprobs, settings = self.logprobs(datum), batch.settings
        inputs = {name: torch.tensor(array) for name, array in datum.inputs.items()}
        weights = inputs["weights"]
        if batch.loss == "cross_entropy":
            return -(logprobs * weights).sum()
        sampled, advantages = inputs["logprobs"], inputs["advantages"]
        ratio = torch.exp(logprobs - sampled)
        if batch.loss == "gspo":
            log_ratio = (logprobs - sampled).detach()[inputs["sequence_ratio_mask"] != 0].mean()
            ratio = torch.exp(log_ratio + logprobs - logprobs.detach())
        if batch.loss == "importance_sampling":
            return -(ratio * advantages * weights).sum()
        if batch.loss == "dro":
            penalty = 0.5 * settings["beta"] * (logprobs - sampled) ** 2
            return -((logprobs * advantages - penalty) * weights).sum()
        low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
        clipped = torch.clamp(ratio, low, high)
        if batch.loss == "cispo":
            return -(clipped.detach() * logprobs * advantages * weights).sum()
        return -(torch.min(ratio * advantages, clipped * advantages) * weights).sum()

    def step(self, adam: AdamParams, optimizer: torch.optim.Optimizer) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.params, adam.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    def optimizer(self, adam: AdamParams) -> torch.optim.Optimizer:
        betas = (adam.beta1, adam.beta2)
        return torch.optim.AdamW(
            self.params, adam.learning_rate, betas, adam.eps, weight_decay=adam.weight_decay
        )

    def weights(self) -> dict[str, np.ndarray]:
        from peft import get_peft_model_state_dict

        return {name: value.detach().numpy() for name, value in get_peft_model_state_dict(self.model).items()}


def randomized(trainer: LoraTrainer, model_id: str, rank: int, seed: int) -> dict[str, np.ndarray]:
    """Create a tenant whose adapter changes the model, and return its weights."""
    trainer.create(model_id, LoraSpec(rank=rank, seed=seed))
    adapter = trainer.export(model_id)
    draw = np.random.default_rng(seed)
    changed = {n: draw.normal(0, 0.05, a.shape).astype("f4") for n, a in adapter.weights.items()}
    trainer.load(model_id, type(adapter)(adapter.config, changed), None)
    return changed


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        pytest.param("cross_entropy", {}, marks=pytest.mark.slow),
        ("importance_sampling", {}),
        ("ppo", {"clip_high_threshold": 1.1}),
        pytest.param("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, marks=pytest.mark.slow),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}),
        pytest.param("dro", {}, marks=pytest.mark.slow),
    ],
)
def test_two_tenants_train_as_two_plain_models(
    trainer: LoraTrainer, model_path: str, loss: str, settings: dict[str, float]
) -> None:
    """Each takes steps of accumulated passes, in turn with the other."""
    steps = 2 if loss == "cross_entropy" else 1
    tenants = {"a": 4, "b": 7}
    plain = {name: PlainModel(model_path, r, randomized(trainer, name, r, r)) for name, r in tenants.items()}
    optimizers = {name: model.optimizer(ADAM) for name, model in plain.items()}
    for step in range(steps):
        for part in range(steps):
            for name, model in plain.items():
                batch = make_batch(loss, seed=10 * step + part + tenants[name], **settings)
                expected = model.loss(batch)
                expected.backward()
                total, logprobs = trainer.forward_backward(name, batch, True)
                assert total == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
                for datum, found in zip(batch.data, logprobs, strict=True):
                    assert found == pytest.approx(model.logprobs(datum).detach().numpy(), abs=1e-5)
        for name, model in plain.items():
            norm = model.step(ADAM, optimizers[name])
            assert trainer.optim_step(name, ADAM)["grad_norm"] == pytest.approx(norm, rel=1e-4)
            expected_weights = model.weights()
            found_weights = trainer.export(name).weights
            assert found_weights.keys() == expected_weights.keys()
            for key, array in found_weights.items():
                np.testing.assert_allclose(array, expected_weights[key], atol=2e-5)


def test_a_forward_pass_leaves_no_gradient(trainer: LoraTrainer) -> None:
    trainer.create("a", LoraSpec(rank=2))
    batch = make_batch("cross_entropy")
    assert trainer.forward_backward("a", batch, False)[0] == pytest.approx(
        trainer.forward_backward("a", batch, False)[0]
    )
    with pytest.raises(ConfigError, match="call forward_backward first"):
        trainer.optim_step("a", ADAM)


def test_a_saved_tenant_continues_as_if_nothing_had_been(trainer: LoraTrainer) -> None:
    randomized(trainer, "a", 4, 0)
    trainer.forward_backward("a", make_batch("cross_entropy", 1), True)
    trainer.optim_step("a", ADAM)
    adapter, optimizer = trainer.export("a"), trainer.export_optimizer("a")
    trainer.create("b", LoraSpec(rank=4))
    trainer.load("b", adapter, optimizer)
    for name in "ab":
        trainer.forward_backward(name, make_batch("cross_entropy", 2), True)
        trainer.optim_step(name, ADAM)
    a, b = (trainer.export(name).weights for name in "ab")
    assert all((a[name] == b[name]).all() for name in a)


def test_a_failed_pass_leaves_the_earlier_gradient(
    trainer: LoraTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second micro-batch fails, after the gradient of the first was added."""
    for name in "ab":
        trainer.create(name, LoraSpec(rank=4, seed=1))
        trainer.forward_backward(name, make_batch("cross_entropy", 1), True)
    own, calls = trainer._logprobs, 0

    def failing(rows: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("broken")
        return own(rows)

    monkeypatch.setattr(trainer, "_logprobs", failing)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.forward_backward("a", make_batch("cross_entropy", 2), True)
    assert trainer.optim_step("a", ADAM) == trainer.optim_step("b", ADAM)


def test_a_gradient_that_is_not_finite_is_dropped(trainer: LoraTrainer) -> None:
    trainer.create("a", LoraSpec(rank=2, seed=1))
    before = trainer.export("a").weights
    batch = make_batch("importance_sampling")
    for datum in batch.data:
        datum.inputs["logprobs"][:] = -1e5
    trainer.forward_backward("a", batch, True)
    with pytest.raises(NonFiniteGradientError, match="no step was taken"):
        trainer.optim_step("a", ADAM)
    after = trainer.export("a").weights
    assert all((before[name] == after[name]).all() for name in before)


def test_an_adapter_has_the_layers_and_the_seed_of_its_request(trainer: LoraTrainer) -> None:
    trainer.create("attention", LoraSpec(rank=2, seed=3, train_mlp=False))
    trainer.create("mlp", LoraSpec(rank=2, seed=3, train_attn=False))
    trainer.create("again", LoraSpec(rank=2, seed=3, train_attn=False))
    names = {name: "".join(trainer.export(name).weights) for name in ("attention", "mlp")}
    assert "self_attn" in names["attention"]
    assert "mlp" not in names["attention"]
    assert "self_attn" not in names["mlp"]
    first, second = (trainer.export(name).weights for name in ("mlp", "again"))
    assert all((first[name] == second[name]).all() for name in first)
    with pytest.raises(ConfigError, match="no layer is left"):
        trainer.create("none", LoraSpec(rank=2, train_attn=False, train_mlp=False))


def test_a_removed_tenant_leaves_no_parameter(trainer: LoraTrainer) -> None:
    before = sum(param.numel() for param in trainer._peft.parameters())
    for name in "ab":
        trainer.create(name, LoraSpec(rank=8))
    for name in "ab":
        trainer.remove(name)
    trainer.remove("unknown")
    assert sum(param.numel() for param in trainer._peft.parameters()) == before
    trainer.create("c", LoraSpec(rank=2))
    assert trainer.forward_backward("c", make_batch("cross_entropy"), True)[0] > 0


def test_a_checkpoint_of_another_rank_is_refused(trainer: LoraTrainer) -> None:
    trainer.create("a", LoraSpec(rank=2))
    trainer.create("b", LoraSpec(rank=4))
    with pytest.raises(ConfigError, match="another rank"):
        trainer.load("a", trainer.export("b"), None)


def test_an_adapter_that_is_not_there_is_lost(trainer: LoraTrainer) -> None:
    """A restart of the trainer's process loses it."""
    batch = make_batch("cross_entropy")
    calls = [
        lambda: trainer.forward_backward("a", batch, True),
        lambda: trainer.optim_step("a", ADAM),
        lambda: trainer.export("a"),
        lambda: trainer.export_optimizer("a"),
    ]
    for call in calls:
        with pytest.raises(AdapterLostError, match="has died"):
            call()
