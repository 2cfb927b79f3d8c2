"""LoRA adapters on the transformers engine: mixed batches, and versions that are kept while in use."""

import asyncio
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM
from transformers_helpers import (
    GREEDY,
    Brake,
    MakeEngine,
    check_greedy,
    client_of,
    logprobs_of,
    open_context,
    other_weights,
)
from unit_helpers import within
from weight_loading import load_weights

from raylight.engines.protocol import LoraAdapter
from raylight.engines.transformers.sampling import SamplingParams
from raylight.errors import WeightSyncError
from raylight.http.errors import RequestError

LONG = SamplingParams(30, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="session")
def plain(tied_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()


def make_adapter(
    path: str, seed: int, rank: int = 4, targets: tuple[str, ...] = ("q_proj", "down_proj")
) -> tuple[LoraAdapter, Any]:
    """A random adapter in peft's format, and a plain module with it."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    module = get_peft_model(
        base, LoraConfig(r=rank, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM")
    ).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    config = {
        k: sorted(v) if isinstance(v, set) else v for k, v in module.peft_config["default"].to_dict().items()
    }
    return LoraAdapter(config, {k: v.numpy() for k, v in get_peft_model_state_dict(module).items()}), module


async def test_a_batch_mixes_adapters_and_the_model_itself(
    make_engine: MakeEngine, tied_model: str, plain: Any
) -> None:
    first, first_module = make_adapter(tied_model, 1)
    second, second_module = make_adapter(tied_model, 2, rank=8, targets=("v_proj", "o_proj", "gate_proj"))
    engine = make_engine()
    await engine.load_adapter("one", 5, first)
    await engine.load_adapter("two", 7, second)
    assert engine.adapters == ["one", "two"]
    names = [None, "one", "two", "one", None, "two"]
    async with within(30):
        results = await asyncio.gather(
            *(engine.generate([i + 1, 9], LONG, name) for i, name in enumerate(names))
        )
    modules = {None: plain, "one": first_module, "two": second_module}
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        assert result.logprobs == pytest.approx(
            logprobs_of(modules[name], [i + 1, 9], result.output_ids), abs=1e-4
        )
        assert set(result.weight_versions) == {{None: 0, "one": 5, "two": 7}[name]}
    assert await engine.logprobs([1, 2, 3], "two") == pytest.approx(
        logprobs_of(second_module, [1], [2, 3]), abs=1e-4
    )
    assert await engine.logprobs([1, 2, 3]) == pytest.approx(logprobs_of(plain, [1], [2, 3]), abs=1e-4)


async def test_requests_in_flight_end_with_the_version_that_they_began_with(
    make_engine: MakeEngine, tied_model: str
) -> None:
    (old, old_module), (new, new_module) = make_adapter(tied_model, 1), make_adapter(tied_model, 2)
    engine = make_engine(slots=1)
    await engine.load_adapter("one", 1, old)
    brake = Brake(engine, at=5)
    async with within(30):
        running = asyncio.create_task(engine.generate([1], LONG, "one"))
        await brake.reached.wait()
        waiting = asyncio.create_task(engine.generate([2], LONG, "one"))  # for a slot: it has not begun
        loading = asyncio.create_task(engine.load_adapter("one", 2, new))
        await asyncio.sleep(0)
        brake.release()
        await loading
        assert len(engine._decoder.adapters._peft.peft_config) == 2
        began, later = await running, await waiting
    assert (set(began.weight_versions), set(later.weight_versions)) == ({1}, {2})
    assert began.logprobs == pytest.approx(logprobs_of(old_module, [1], began.output_ids), abs=1e-4)
    assert later.logprobs == pytest.approx(logprobs_of(new_module, [2], later.output_ids), abs=1e-4)
    assert len(engine._decoder.adapters._peft.peft_config) == 1  # nobody uses the old one


async def test_abort_ends_the_requests_of_the_adapter_alone(make_engine: MakeEngine, tied_model: str) -> None:
    adapter, _ = make_adapter(tied_model, 1)
    engine = make_engine()
    await engine.load_adapter("one", 1, adapter)
    brake = Brake(engine, at=5)
    async with within(30):
        calls = [asyncio.create_task(engine.generate([1], LONG, name)) for name in ("one", None)]
        await brake.reached.wait()
        loading = asyncio.create_task(engine.load_adapter("one", 2, adapter, "abort"))
        await asyncio.sleep(0)
        brake.release()
        await loading
        aborted, other = await asyncio.gather(*calls)
    assert (aborted.finish_reason, other.finish_reason) == ("aborted", "length")


async def test_a_dropped_adapter_is_served_no_longer_and_others_go_on(
    make_engine: MakeEngine, tied_model: str, plain: Any
) -> None:
    (first, _), (second, second_module) = make_adapter(tied_model, 1), make_adapter(tied_model, 2)
    engine = make_engine()
    await engine.load_adapter("one", 1, first)
    await engine.load_adapter("two", 1, second)
    await engine.drop_adapter("one")
    await engine.drop_adapter("never loaded")
    assert engine.adapters == ["two"]
    with pytest.raises(RequestError, match="does not exist") as caught:
        await engine.generate([1], GREEDY, "one")
    assert caught.value.status == 404
    await check_greedy(engine, second_module, [1, 2, 3], "two")
    await engine.drop_adapter("two")
    await check_greedy(engine, plain, [1, 2, 3])
    await engine.load_adapter("one", 2, second)
    await check_greedy(engine, second_module, [1, 2, 3], "one")


async def test_new_weights_of_the_model_come_beneath_the_adapters(
    make_engine: MakeEngine, tied_model: str
) -> None:
    adapter, _ = make_adapter(tied_model, 1)
    weights, module = other_weights(tied_model)
    engine = make_engine()
    await engine.load_adapter("one", 1, adapter)
    await load_weights(engine, 3, weights)
    await check_greedy(engine, module, [1, 2, 3])
    expected = get_peft_model(module, LoraConfig.from_peft_type(**adapter.config)).eval()
    expected.load_state_dict(
        {k.replace(".weight", ".default.weight"): torch.as_tensor(v) for k, v in adapter.weights.items()},
        strict=False,
    )
    await check_greedy(engine, expected, [1, 2, 3], "one")


async def test_a_version_is_never_loaded_twice(make_engine: MakeEngine, tied_model: str) -> None:
    adapter, _ = make_adapter(tied_model, 1)
    engine = make_engine()
    await engine.load_adapter("one", 2, adapter)
    for version in (2, 1):
        with pytest.raises(WeightSyncError, match="not newer"):
            await engine.load_adapter("one", version, adapter)


async def test_an_adapter_under_the_models_name_replaces_the_model(
    make_engine: MakeEngine, tied_model: str, plain: Any
) -> None:
    engine, context = make_engine(), open_context()
    client = await client_of(engine)
    for version, seed in ((0, 1), (1, 2)):
        adapter, module = make_adapter(tied_model, seed)
        await engine.load_adapter("policy", version, adapter)
        assert [(model.id, model.parent) async for model in client.models.list()] == [("policy", None)]
        await client.completions.create(model="policy", prompt=[1, 2], max_tokens=5)
        sample = context.samples[0]
        assert set(sample.weight_versions) == {version}
        assert sample.logprobs == pytest.approx(logprobs_of(module, [1, 2], sample.output_ids), abs=1e-4)
        assert await engine.logprobs([1, 2, 3], "policy") == pytest.approx(
            logprobs_of(module, [1], [2, 3]), abs=1e-4
        )
    await engine.drop_adapter("policy")
    await check_greedy(engine, plain, [1, 2, 3])


async def test_an_adapter_is_a_model_of_the_routes(make_engine: MakeEngine, tied_model: str) -> None:
    adapter, module = make_adapter(tied_model, 1)
    engine, context = make_engine(), open_context()
    await engine.load_adapter("one", 3, adapter)
    client = await client_of(engine)
    assert [(model.id, model.parent) async for model in client.models.list()] == [
        ("policy", None),
        ("one", "policy"),
    ]
    answer = await client.completions.create(model="one", prompt=[1, 2], max_tokens=5)
    assert answer.model == "one"
    sample = context.samples[0]
    assert set(sample.weight_versions) == {3}
    assert sample.logprobs == pytest.approx(logprobs_of(module, [1, 2], sample.output_ids), abs=1e-4)


def spoil(adapter: LoraAdapter, how: str) -> LoraAdapter:
    config, weights = dict(adapter.config), dict(adapter.weights)
    name = next(iter(weights))
    if how == "missing":
        del weights[name]
    elif how == "unknown":
        weights["base_model.model.nowhere.lora_A.weight"] = weights[name]
    elif how == "another shape":
        weights[name] = weights[name][..., :-1]
    elif how == "no such layer":
        config["target_modules"] = ["nowhere"]
    else:
        config |= (
            {"use_dora": True}
            if how == "dora"
            else {"bias": "all"}
            if how == "bias"
            else {"peft_type": "IA3"}
        )
    return LoraAdapter(config, weights)


@pytest.mark.parametrize(
    "how", ["missing", "unknown", "another shape", "no such layer", "dora", "bias", "another type"]
)
async def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(
    make_engine: MakeEngine, tied_model: str, plain: Any, how: str
) -> None:
    adapter, module = make_adapter(tied_model, 1)
    engine, loaded = make_engine(), []
    for version in (1, 2):
        with pytest.raises(WeightSyncError, match="does not fit"):
            await engine.load_adapter("one", version, spoil(adapter, how))
        await check_greedy(engine, plain, [1, 2, 3])
        assert engine.adapters == loaded
        await engine.load_adapter("one", version, adapter)
        loaded = ["one"]
    await check_greedy(engine, module, [1, 2, 3], "one")
