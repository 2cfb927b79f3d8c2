"""Routes that vLLM records for router replay equal one pass of plain transformers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from routed_rows import check_routes
from tiny_models import build_model
from vllm_bench import Bench, open_bench
from vllm_helpers import HI, PREFIX, abandon, cached_tokens, change
from weight_loading import load_weights

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mixture(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """A mixture whose second layer has no experts, and whose long prompts are computed in parts."""
    path = build_model("qwen3_moe", tmp_path_factory.mktemp("moe"), num_hidden_layers=3, mlp_only_layers=[1])
    options: dict[str, Any] = {"enable_return_routed_experts": True, "max_num_batched_tokens": 192}
    async with open_bench(path, max_adapters=0, **options) as bench:
        yield bench


async def complete(bench: Bench, prompt: list[int], tokens: int, **options: Any) -> Any:
    """Sample exactly `tokens` tokens for each choice; return the answer, or the chunks of a stream."""
    extra = {"ignore_eos": True} | options.pop("extra_body", {})
    create = bench.openai.completions.create
    found = await asyncio.create_task(  # the capture context stays in the task
        create(model="policy", prompt=prompt, max_tokens=tokens, extra_body=extra, **options)
    )
    return [chunk async for chunk in found] if options.get("stream") else found


def check(bench: Bench, since: int, samples: int, model: Any = None) -> None:
    """Check the routes of all samples of the requests from the index `since` on."""
    found = [sample for context in bench.contexts[since:] for sample in context.samples.values()]
    assert len(found) == samples
    for sample in found:
        assert sample.routed_experts.shape == (len(sample.token_ids) - 1, 2, 2)
        check_routes(model or bench.reference(), sample)


async def test_the_routes_of_prompts_and_answers_are_recorded(mixture: Bench) -> None:
    """Requests have a cached prompt, several choices or streams, or are computed together."""
    since = len(mixture.contexts)
    await complete(mixture, PREFIX, 20)
    continued = [*mixture.sample.token_ids.tolist(), 7, 9]
    assert await cached_tokens(mixture, continued) >= 256
    await complete(mixture, continued, 12, n=2)
    await asyncio.gather(
        complete(mixture, [*PREFIX[:200], 3], 9, n=2, stream=True),
        complete(mixture, [44], 30),
        complete(mixture, [90, 84, 82], 1),
        complete(mixture, [*range(60, 90)], 14, stream=True),
    )
    check(mixture, since, samples=8)


async def test_an_aborted_call_has_the_routes_of_its_tokens(mixture: Bench) -> None:
    since = len(mixture.contexts)
    await abandon(mixture)
    assert mixture.sample.finish_reason == "aborted"
    check(mixture, since, samples=1)


async def test_an_agent_can_neither_cut_routes_off_nor_receives_them(mixture: Bench) -> None:
    since = len(mixture.contexts)
    for start in (2, 10_000):  # beyond the prompt, vLLM would end
        extra = {"routed_experts_prompt_start": start}
        answer = await complete(mixture, [5, 6, 7, 8], 4, extra_body=extra)
        assert answer.choices[0].routed_experts is None
        await mixture.openai.chat.completions.create(
            model="policy", messages=HI, max_tokens=3, extra_body=extra
        )
    check(mixture, since, samples=4)


async def test_the_routes_after_an_update_are_those_of_the_new_weights(mixture: Bench) -> None:
    model = mixture.reference()
    await load_weights(mixture.engine, next(mixture.versions), change(model, 3))
    since = len(mixture.contexts)
    await complete(mixture, PREFIX, 12)
    check(mixture, since, 1, model)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(mixture, since, 1)
