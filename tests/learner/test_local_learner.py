"""The local learner: the update of the ranks on the module that an engine samples from, and its states."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process_groups import only_rank
from ranks import ANSWERS, PROBE, PROMPTS, make_batch, plain_logprobs, plain_probe
from transformers import AutoModelForCausalLM

import raylight as rl
from raylight.config import LearnerConfig, LoraConfig
from raylight.engines.transformers.engine import TrainableEngine
from raylight.engines.transformers.sampling import SamplingParams
from raylight.errors import ConfigError, LearnerError, MismatchError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.ranks.local import LocalLearner
from raylight.learner.state.checkpoints import TrainingStates
from raylight.quickstart import STARTER_MODEL

SETTINGS = PolicySettings(lr=1e-2, kl_coef=1e-2, max_logprob_mismatch=1e-3)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adapter_config(dropout: float = 0.0) -> LearnerConfig:
    return LearnerConfig(lora=LoraConfig(rank=4, dropout=dropout), max_tokens_per_micro_batch=64)


@asynccontextmanager
async def local(
    config: LearnerConfig, settings: PolicySettings = SETTINGS
) -> AsyncIterator[tuple[TrainableEngine, LocalLearner]]:
    engine = TrainableEngine(STARTER_MODEL, "policy", max_new_tokens=8, slots=4, max_model_len=512)

    async def load() -> TrainableEngine:
        return engine

    learner = LocalLearner(load, config)
    try:
        await learner.setup(STARTER_MODEL, settings, 3, seed=0)
        yield engine, learner
    finally:
        engine.close()
        learner.stop()


def exact_batch(version: int = 0) -> TrainBatch:
    """Return rollouts with the log-probs of the model before its first update."""
    with torch.no_grad():
        plain = plain_logprobs(AutoModelForCausalLM.from_pretrained(STARTER_MODEL))
    return make_batch([logprobs.tolist() for logprobs in plain], version)


async def adapter_of(learner: LocalLearner) -> dict[str, np.ndarray]:
    return (await learner.export_adapter())[1].weights


async def test_the_update_is_that_of_the_ranks() -> None:
    async with local(adapter_config()) as (_, learner):
        metrics = await learner.update(exact_batch())
        found = await adapter_of(learner)
    from raylight.learner.updates.policy import Policy

    with only_rank():
        torch.manual_seed(0)
        ranks = Policy(STARTER_MODEL, adapter_config(), SETTINGS, 3)
        expected_metrics = ranks.update(exact_batch())
        expected = ranks.export_adapter()
    assert expected is not None
    for name, array in expected[1].items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)
    assert metrics.pop("learner/update_s") > 0
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)


async def test_the_engine_samples_what_was_trained() -> None:
    async with local(adapter_config(dropout=0.1)) as (engine, learner):
        before = await learner.logprobs(PROBE)
        assert await engine.logprobs(PROBE) == pytest.approx(before, abs=1e-6)
        first = await engine.generate(PROMPTS[0], SamplingParams(100, ignore_eos=True))
        assert len(first.output_ids) == 8, "max_new_tokens overrides the limit of a request"
        assert set(first.weight_versions) == {0}
        await learner.update(exact_batch())
        after = await learner.logprobs(PROBE)
        assert after != pytest.approx(before, abs=1e-3)
        assert await engine.logprobs(PROBE) == pytest.approx(after, abs=1e-6)
        sample = await engine.generate(PROMPTS[0], SamplingParams(4))
        assert set(sample.weight_versions) == {1}
        ids = [*sample.prompt_ids.tolist(), *sample.output_ids]
        assert sample.logprobs == pytest.approx(
            (await learner.logprobs(ids))[len(sample.prompt_ids) - 1 :], abs=1e-4
        )


async def test_an_update_during_a_response_falls_between_two_tokens() -> None:
    batch = exact_batch()
    async with local(adapter_config()) as (engine, learner):
        engine._max_new_tokens = 240
        with engine.begin([PROMPTS[0]], [SamplingParams(240, ignore_eos=True)], streams=True) as choices:
            (sequence,) = choices.sequences
            while sequence.count < 3:
                await asyncio.wait_for(sequence.progressed.wait(), 30)
                sequence.progressed.clear()
            await learner.update(batch)
            sample = (await choices.end())[0].sample
        versions = sample.weight_versions
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        after = versions.index(1)
        logprobs = await learner.logprobs([*PROMPTS[0], *sample.output_ids])
        expected = logprobs[len(PROMPTS[0]) - 1 :][after:]
        assert sample.logprobs[after:] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [
        pytest.param(rl.algorithms.GSPO(model="m"), True, marks=pytest.mark.slow),
        (rl.PPO(model="m"), True),
        (rl.algorithms.DAPO(model="m", mini_batches=2), True),
        (rl.GRPO(model="m", lr=1e-3, kl_coef=1e-2), False),
    ],
    ids=["gspo", "ppo", "dapo", "all weights"],
)
async def test_every_algorithm_and_all_weights_can_be_trained(
    algorithm: rl.algorithms.PolicyAlgorithm, lora: bool
) -> None:
    config = LearnerConfig(
        lora=LoraConfig(rank=4) if lora else None,
        max_tokens_per_micro_batch=64,
        gradient_checkpointing=True,
    )
    async with local(config, algorithm.policy_settings()) as (engine, learner):
        before = await learner.logprobs(PROBE)
        metrics = await learner.update(exact_batch())
        assert metrics["learner/grad_norm"] > 0
        if algorithm.critic is not None:
            assert metrics["critic/grad_norm"] > 0
        if algorithm.kl_coef:
            assert metrics["learner/kl"] == pytest.approx(0, abs=1e-6)
        after = await learner.logprobs(PROBE)
        assert after != before
        assert await engine.logprobs(PROBE) == pytest.approx(after, abs=1e-6)


async def test_a_resumed_run_equals_one_without_a_stop(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"max_logprob_mismatch": 100.0, "lr_schedule": "cosine"})
    async with local(adapter_config(dropout=0.2), settings) as (_, learner):
        await learner.update(exact_batch())
        await learner.save_state(str(tmp_path), 1, {"config": {}}, 2, 60)
        metrics = [await learner.update(exact_batch(version)) for version in (1, 2)]
        expected = await adapter_of(learner)
        await learner.finish_saving(60)
    assert TrainingStates(str(tmp_path)).steps() == [1]
    async with local(adapter_config(dropout=0.2), settings) as (engine, learner):
        torch.rand(3)
        await learner.load_state(str(tmp_path), 1, 1)
        assert engine.version == 1
        again = [await learner.update(exact_batch(version)) for version in (1, 2)]
        found = await adapter_of(learner)
        assert engine.version == 3
    for row in (*metrics, *again):
        del row["learner/update_s"]
    assert again == metrics
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


async def test_the_saved_model_has_the_adapter_merged_and_beside_it(tmp_path: Path) -> None:
    from peft import PeftModel

    async with local(adapter_config()) as (_, learner):
        await learner.update(exact_batch())
        await learner.save(str(tmp_path / "checkpoint"))
        expected = await learner.logprobs(PROBE)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    base = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    adapted = PeftModel.from_pretrained(base, tmp_path / "checkpoint" / "adapter")
    for model in (merged, adapted):
        assert plain_probe(model) == pytest.approx(expected, abs=1e-4)


async def test_failures_leave_an_engine_that_samples() -> None:
    async with local(adapter_config()) as (engine, learner):
        batch = make_batch([[-1.0] * len(answer) for answer in ANSWERS])
        with pytest.raises(MismatchError):
            await learner.update(batch)
        sample = await engine.generate(PROMPTS[0], SamplingParams(2))
        assert set(sample.weight_versions) == {0}
        assert not engine.module.training
        with pytest.raises(LearnerError, match="resume the run"):
            await learner.restart()


async def test_settings_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LearnerConfig(lora=LoraConfig(target_modules=["no_such_layer"]))
    with pytest.raises(ConfigError, match="do not fit"):
        async with local(config):
            pass
    assert not dist.is_initialized()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"one of 2 of a torch\.distributed group"):
        async with local(adapter_config()):
            pass


async def test_closing_waits_for_the_update_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python aborts if it ends during a backward pass of another thread."""
    async with local(adapter_config()) as (engine, learner):
        updating, goes_on, waiting = threading.Event(), threading.Event(), threading.Event()
        update, join = learner._policy.update, engine._worker.thread.join

        def slow(batch: TrainBatch) -> dict[str, float]:
            updating.set()
            assert goes_on.wait(60)
            return update(batch)

        def wait(timeout_s: float | None) -> None:
            waiting.set()
            join(timeout_s)
            assert timeout_s is None

        monkeypatch.setattr(learner._policy, "update", slow)
        monkeypatch.setattr(engine._worker.thread, "join", wait)
        running = asyncio.create_task(learner.update(exact_batch()))
        assert await asyncio.to_thread(updating.wait, 60)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        assert await asyncio.to_thread(waiting.wait, 60)
        goes_on.set()
        await closing
        assert not engine._worker.thread.is_alive()
        assert (await running)["learner/update_s"] > 0
