"""MiniGRPO's model: adapter size, loss and gradient against hand-written references, and estimated against
used memory."""

import asyncio
import math
from pathlib import Path

import pytest
import torch
from ranks import ANSWERS, PROMPTS, make_batch, plain_logprobs
from tiny_models import build_model
from transformers import AutoModelForCausalLM, Qwen2Config

from raylight.algorithms.minigrpo.adapter_trainer import (
    AdapterTrainer,
    add_adapter,
    trainable_parameters,
    trained_logprobs,
)
from raylight.algorithms.minigrpo.memory import build_on_meta, estimate_memory_of
from raylight.algorithms.minigrpo.rows import TokenBatch, advantage_rows, split_micro_batches, to_token_batch
from raylight.algorithms.minigrpo.settings import MiniGRPOSettings
from raylight.algorithms.minigrpo.setup import build_engine_and_trainer
from raylight.config import LoraConfig
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.trainable import TrainableEngine
from raylight.errors import ConfigError, DeviceMemoryError, MismatchError, NonFiniteGradientError
from raylight.learner.token_logprobs import BLOCK_LOGITS
from raylight.quickstart import STARTER_MODEL

QWEN_05B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""Shape of Qwen2-0.5B."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def test_experts_are_left_out_of_the_adapter(tmp_path: Path):
    module = AutoModelForCausalLM.from_pretrained(build_model("qwen3_moe", tmp_path))
    model = add_adapter(module, LoraConfig(rank=4))
    adapted = {name for name, param in model.named_parameters() if param.requires_grad}
    assert adapted
    assert not [name for name in adapted if ".mlp." in name]


def settings(**given) -> MiniGRPOSettings:
    plain = {
        "model": STARTER_MODEL,
        "max_model_len": 64,
        "max_new_tokens": 16,
        "lora": {"dropout": 0.0, "rank": 4},
        "lr": 1e-2,
    }
    return MiniGRPOSettings(**plain | given)


def starter():
    return AutoModelForCausalLM.from_pretrained(STARTER_MODEL, attn_implementation="sdpa")


def exact_batch(model=None):
    with torch.no_grad():
        return make_batch([logprobs.tolist() for logprobs in plain_logprobs(model or starter())])


def test_the_adapter_of_qwen2_has_the_known_size() -> None:
    _, model = build_on_meta(Qwen2Config(**QWEN_05B), MiniGRPOSettings(model="unread"), torch.bfloat16)
    assert sum(parameter.numel() for parameter in trainable_parameters(model)) == 4_399_104
    assert sum(parameter.numel() for parameter in model.parameters()) == 498_431_872
    assert {parameter.dtype for parameter in trainable_parameters(model)} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {
        torch.bfloat16
    }


def test_qwen2_fits_four_gigabytes() -> None:
    config = Qwen2Config(**QWEN_05B)
    needed = estimate_memory_of(config, MiniGRPOSettings(model="unread", max_model_len=512), torch.bfloat16)
    assert needed.weights == pytest.approx(494_032_768 * 2, rel=1e-3)
    assert needed.adapter == needed.gradients == 4_399_104 * 4
    assert needed.optimizer == 4_399_104 * 8
    assert needed.cache == 16 * 512 * 24 * 2 * 2 * 64 * 2
    assert needed.peak < 4e9
    assert needed.peak == needed.weights + needed.adapter * 4 + needed.cache + max(
        needed.training, needed.sampling
    )
    full_logits = 512 * 151936 * 4
    assert needed.training < 2 * full_logits
    kept = estimate_memory_of(
        config,
        MiniGRPOSettings(model="unread", max_model_len=512, gradient_checkpointing=False),
        torch.bfloat16,
    )
    assert kept.training > 3 * needed.training


