"""LoRA adapters from peft in a live vLLM: several in parallel, and each version is immutable."""

import asyncio
import contextvars
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from vllm_helpers import HI, TOLERANCE, ask, difference, expected_logprobs, in_flight, until, within
from weight_loading import load_weights

from raylight.engines.protocol import LoraAdapter
from raylight.errors import WeightSyncError


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def no_adapters_left(bench: Any) -> AsyncIterator[None]:
    yield
    for name in list(bench.engine._adapters.served):
        await bench.engine.drop_adapter(name)


pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


def make_adapter(
    bench: Any, folder: Path, seed: int, rank: int = 4, **patterns: dict[str, int]
) -> tuple[LoraAdapter, Any]:
    """Return an adapter with random weights, and the reference model with this adapter."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], **patterns)
    model: Any = get_peft_model(bench.reference(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    return LoraAdapter(settings, load_file(folder / "adapter_model.safetensors")), model


async def test_two_adapters_and_the_base_model_in_parallel(bench: Any, tmp_path: Path) -> None:
    models: dict[str, Any] = {"policy": bench.reference()}
    for number, name in enumerate(["red", "blue"]):
        adapter, models[name] = make_adapter(bench, tmp_path / name, number)
        await bench.engine.load_adapter(name, 7 + number, adapter)
    before = len(bench.contexts)
    await asyncio.gather(*(ask(bench, 16, name) for name in models))
    samples = {
        context.samples[0].weight_versions[0]: context.samples[0] for context in bench.contexts[before:]
    }
    for version, name in {bench.engine.version: "policy", 7: "red", 8: "blue"}.items():
        assert difference(models[name], samples[version]).max() < TOLERANCE, name
        assert set(samples[version].weight_versions) == {version}
    assert difference(models["policy"], samples[7]).max() > 0.01
    assert {card.id async for card in bench.openai.models.list()} == {"policy", "red", "blue"}
    ids = [300, *b"text"]
    found = await bench.engine.logprobs(ids, "red")
    assert found == pytest.approx(expected_logprobs(models["red"], ids[:1], ids[1:]).tolist(), abs=TOLERANCE)
    for name in ("red", "blue", "unheard of"):
        await bench.engine.drop_adapter(name)
    assert (
        await bench.http.post("/v1/chat/completions", json={"model": "red", "messages": HI})
    ).status_code == 404
    assert not await bench.engine._client.list_loras()


async def test_layers_have_their_ranks_and_alphas(bench: Any, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 2, "down_proj": 6}, "alpha_pattern": {"v_proj": 4}}
    adapter, model = make_adapter(bench, tmp_path, 5, **patterns)
    await bench.engine.load_adapter("patterns", 1, adapter)
    await ask(bench, 16, "patterns")
    assert difference(model, bench.sample).max() < TOLERANCE


async def test_requests_in_flight_keep_their_adapter_version(bench: Any, tmp_path: Path) -> None:
    first, old = make_adapter(bench, tmp_path / "1", 1)
    second, new = make_adapter(bench, tmp_path / "2", 2)
    await bench.engine.load_adapter("learner", 1, first)
    (task,), (context,) = await in_flight(bench, 1, 300, "learner")
    await bench.engine.load_adapter("learner", 2, second)
    assert not task.done()
    await ask(bench, 8, "learner")
    assert set(bench.sample.weight_versions) == {2}
    assert difference(new, bench.sample).max() < TOLERANCE
    async with within():
        await task
    assert [*context.samples[0].weight_versions] == [1] * 300
    assert difference(old, context.samples[0]).max() < TOLERANCE
    await until(lambda: len(bench.engine._adapters._loaded) == 1)
    await until(lambda: not bench.engine._adapters._removals)
    assert len(await bench.engine._client.list_loras()) == 1


async def test_a_pinned_version_is_sampled_beside_a_newer_one(bench: Any, tmp_path: Path) -> None:
    """Both begin with the same prompt, whose keys and values are cached for each."""
    (old, old_model), (new, new_model) = (
        make_adapter(bench, tmp_path / "1", 1),
        make_adapter(bench, tmp_path / "2", 2),
    )
    await bench.engine.load_adapter("adapted", 50, old)
    await bench.engine.load_adapter("adapted@step-3", 50, old)
    await bench.engine.load_adapter("adapted", 51, new)
    before = len(bench.contexts)
    await asyncio.gather(*(ask(bench, 24, name) for name in ("adapted", "adapted@step-3") * 3))
    samples = [context.samples[0] for context in bench.contexts[before:]]
    versions = [set(sample.weight_versions) for sample in samples]
    assert sorted(map(max, versions)) == [50] * 3 + [51] * 3
    for sample, version in zip(samples, versions, strict=True):
        (model,) = ({50: old_model, 51: new_model}[number] for number in version)
        assert difference(model, sample).max() < TOLERANCE
    await bench.engine.drop_adapter("adapted@step-3")
    body = {"model": "adapted@step-3", "messages": HI}
    assert (await bench.http.post("/v1/chat/completions", json=body)).status_code == 404


async def test_an_adapter_under_the_models_name_and_the_prefix_cache(bench: Any, tmp_path: Path) -> None:
    """Each version computes a cached prefix again; a probe runs during requests."""
    prompt = [(7 * number) % 200 + 20 for number in range(300)]  # more than a block of the cache
    for version in (40, 41):
        adapter, model = make_adapter(bench, tmp_path / str(version), version)
        await bench.engine.load_adapter("policy", version, adapter)
        assert [card.id async for card in bench.openai.models.list()] == ["policy"]
        for _ in range(2):
            before = len(bench.contexts)
            create = bench.openai.completions.create
            answer = await create(
                model="policy", prompt=prompt, max_tokens=8, extra_body={"ignore_eos": True}
            )
            sample = bench.contexts[before].samples[0]
            assert answer.model == "policy"
            assert [*sample.prompt_ids] == prompt
            assert set(sample.weight_versions) == {version}
            assert difference(model, sample).max() < TOLERANCE
        (task,), _ = await in_flight(bench, 1, 400)
        ids = [300, *b"text"]
        outside = contextvars.Context()  # a probe belongs to no captured call
        found = await asyncio.create_task(bench.engine.logprobs(ids, "policy"), context=outside)
        assert found == pytest.approx(expected_logprobs(model, ids[:1], ids[1:]).tolist(), abs=TOLERANCE)
        async with within():
            await task


async def test_an_update_can_wait_for_requests_in_flight_or_abort_them(bench: Any, tmp_path: Path) -> None:
    adapter, _ = make_adapter(bench, tmp_path, 3)
    await bench.engine.load_adapter("learner", 10, adapter)
    for version, mode, reason in ((11, "wait", "length"), (12, "abort", "aborted")):
        (task,), (context,) = await in_flight(bench, 1, 200, "learner")
        async with within():
            await bench.engine.load_adapter("learner", version, adapter, mode)
            await task
        assert context.samples[0].finish_reason == reason
        assert set(context.samples[0].weight_versions) == {version - 1}
        assert len(bench.engine._adapters._loaded) == 1


async def test_an_adapter_outlives_new_weights_of_the_model(bench: Any, learner: Any, tmp_path: Path) -> None:
    adapter, model = make_adapter(bench, tmp_path, 4)
    await bench.engine.load_adapter("learner", 20, adapter)
    await load_weights(bench.engine, next(bench.versions), learner.state_dict())
    await ask(bench, 16, "learner")
    assert difference(model, bench.sample).max() < TOLERANCE


async def test_an_incompatible_adapter_is_rejected(bench: Any, tmp_path: Path) -> None:
    adapter, _ = make_adapter(bench, tmp_path / "1", 5)
    wide, _ = make_adapter(bench, tmp_path / "2", 5, rank=128)
    await bench.engine.load_adapter("learner", 30, adapter)
    with pytest.raises(WeightSyncError, match="is not newer than 30"):
        await bench.engine.load_adapter("learner", 30, adapter)
    with pytest.raises(WeightSyncError, match="rank"):
        await bench.engine.load_adapter("learner", 31, wide)
    with pytest.raises(WeightSyncError, match="vLLM rejected"):
        await bench.engine.load_adapter(
            "learner", 31, LoraAdapter(adapter.config | {"use_dora": True}, adapter.weights)
        )
    renamed = {name.replace("model.layers", "model.other.layers"): w for name, w in adapter.weights.items()}
    with pytest.raises(WeightSyncError, match=r"vLLM's model lacks: model.other.layers.*\(\d+ in all\)"):
        await bench.engine.load_adapter("learner", 31, LoraAdapter(adapter.config, renamed))
    assert len(await bench.engine._client.list_loras()) == 1
    with pytest.raises(WeightSyncError, match="no adapter 'other'"):
        await bench.engine.logprobs([1, 2], "other")
    await ask(bench, 4, "learner")
    assert set(bench.sample.weight_versions) == {30}
