"""Calls stored as what they add to earlier calls: read as recorded, whatever the store has of them."""

import asyncio
import json
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import Box, call_of, ids_of, open_box, span_of
from unit_helpers import make_generation

from raylight.errors import StoreError
from raylight.semconv import (
    CALL_ID,
    DIALECT,
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    REQUEST_PARAMETERS,
    TOOL_DEFINITIONS,
)
from raylight.store.call_rows import CallDeltas, generations_from_rows
from raylight.store.client import StoreClient
from raylight.types import REPEATED, CallKey, Generation, Rollout, Span

Message = dict[str, str]
TOOLS = json.dumps([{"name": f"tool-{i}", "parameters": {"type": "object"}} for i in range(10)])


def tokens_of(messages: list[Message]) -> list[int]:
    """Return the tokens of a conversation: its characters' codes."""
    return [ord(letter) for message in messages for letter in f"<{message['role']}>{message['content']}"]


def record_of(
    rollout: Rollout, messages: list[Message], answer: str, number: int = 0, sampled: bool = True
) -> tuple[CallKey, Generation | None, Span]:
    """Return the record of a call as serving makes it."""
    key = call_of(rollout, f"{number:016x}-call")
    output = [ord(letter) for letter in answer]
    call = make_generation(
        tokens_of([*messages, {"role": "assistant", "content": ""}]),
        output,
        key=key,
        logprobs=[-0.5 - i for i in range(len(output))],
        versions=[number // 3] * len(output),
        start=float(number),
    )
    attributes = {
        INPUT_MESSAGES: json.dumps(messages),
        OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": answer}]),
        REQUEST_PARAMETERS: json.dumps({"temperature": 1.0}),
        TOOL_DEFINITIONS: TOOLS,
        DIALECT: "chat",
        CALL_ID: key.call_id,
    }
    span = span_of(rollout, "chat", attributes=attributes, span_id=key.call_id[:16], trace_id=key.call_id)
    return key, call if sampled else None, span


def conversation(rollout: Rollout, turns: int, size: int = 200) -> list[tuple[CallKey, Any, Span]]:
    """Return the records of a conversation that only grows."""
    messages: list[Message] = [{"role": "system", "content": "s" * size}]
    records = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}-" + "q" * size})
        answer = f"{turn}-" + "a" * size
        records.append(record_of(rollout, list(messages), answer, turn))
        messages.append({"role": "assistant", "content": answer})
    return records


async def record(store: StoreClient, records: list[tuple[CallKey, Any, Span]]) -> None:
    await store.capture([(key, call.start_time if call else 0.0) for key, call, _ in records], [])
    await store.capture([], records)


async def check(box: Box, rollout: Rollout, records: list[tuple[CallKey, Any, Span]]) -> None:
    """Compare what is read, in each way of reading, with what was recorded."""
    calls = sorted((call for _, call, _ in records if call), key=lambda call: call.start_time)
    (found,) = await box.store.collect([rollout.rollout_id], with_spans=True)
    assert found.generations == calls
    texts = {span.span_id: span.attributes for _, _, span in records}
    for spans in (found.spans, await box.store.query_spans(rollout.rollout_id)):
        assert {span.span_id for span in spans} == texts.keys()
        for span in spans:
            own = {name: value for name, value in span.attributes.items() if name in texts[span.span_id]}
            assert own == texts[span.span_id]
    _, _, span = random.Random(0).choice(records)
    (alone,) = await box.store.query_spans(rollout.rollout_id, span_id=span.span_id)
    assert alone.attributes[INPUT_MESSAGES] == span.attributes[INPUT_MESSAGES]
    turns = await box.store.chat_history(*ids_of(rollout))
    assert [turn.tokens.tolist() for turn in turns] == [call.token_ids.tolist() for call in calls]


def stored(box: Box) -> tuple[int, int]:
    """Return the bytes of the tokens and of the spans in the file."""
    columns = "COALESCE(SUM(LENGTH(generation)), 0)", "COALESCE(SUM(LENGTH(body)), 0)"
    journal = box.service._journal
    (calls,) = journal.fetch_one(f"SELECT {columns[0]} FROM calls") or (0,)
    (spans,) = journal.fetch_one(f"SELECT {columns[1]} FROM spans") or (0,)
    return calls, spans


async def test_a_long_conversation_is_stored_once() -> None:
    async with open_box() as box:
        rollout = await box.take()
        records = conversation(rollout, turns=20, size=800)
        for one in records:
            await record(box.store, [one])
        await check(box, rollout, records)
        calls, spans = stored(box)
        last = records[-1][1]
        unique = len(last.prompt_ids) + len(last.output_ids)
        outputs = sum(len(call.output_ids) for _, call, _ in records)
        assert unique > 32_000
        assert calls < 4 * unique + 4 * outputs + 20 * 200, "a token has 4 bytes, and so has a log-prob"
        texts = len(records[-1][2].attributes[INPUT_MESSAGES])
        assert spans < 2.2 * texts + 20 * 800


