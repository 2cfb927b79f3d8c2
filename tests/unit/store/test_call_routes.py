"""Routes of experts in the store: only those of new tokens, which calls of a conversation share."""

import numpy as np

from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.store.call_rows import CallDeltas, generations_from_rows
from raylight.types import CallKey, Generation

LAYERS, TOP_K = 3, 2


def call(name: str, prompt: list[int], output: list[int], *, routed: bool = True) -> Generation:
    """A call whose tokens have the routes of their ids, as every engine would compute them."""
    tokens = np.array([*prompt, *output][:-1])
    routes = np.broadcast_to(tokens[:, None, None] % 256, (len(tokens), LAYERS, TOP_K)).astype(np.uint8)
    zeros = [0.0] * len(output)
    return Generation(
        CallKey("r", "a", name),
        "m",
        prompt,
        output,
        zeros,
        [1] * len(output),
        "stop",
        float(len(prompt)),
        float(len(prompt)),
        routed_experts=routes if routed else None,
    )


def stored(calls: list[Generation]) -> tuple[list[Generation], list[int]]:
    """Return calls as the store returns them, and the bytes of each."""
    deltas = CallDeltas()
    rows = []
    for one in calls:
        rollout, attempt, name, base, shared, data, _, _ = deltas.encode(one.key, one, None)
        assert data is not None
        rows.append((name, rollout, attempt, base, shared, data))
    return list(generations_from_rows(rows).values()), [len(row[5]) for row in rows]


PROMPT = list(range(40, 240))
FIRST = call("1", PROMPT, [1, 2, 3, 4])
NEXT = call("2", [*PROMPT, 1, 2, 3, 4, 9, 9], [5, 6, 7])
DRIFT = call("3", [*PROMPT, 1, 2, 8, 8, 8, 8], [11, 12])
LAST = call("4", [*PROMPT, 1, 2, 3, 4, 9, 9, 5, 6, 7, 30], [31])


def test_calls_come_back_with_all_their_routes():
    calls = [
        FIRST,
        NEXT,
        DRIFT,
        LAST,
        call("5", [*PROMPT, 50], [51], routed=False),
        call("6", [*PROMPT, 50, 51], [1]),
    ]
    found, _ = stored(calls)
    for one, before in zip(found, calls, strict=True):
        assert one == before


def test_a_call_stores_the_routes_of_its_new_tokens_only():
    _, sizes = stored([FIRST, NEXT, LAST])
    _, without = stored(
        [call(c.key.call_id, c.prompt_ids, c.output_ids, routed=False) for c in (FIRST, NEXT, LAST)]
    )
    added = [size - bare for size, bare in zip(sizes, without, strict=True)]
    assert added[0] > 200 * LAYERS * TOP_K
    assert max(added[1:]) < 12 * LAYERS * TOP_K + 30  # the last sampled token of the call before is new too


def test_calls_of_older_versions_have_no_routes():
    from raylight.store.payloads import decode_payload, pack

    (row,) = [CallDeltas().encode(FIRST.key, FIRST, None)]
    older = pack(decode_payload(row[5])[:13])
    (found,) = generations_from_rows([("1", "r", "a", None, 0, older)]).values()
    assert found.routed_experts is None
    assert found.output_ids.tolist() == [1, 2, 3, 4]


def test_a_row_has_the_routes_of_the_calls_that_computed_its_tokens_first():
    other = call("2", NEXT.prompt_ids, NEXT.output_ids)
    changed = other.routed_experts + 1
    other = Generation(**{name: getattr(other, name) for name in FIELDS} | {"routed_experts": changed})
    (row,) = build_trajectories([FIRST, other]).rows
    known = len(FIRST.routed_experts)
    np.testing.assert_array_equal(row.routed_experts[:known], FIRST.routed_experts)
    np.testing.assert_array_equal(row.routed_experts[known:], changed[known:])
    (row,) = build_trajectories([FIRST, call("2", NEXT.prompt_ids, NEXT.output_ids, routed=False)]).rows
    assert row.routed_experts is None


FIELDS = (
    "key",
    "model",
    "prompt_ids",
    "output_ids",
    "logprobs",
    "weight_versions",
    "finish_reason",
    "start_time",
    "end_time",
)