def peak_of_cpu(work) -> int:
    """Return the peak bytes that the CPU's allocator handed out during `work`."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    now = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_matches_the_used_memory(
    checkpointing: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BLOCK_LOGITS, "cpu", BLOCK_LOGITS["cuda"])  # the estimate is of a GPU
    given = settings(
        max_model_len=256, gradient_checkpointing=checkpointing, lora={"dropout": 0.05, "rank": 8}
    )
    config = Qwen2Config(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    needed = estimate_memory_of(config, given, dtype)
    module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    trainer = AdapterTrainer(module, given, 100.0)
    width = given.max_model_len
    ids = torch.randint(0, 8000, (1, width))
    floats, positions = torch.zeros(width - 1), torch.arange(width - 1)
    tokens = TokenBatch(ids, positions, ids[0, 1:], floats + 1, floats, floats, positions)

    def work() -> None:
        module.train()
        (trained_logprobs(module, tokens) * 1.0).sum().backward()

    work()
    trainer.model.zero_grad(set_to_none=True)
    used = peak_of_cpu(work)
    assert used == pytest.approx(needed.training + needed.gradients, rel=0.2)


def test_too_little_memory_is_an_error_before_loading() -> None:
    with pytest.raises(DeviceMemoryError, match="lower max_model_len"):
        build_engine_and_trainer(STARTER_MODEL, settings(memory_limit_gb=0.001))


def test_logprobs_are_those_of_plain_transformers() -> None:
    model = starter()
    trainer = AdapterTrainer(starter(), settings(), 1e-3)
    batch = exact_batch(model)
    (part,) = split_micro_batches(advantage_rows(batch, [1.0] * 8), 1000)
    tokens = to_token_batch(part, CPU)
    assert trained_logprobs(trainer.model.base_model.model, tokens).tolist() == pytest.approx(
        tokens.sampled_logprobs.tolist(), abs=1e-5
    )


def reference_gradient(adapted, batch, given: MiniGRPOSettings) -> list[torch.Tensor]:
    """Return the gradient computed row by row from full logits: PPO at ratio 1, mean over all trained
    tokens."""
    rewards = torch.tensor(batch.rewards).view(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    total = sum(map(len, ANSWERS))
    loss = torch.zeros(())
    for prompt, answer, advantage in zip(PROMPTS, ANSWERS, advantages, strict=True):
        logits = adapted(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        loss = loss - ((logprobs - logprobs.detach()).exp() * advantage).sum() / total
    return list(torch.autograd.grad(loss, trainable_parameters(adapted)))


@pytest.mark.parametrize("budget", [64, 200, 1000])
def test_the_gradient_is_the_one_written_by_hand(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(max_tokens_per_micro_batch=budget, grad_clip=1e9)
    trainer = AdapterTrainer(starter(), given, 1e-3)
    for parameter in trainable_parameters(trainer.model):  # B is initially 0, so A would have no gradient
        torch.nn.init.normal_(parameter, std=0.05)
    batch = exact_batch(trainer.model)
    expected = reference_gradient(trainer.model, batch, given)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        trainer._optimizer,
        "step",
        lambda: seen.extend(p.grad.clone() for p in trainable_parameters(trainer.model)),
    )
    metrics = trainer.update(batch, 0)
    for found, wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-3)
    assert metrics["mismatch/logprob_abs_max"] < 1e-4
    assert metrics["learner/grad_norm"] == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in expected)), rel=1e-3
    )
    assert metrics["learner/micro_batches"] == {64: 3, 200: 1, 1000: 1}[budget]


def test_only_the_adapter_moves_and_the_right_way() -> None:
    module = starter()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = AdapterTrainer(module, settings(passes=4), 1e-3)
    batch = exact_batch()
    metrics = trainer.update(batch, 0)
    state = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in module.state_dict().items()
        if ".lora_" not in name
    }
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)
    with torch.no_grad():
        after = plain_logprobs(trainer.model)
        gained = [
            float(now.sum() - torch.tensor(row.logprobs).sum())
            for now, row in zip(after, batch.rows, strict=True)
        ]
    good = [gain for gain, reward in zip(gained, batch.rewards, strict=True) if reward]
    bad = [gain for gain, reward in zip(gained, batch.rewards, strict=True) if not reward]
    assert sum(good) / len(good) > 0.01 > sum(bad) / len(bad)
    assert metrics["learner/clip_frac"] > 0


def test_the_reference_is_the_model_without_its_adapter() -> None:
    trainer = AdapterTrainer(starter(), settings(kl_coef=0.1, lr=1e-3), 10.0)
    batch = exact_batch()
    assert trainer.update(batch, 0)["learner/kl"] == pytest.approx(0, abs=1e-6)
    for _ in range(3):
        metrics = trainer.update(batch, 0)
    assert metrics["learner/kl"] > 1e-4
    tokens = to_token_batch(advantage_rows(batch, [1.0] * 8), CPU)
    assert trainer.reference(tokens).tolist() == pytest.approx(tokens.sampled_logprobs.tolist(), abs=1e-5)


def test_rows_without_advantage_are_not_computed() -> None:
    trainer = AdapterTrainer(starter(), settings(), 1e-3)
    batch = exact_batch()
    batch.rewards[:4] = [1.0] * 4
    metrics = trainer.update(batch, 0)
    assert metrics["learner/rows_without_advantage"] == 4
    assert metrics["learner/rows"] == 8


def test_other_probabilities_are_an_error() -> None:
    trainer = AdapterTrainer(starter(), settings(), 1e-3)
    batch = make_batch([[-1.0] * len(answer) for answer in ANSWERS])
    with pytest.raises(MismatchError, match=r"differ by 10 on average .*max_logprob_mismatch"):
        trainer.update(batch, 0)
    assert "mismatch/logprob_abs_max" not in trainer.update(batch, 1), (
        "tokens of an older version are not compared"
    )


def test_broken_gradients_are_skipped_and_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = AdapterTrainer(starter(), settings(), 1e-3)
    batch = exact_batch()
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *arguments: torch.tensor(float("nan")))
    before = [parameter.clone() for parameter in trainable_parameters(trainer.model)]
    assert trainer.update(batch, 0)["learner/skipped_steps"] == 1
    trainer.update(batch, 0)
    with pytest.raises(NonFiniteGradientError, match="not finite in 3 steps in a row"):
        trainer.update(batch, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainable_parameters(trainer.model), strict=True))


def test_a_saved_adapter_is_loaded_by_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = AdapterTrainer(starter(), settings(), 1e-3)
    batch = exact_batch()
    trainer.update(batch, 0)
    trainer.save(tmp_path / "checkpoint" / "step-1")
    trainer.save(tmp_path / "checkpoint" / "step-1")
    loaded = PeftModel.from_pretrained(starter(), tmp_path / "checkpoint" / "step-1")
    with torch.no_grad():
        for found, wanted in zip(plain_logprobs(loaded), plain_logprobs(trainer.model), strict=True):
            torch.testing.assert_close(found, wanted)
        pairs = zip(plain_logprobs(loaded), batch.rows, strict=True)
        changed = max(
            float((now - torch.tensor(row.logprobs[-len(now) :])).abs().max()) for now, row in pairs
        )
    assert changed > 1e-4
    assert [file.name for file in (tmp_path / "checkpoint").iterdir()] == ["step-1"]


async def test_one_module_samples_and_is_trained_with_versions() -> None:
    engine, trainer, _ = build_engine_and_trainer(STARTER_MODEL, settings(max_new_tokens=6))
    assert isinstance(engine, TrainableEngine)
    try:
        first = await engine.generate(PROMPTS[0], SamplingParams(100, ignore_eos=True))
        assert len(first.output_ids) == 6, "max_new_tokens overrides the limit of a request"
        assert set(first.weight_versions) == {0}
        metrics = await engine.change_weights(lambda: (1, trainer.update(exact_batch(), 0)))
        assert metrics["learner/grad_norm"] > 0
        second = await engine.generate(PROMPTS[0], SamplingParams(5))
        assert set(second.weight_versions) == {1}
        with torch.no_grad():
            logits = trainer.model(torch.tensor([PROMPTS[0] + second.output_ids])).logits[
                0, len(PROMPTS[0]) - 1 : -1
            ]
            plain = starter()(torch.tensor([PROMPTS[0] + second.output_ids])).logits[
                0, len(PROMPTS[0]) - 1 : -1
            ]
        chosen = torch.tensor(second.output_ids)[:, None]
        assert second.logprobs == pytest.approx(
            logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist(), abs=1e-4
        )
        assert second.logprobs != pytest.approx(
            plain.log_softmax(-1).gather(1, chosen)[:, 0].tolist(), abs=1e-4
        )
    finally:
        engine.close()


async def test_an_update_during_a_response_falls_between_two_tokens() -> None:
    engine, trainer, _ = build_engine_and_trainer(
        STARTER_MODEL, settings(max_model_len=512, max_new_tokens=480)
    )
    try:
        with engine.begin([PROMPTS[0]], [SamplingParams(480, ignore_eos=True)], streams=True) as choices:
            (sequence,) = choices.sequences
            while sequence.count < 3:
                await asyncio.wait_for(sequence.progressed.wait(), 30)
                sequence.progressed.clear()
            await engine.change_weights(lambda: (1, trainer.update(exact_batch(), 0)))
            sample = (await choices.end())[0].sample
        versions = sample.weight_versions
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        with torch.no_grad():
            ids = torch.tensor([PROMPTS[0] + sample.output_ids])
            logprobs = trainer.model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
        after = versions.index(1)
        chosen = logprobs.gather(1, torch.tensor(sample.output_ids)[:, None])[after:, 0]
        assert sample.logprobs[after:] == pytest.approx(chosen.tolist(), abs=1e-3)
    finally:
        engine.close()


def test_an_adapter_that_fits_nothing_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        AdapterTrainer(starter(), settings(lora=LoraConfig(target_modules=["no_such_layer"])), 1e-3)
