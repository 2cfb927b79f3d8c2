"""The memory of a local learner: the known size of an adapter, and the estimate against used memory."""

from pathlib import Path

import pytest
import torch
from process_groups import only_rank
from transformers import Qwen2Config, Qwen2ForCausalLM

import raylight as rl
from raylight.config import EngineConfig, LearnerConfig
from raylight.errors import DeviceMemoryError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.tokens.token_logprobs import BLOCK_LOGITS
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.cluster_fit.local_memory import (
    MemoryEstimate,
    build_on_meta,
    check_memory,
    estimate_memory,
)
from raylight.trainer.trainer import Trainer
from raylight.types import Trajectory

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


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def settings(dtype: str = "bfloat16", **given) -> tuple[EngineConfig, LearnerConfig]:
    trainer = Trainer(algorithm=rl.MiniGRPO(model="unread", dtype=dtype, **given))
    return trainer.engine, trainer.learner


def estimate(**given) -> MemoryEstimate:
    return estimate_memory(Qwen2Config(**QWEN_05B), *settings(**given))


def test_the_adapter_of_qwen2_has_the_known_size() -> None:
    parameters = list(build_on_meta(Qwen2Config(**QWEN_05B), *settings()).parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == 4_399_104
    assert sum(parameter.numel() for parameter in parameters) == 498_431_872
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert {parameter.dtype for parameter in parameters if not parameter.requires_grad} == {torch.bfloat16}


@pytest.mark.slow
def test_qwen2_fits_four_gigabytes() -> None:
    needed = estimate(max_model_len=512)
    assert needed.weights == pytest.approx(494_032_768 * 2, rel=1e-3)
    assert needed.trained == needed.gradients == 4_399_104 * 4
    assert needed.optimizer == 4_399_104 * 8
    # 16 rollouts and 4 kept sequences, 512 positions, 24 layers, keys and values, 2 heads of 64 numbers
    assert needed.cache == (16 + 4) * 512 * 24 * 2 * 2 * 64 * 2
    assert needed.peak < 4e9
    assert needed.peak == needed.weights + needed.trained * 4 + needed.cache + max(
        needed.training, needed.sampling
    )
    full_logits = 512 * 151936 * 4
    assert needed.training < 2 * full_logits
    kept = estimate(max_model_len=512, gradient_checkpointing=False)
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


def batch_of(width: int, vocabulary: int) -> TrainBatch:
    """Return two rollouts of one row each, whose tokens are trained."""
    rows = [
        Trajectory(
            str(i),
            [1 + (7 * i + k) % (vocabulary - 1) for k in range(width)],
            [0] + [1] * (width - 1),
            [0.0] + [-9.0] * (width - 1),
            [-1] + [0] * (width - 1),
        )
        for i in range(2)
    ]
    return TrainBatch([0.0, 1.0], ["g", "g"], rows, [0, 1])


@pytest.mark.parametrize(
    ("dtype", "checkpointing"),
    [
        ("float32", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("float32", False), ("bfloat16", True), ("bfloat16", False)]
        ),
    ],
)
def test_the_estimate_matches_the_used_memory(
    dtype: str, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raylight.learner.updates.policy import Policy

    monkeypatch.setitem(BLOCK_LOGITS, "cpu", BLOCK_LOGITS["cuda"])  # the estimate is for a GPU
    engine, learner = settings(
        dtype,
        max_model_len=256,
        max_new_tokens=8,
        gradient_checkpointing=checkpointing,
        lora={"rank": 8, "dropout": 0.05},
    )
    config = Qwen2Config(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    needed = estimate_memory(config, engine, learner)
    module = Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, engine.dtype))
    module.save_pretrained(tmp_path / "model")
    _with_tokenizer(tmp_path / "model")
    with only_rank():
        policy = Policy(
            str(tmp_path / "model"), learner, PolicySettings(max_logprob_mismatch=100.0), 3, module
        )
        batch = batch_of(engine.max_model_len, config.vocab_size)
        policy.update(batch)  # the optimizer has its moments
        policy.engine.optimizer_zero_grad()
        used = peak_of_cpu(lambda: policy.update(batch))
    assert used == pytest.approx(needed.training + needed.gradients, rel=0.2)


def _with_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(STARTER_MODEL).save_pretrained(folder)


def test_too_little_memory_is_an_error_before_loading() -> None:
    with pytest.raises(DeviceMemoryError, match="lower max_model_len"):
        check_memory(STARTER_MODEL, *settings("float32"), torch.device("cpu"), 10**6)
