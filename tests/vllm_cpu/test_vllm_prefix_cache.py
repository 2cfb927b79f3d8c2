"""Cached keys and values of old weights are never used again after a weight update in a live vLLM."""

import asyncio
from typing import Any

import pytest
from vllm_helpers import PREFIX, cached_tokens, change, difference, until, within
from weight_loading import load_weights

from raylight.errors import EngineStartError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

TOLERANCE = 1e-5


def complete(bench: Any, ids: list[int], tokens: int) -> asyncio.Task[Any]:
    """Send a prompt of token ids, and sample exactly `tokens` tokens."""
    create = bench.openai.completions.create
    return asyncio.create_task(
        create(model="policy", prompt=ids, max_tokens=tokens, extra_body={"ignore_eos": True})
    )


async def completed(bench: Any, ids: list[int], tokens: int) -> Any:
    """Return the sample of a completion."""
    before = len(bench.contexts)
    await complete(bench, ids, tokens)
    (context,) = bench.contexts[before:]
    return context.samples[0]


async def test_a_shared_prefix_is_recomputed_while_a_request_in_flight_holds_it(
    bench: Any, learner: Any
) -> None:
    old, new = bench.engine.version, next(bench.versions)
    async with within():
        first = await completed(bench, [*PREFIX, 11, 12, 13], 4)
        assert difference(bench.reference(), first).max() < TOLERANCE
        assert await cached_tokens(bench, [*PREFIX, 21]) >= 256, "a prefix is cached"
        prompt = [*PREFIX, *range(30, 60)]
        before = len(bench.contexts)
        running = complete(bench, prompt, 160)
        await until(lambda: len(bench.contexts) > before and bench.contexts[before].samples)
        in_flight = bench.contexts[before].samples[0]
        await until(lambda: len(in_flight.output_ids) > 20)
        await load_weights(bench.engine, new, change(learner, 31))
        assert not running.done()
        sharing = await completed(bench, [*PREFIX, 41, 42], 8)
        turn = [*prompt, *in_flight.output_ids[:20]]  # tokens that were sampled before the update
        next_turn = await completed(bench, [*turn, 77], 8)
        assert not running.done()
        await running
        after = await completed(bench, [*prompt, *in_flight.output_ids], 8)
        assert await cached_tokens(bench, [*prompt, *in_flight.output_ids]) >= 384, "the new ones are cached"
    for sample in (sharing, next_turn, after):
        assert set(sample.weight_versions) == {new}
        assert difference(learner, sample).max() < TOLERANCE
        assert difference(bench.reference(), sample).max() > 0.1, "old and new weights are distinguishable"
    boundary = in_flight.weight_versions.count(old)
    assert 20 < boundary < 160
    assert in_flight.weight_versions == [old] * boundary + [new] * (160 - boundary)
    assert difference(bench.reference(), in_flight)[:boundary].max() < TOLERANCE
    assert difference(learner, in_flight)[boundary:].max() < TOLERANCE


@pytest.mark.parametrize(
    ("connectors", "refused"),
    [
        (None, None),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, None),
        ({"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, "ExampleConnector"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "connectors": [
                        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
                        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
                    ]
                },
            },
            "ExampleConnector",
        ),
    ],
)
async def test_connectors_that_keep_old_keys_and_values_are_refused(
    connectors: dict[str, Any] | None, refused: str | None
) -> None:
    from raylight.engines.vllm.cache_connectors import check_connectors

    if refused is None:
        check_connectors(connectors)
    else:
        with pytest.raises(EngineStartError, match=f"{refused} of kv_transfer_config cannot be emptied"):
            check_connectors(connectors)