async def test_calls_of_one_message_are_deltas_too() -> None:
    async with open_box() as box:
        rollout = await box.take()
        records = conversation(rollout, turns=10)
        await record(box.store, records)
        await check(box, rollout, records)
        assert stored(box)[0] < 4 * (10 * 650 + 10 * 210) + 10 * 200


@st.composite
def conversations(draw: Any) -> list[tuple[list[Message], str, bool]]:
    """Draw calls: each continues, forks or rewrites an earlier conversation, or begins one."""
    content = st.text("ab", min_size=0, max_size=120)
    calls: list[tuple[list[Message], str, bool]] = []
    histories: list[list[Message]] = [[]]
    for _ in range(draw(st.integers(1, 12))):
        messages = list(draw(st.sampled_from(histories[-4:])))
        change = draw(st.sampled_from(["none", "none", "none", "cut", "edit", "new"]))
        if change == "cut":
            messages = messages[: draw(st.integers(0, len(messages)))]
        if change == "edit" and messages:
            place = draw(st.integers(0, len(messages) - 1))
            messages[place] = {"role": "user", "content": draw(content)}
        if change == "new":
            messages = []
        messages = [*messages, {"role": draw(st.sampled_from(["user", "é"])), "content": draw(content)}]
        answer = draw(content)
        calls.append((messages, answer, draw(st.integers(0, 5)) > 0))
        histories.append([*messages, {"role": "assistant", "content": answer}])
    return calls


async def roll_out(box: Box, calls: list[tuple[list[Message], str, bool]], rng: random.Random) -> None:
    """Record calls in messages of any size by two replicas; some are lost on the way, or sent twice."""
    rollout = await box.take()
    records: list[Any] = [
        record_of(rollout, messages, answer, number, sampled)
        for number, (messages, answer, sampled) in enumerate(calls)
    ]
    await box.store.capture([(key, float(n)) for n, (key, *_) in enumerate(records)], [])
    replicas = [box.store, StoreClient(box.service)]
    replicas[1]._deltas = CallDeltas(capacity=5_000)
    left = list(records)
    while left:
        batch, left = left[: (size := rng.randint(1, 3))], left[size:]
        store = rng.choice(replicas)
        if rng.random() < 0.2:  # the store never receives them from here
            for one in batch:
                store._deltas.encode(*one)
        await store.capture([], batch)
        if rng.random() < 0.2:
            await rng.choice(replicas).capture([], batch)
    await check(box, rollout, records)
    await box.store.finish_attempt(rollout, "succeeded", timeout=0)
    assert await box.status(rollout) == ("succeeded", "succeeded")


def test_any_tree_of_calls_is_read_as_it_was_recorded() -> None:
    with asyncio.Runner() as runner:
        opened = open_box()
        box = runner.run(opened.__aenter__())

        @given(conversations(), st.randoms(use_true_random=False))
        def run(calls: list[tuple[list[Message], str, bool]], rng: random.Random) -> None:
            runner.run(roll_out(box, calls, rng))

        run()
        runner.run(opened.__aexit__(None, None, None))


async def test_a_base_that_the_store_lost_is_sent_again_with_the_call() -> None:
    """The store forgot the open call of a replica that it believed gone. Its later calls continue it."""
    async with open_box() as box:
        rollout = await box.take()
        first, second, third = conversation(rollout, 3)
        await box.store.capture([(replace(first[0], request="same"), 0.0), (second[0], 1.0)], [], "gone")
        await box.store.capture([(third[0], 2.0)], [], "gone")
        again = replace(call_of(rollout), request="same" + REPEATED)
        await box.store.capture([(again, 0.5)], [], "other")
        await box.store.lose_recorder("gone")
        await box.store.capture([], [first, second])
        await box.store.capture([], [third])
        (found,) = await box.store.collect([rollout.rollout_id])
        assert found.generations == [second[1], third[1]]
        assert await box.count("generations_late") == 1


async def test_a_span_that_an_agent_wrote_is_no_base() -> None:
    async with open_box() as box:
        rollout = await box.take()
        records = conversation(rollout, 3)
        own = span_of(rollout, "own", span_id=records[0][2].span_id, attributes={INPUT_MESSAGES: "mine"})
        await box.store.add_span(own)
        await record(box.store, records)
        spans = {span.span_id: span for span in await box.store.query_spans(rollout.rollout_id)}
        assert spans[own.span_id].attributes[INPUT_MESSAGES] == "mine"
        for _, _, span in records[1:]:
            assert spans[span.span_id].attributes[INPUT_MESSAGES] == span.attributes[INPUT_MESSAGES]


