"""One rollout, and the groups of rollouts, as the pages show them."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raylight._utils.plain_json import plain
from raylight.errors import UnknownIdError
from raylight.experience.batches.token_records import TokenRecords
from raylight.experience.trajectories.call_lineage import CallLineage, trace_lineage
from raylight.experience.trajectories.row_rules import RowRules
from raylight.images.image import media_type_of, to_data_url
from raylight.images.messages import inline_images, recorded_images
from raylight.semconv import (
    CALL_ID,
    DIALECT,
    INPUT_MESSAGES,
    OPERATION_NAME,
    OUTPUT_MESSAGES,
    REQUEST_PARAMETERS,
    TOOL_DEFINITIONS,
)
from raylight.store.overview import group_name, message_text
from raylight.store.reading import StoreReader
from raylight.traces.reward_spans import get_any_rewards
from raylight.types import Attempt, FinishedRollout, Generation, JsonObject, Span
from raylight.ui.rollout_index import RolloutIndex

MAX_ATTRIBUTE = 2_000
"""Characters of an attribute in the list of spans."""
MAX_GROUP = 256
"""Rollouts of a group that are shown."""


async def read_rollout(store: StoreReader, rollout_id: str) -> FinishedRollout:
    """Return a rollout with its spans and calls.

    Raises:
        UnknownIdError: the store does not have it.
    """
    return (await store.collect([rollout_id], with_spans=True, with_span_tokens=False))[0]


async def show_rollout(
    store: StoreReader, index: RolloutIndex, records: TokenRecords, rules: RowRules, rollout_id: str
) -> JsonObject:
    """Return a rollout's page.

    Args:
        rules: the run's choice of calls and rows to train.

    Raises:
        UnknownIdError: the store does not have it.
    """
    finished = await read_rollout(store, rollout_id)
    attempts = await store.query_attempts(rollout_id)
    card = index.card(rollout_id) or {"position": 0, "step": None, "age": None, "seconds": None}
    rollout, failure = finished.rollout, finished.rollout.failure
    previous, following = index.neighbours(card["position"])
    advantage = advantages_of(records, card["step"], [rollout_id])[rollout_id]
    lineages = trace_lineage(finished, rules)
    spans = {span.attributes[CALL_ID]: span for span in finished.spans if DIALECT in span.attributes}
    return card | {
        "id": rollout_id,
        "mode": rollout.mode,
        "group": group_name(rollout.rollout_id, rollout.group_id),
        "status": rollout.status,
        "reward": finished.reward,
        "tokens": sum(len(call.output_ids) for call in finished.generations),
        "calls": _calls(finished.generations, lineages, spans),
        "task": plain(rollout.input),
        "rewards": finished.rewards,
        "metadata": plain(rollout.metadata),
        "config": rollout.config.model_dump(),
        "attempts": [_attempt(attempt) for attempt in attempts],
        "advantage": advantage,
        "trained": advantage is not None,
        "failure": failure.model_dump() if failure else None,
        "spans": [_span(span) for span in finished.spans],
        "previous": previous,
        "next": following,
    }


async def show_group(
    store: StoreReader, index: RolloutIndex, records: TokenRecords, group: str
) -> JsonObject:
    """Return a group's page: its rollouts side by side, and the other groups of an equal task.

    Raises:
        UnknownIdError: the run has no such group.
    """
    total, cards = index.find({"group": group}, limit=MAX_GROUP)
    if not cards:
        raise UnknownIdError(f"the run has no group {group!r}; the list of rollouts shows the groups")
    ids = [card["id"] for card in cards]
    advantages = advantages_of(records, cards[0]["step"], ids)
    finished = {
        item.rollout.rollout_id: item
        for item in await store.collect(ids, with_spans=True, with_span_tokens=False)
    }
    rewards = [card["reward"] for card in cards if card["reward"] is not None]
    return {
        "group": group,
        "step": cards[0]["step"],
        "mode": cards[0]["mode"],
        "task": plain(finished[ids[0]].rollout.input),
        "total": total,
        "reward_mean": statistics.fmean(rewards) if rewards else None,
        "reward_std": statistics.pstdev(rewards) if rewards else None,
        "rollouts": [
            card
            | {
                "rewards": finished[card["id"]].rewards,
                "advantage": advantages[card["id"]],
                "final": _final_answer(finished[card["id"]].spans),
                "said": _answers(finished[card["id"]].spans),
            }
            for card in cards
        ],
        "same_task": index.same_task(group),
    }


async def show_raw(store: StoreReader, rollout_id: str) -> JsonObject:
    """Return what is stored of a rollout, without arrays of tokens.

    Raises:
        UnknownIdError: the store does not have it.
    """
    finished = await read_rollout(store, rollout_id)
    arrays = (
        "prompt_ids",
        "output_ids",
        "logprobs",
        "weight_versions",
        "policy_logprobs",
        "allowed",
        "candidates",
    )
    calls = [
        {
            name: plain(getattr(call, name))
            for name in call.__dataclass_fields__
            if name not in (*arrays, "key")
        }
        | {"call_id": call.key.call_id, **{f"{name}_length": len(getattr(call, name)) for name in arrays}}
        for call in finished.generations
    ]
    return {
        "rollout": plain(finished.rollout.model_dump()),
        "attempts": [plain(attempt.model_dump()) for attempt in await store.query_attempts(rollout_id)],
        "rewards": finished.rewards,
        "spans": [plain(span.model_dump()) for span in finished.spans],
        "calls": calls,
    }


async def show_request(store: StoreReader, rollout_id: str, call_id: str) -> JsonObject:
    """Return the request of a call, to repeat it elsewhere.

    Raises:
        UnknownIdError: there is no such call.
    """
    finished = await read_rollout(store, rollout_id)
    span = next((span for span in finished.spans if span.attributes.get(CALL_ID) == call_id), None)
    if span is None or DIALECT not in span.attributes:
        raise UnknownIdError(f"rollout {rollout_id!r} has no call {call_id!r}")
    messages = _json(span.attributes.get(INPUT_MESSAGES), [])
    body = {**_json(span.attributes.get(REQUEST_PARAMETERS), {}), "messages": messages}
    if tools := _json(span.attributes.get(TOOL_DEFINITIONS), None):
        body["tools"] = tools
    if images := await store.read_images(recorded_images(messages)):
        urls = {name: to_data_url(data, media_type_of(data) or "image/png") for name, data in images.items()}
        body["messages"] = messages = inline_images(messages, urls)
    # the recorded messages are a chat's, whatever the dialect was
    text = json.dumps(body, ensure_ascii=False, indent=2)
    curl = (
        'curl "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" '
        f"-H 'Content-Type: application/json' -d {shlex.quote(text)}"
    )
    return {"curl": curl, "body": body, "messages": messages, "dialect": span.attributes[DIALECT]}


def advantages_of(
    records: TokenRecords, step: int | None, rollout_ids: Sequence[str]
) -> dict[str, float | None]:
    """Return the mean advantage of the trained tokens of rollouts; None if it is not recorded."""
    rows = records.read(step, rollout_ids) if step else {}
    means: dict[str, float | None] = {}
    for name in rollout_ids:
        values = [row.advantages[~np.isnan(row.advantages)] for row in rows.get(name, ())]
        joined = np.concatenate(values) if values else np.empty(0)
        means[name] = None if not values else float(joined.mean()) if len(joined) else 0.0
    return means


def _calls(
    generations: Sequence[Generation], lineages: Sequence[CallLineage], spans: Mapping[object, Span]
) -> list[JsonObject]:
    """Return the calls in order, each with the messages that its agent had not sent before."""
    known: dict[str | None, list[Any]] = {}
    calls = []
    for call, lineage in zip(generations, lineages, strict=True):
        span = spans.get(call.key.call_id)
        attributes = span.attributes if span else {}
        messages, answers = (_json(attributes.get(name), []) for name in (INPUT_MESSAGES, OUTPUT_MESSAGES))
        before = known.get(call.agent, [])
        shared = 0
        while shared < min(len(before), len(messages)) and before[shared] == messages[shared]:
            shared += 1
        known[call.agent] = messages + answers
        versions = call.weight_versions
        calls.append(
            {
                "id": call.key.call_id,
                "number": lineage.number,
                "agent": call.agent,
                "model": call.auxiliary_model or call.model,
                "dialect": attributes.get(DIALECT),
                "started": call.start_time,
                "ended": call.end_time,
                "prompt_tokens": len(call.prompt_ids),
                "output_tokens": len(call.output_ids),
                "finish_reason": call.finish_reason,
                "relation": lineage.kind,
                "relation_reason": lineage.reason or None,
                "row": None if lineage.row is None else lineage.row - 1,
                "trained": lineage.trained,
                "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
                "temperature": call.sampling.get("temperature"),
                "shared_messages": shared,
                "messages": messages[shared:],
                "answers": answers,
                "tools": _json(attributes.get(TOOL_DEFINITIONS), None),
                "parameters": _json(attributes.get(REQUEST_PARAMETERS), {}),
                "aborted": call.finish_reason == "aborted",
            }
        )
    return calls


def _attempt(attempt: Attempt) -> JsonObject:
    return {
        "attempt_id": attempt.attempt_id,
        "sequence_id": attempt.sequence_id,
        "status": attempt.status,
        "worker_id": attempt.worker_id,
        "started": attempt.start_time,
        "ended": attempt.end_time,
        "failure": attempt.failure.model_dump() if attempt.failure else None,
        "metadata": plain(attempt.metadata),
    }


def _span(span: Span) -> JsonObject:
    return {
        "id": span.span_id,
        "parent": span.parent_id,
        "name": span.attributes.get(OPERATION_NAME, span.name),
        "started": span.start_time,
        "ended": span.end_time,
        "status": span.status.status_code,
        "kind": _kind(span),
        "attributes": {name: _cut(plain(value)) for name, value in span.attributes.items()},
    }


def _kind(span: Span) -> str:
    if DIALECT in span.attributes:
        return "call"
    if get_any_rewards(span):
        return "reward"
    if span.status.status_code == "ERROR":
        return "error"
    return "tool" if OPERATION_NAME in span.attributes else "other"


def _cut(value: object) -> object:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= MAX_ATTRIBUTE:
        return value
    return f"{text[:MAX_ATTRIBUTE]}... ({len(text)} characters)"


def _final_answer(spans: Sequence[Span]) -> str | None:
    """Return the text of the last call's answer."""
    for span in reversed(spans):
        if DIALECT in span.attributes and (answers := _json(span.attributes.get(OUTPUT_MESSAGES), [])):
            return message_text(answers[-1])
    return None


def _answers(spans: Sequence[Span]) -> str:
    """Return the texts and the tool calls of all answers, a paragraph each."""
    said: list[str] = []
    for span in spans:
        if DIALECT not in span.attributes:
            continue
        for message in _json(span.attributes.get(OUTPUT_MESSAGES), []):
            if text := message_text(message):
                said.append(text)
    return "\n\n".join(said)


def _json(value: Any, default: object) -> Any:
    """Return the content of an attribute that holds JSON, or the default."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return default