async def test_a_record_that_was_refused_is_no_base() -> None:
    """The batch fails because of one span, and the recorder sends its records again one by one."""
    async with open_box() as box:
        rollout = await box.take()
        first, second, third = conversation(rollout, 3)
        bad = second[2].model_copy(update={"name": "\ud800"})
        await box.store.capture([(key, 0.0) for key, *_ in (first, second, third)], [])
        with pytest.raises(ValueError, match="cannot be stored"):
            await box.store.capture([], [first, (second[0], second[1], bad), third])
        for one in (first, (second[0], second[1], None), third):
            await box.store.capture([], [one])
        (found,) = await box.store.collect([rollout.rollout_id])
        assert found.generations == [first[1], second[1], third[1]]


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    deltas = CallDeltas(capacity=100_000)
    keys = [CallKey(f"ro-{i}", f"at-{i}", "one") for i in range(40)]
    for key in keys:
        deltas.encode(key, make_generation([5] * 2_000, [6], key=key), None)
    assert deltas._attempts.currsize <= 100_000
    old, new = replace(keys[0], call_id="two"), replace(keys[-1], call_id="two")
    assert deltas.encode(old, make_generation([5] * 2_000, [6], key=old), None)[3:5] == (None, 0)
    assert deltas.encode(new, make_generation([5] * 2_000, [6], key=new), None)[3:5] == ("one", 2_000)
    huge = CallKey("ro", "at-huge", "one")
    deltas.encode(huge, make_generation([5] * 60_000, [6], key=huge), None)
    assert deltas._attempts.currsize <= 100_000


def test_the_bound_holds_for_short_calls_too() -> None:
    """Most of their memory is not for tokens and texts."""
    capacity = 1_000_000
    deltas = CallDeltas(capacity)
    tracemalloc.start()
    try:
        for i in range(2_000):
            key = CallKey(f"ro-{i}", f"at-{i:016x}", f"{i:032x}")
            texts = {INPUT_MESSAGES: json.dumps([{"role": "user", "content": f"{i}"}])}
            span = Span.from_attributes(
                name="call",
                attributes=texts,
                rollout_id=key.rollout_id,
                attempt_id=key.attempt_id,
                span_id=key.call_id[:16],
            )
            deltas.encode(key, make_generation([5] * 20, [6] * 8, key=key), span)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(deltas._attempts) < 2_000
    assert used < 1.2 * capacity


def test_a_thousand_branches_are_bounded() -> None:
    deltas = CallDeltas()
    for i in range(1_000):
        key = CallKey("ro", "at", f"call-{i}")
        row = deltas.encode(key, make_generation([7] * 100 + [i] * 100, [8], key=key), None)
        assert row[4] == (100 if i else 0)
    assert len(deltas._attempts["at"]) == 64


def test_prompts_of_one_conversation_are_parts_of_one_array() -> None:
    """Reading copies each token once, however many turns there are."""
    deltas, rows, tokens = CallDeltas(), [], list(range(100))
    for turn in range(300):
        key = CallKey("ro", "at", f"call-{turn}")
        _, attempt_id, call_id, base, shared, data, _, _ = deltas.encode(
            key, make_generation(tokens, [turn], key=key), None
        )
        rows.append((call_id, "ro", attempt_id, base, shared, data))
        tokens = [*tokens, turn, turn + 1, turn + 2]
    assert sum(len(row[-1]) for row in rows) < 300 * 120 + 4 * 1_000
    prompts = [call.prompt_ids for call in generations_from_rows(rows).values()]
    assert len(prompts[-1]) == 100 + 3 * 299
    assert all(np.shares_memory(prompt, prompts[-1]) for prompt in prompts)
    assert not prompts[-1].flags.writeable


@pytest.mark.parametrize("together", [True, False])
async def test_another_content_of_a_recorded_call_is_no_base(together: bool) -> None:
    """The store keeps the first content. No call in the same message or a later one continues the other."""
    async with open_box() as box:
        rollout = await box.take()
        records = conversation(rollout, 4)
        other = conversation(rollout, 4, size=150)
        await record(box.store, records[:1])
        await box.store.capture([(key, 0.0) for key, *_ in other[1:]], [])
        for message in [other] if together else [[one] for one in other]:
            await box.store.capture([], message)
        await check(box, rollout, [records[0], *other[1:]])


@pytest.mark.parametrize("table", ["calls", "spans"])
async def test_a_base_that_was_deleted_by_hand_is_an_error(table: str) -> None:
    async with open_box() as box:
        rollout = await box.take()
        records = conversation(rollout, 3)
        await record(box.store, records)
        box.service._journal.db.execute(f"DELETE FROM {table} WHERE rowid = 2")
        with pytest.raises(StoreError, match="file is damaged: it lacks the"):
            await box.store.collect([rollout.rollout_id], with_spans=True)
