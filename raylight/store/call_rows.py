"""Rows of captured calls, each stored as what it adds to an earlier call of its attempt: its base.

The prompt of a call mostly begins with the tokens of an earlier call. Its row has the id of that call and the
number of tokens that both share, and only the tokens after them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from raylight.errors import StoreError
from raylight.store.payloads import damaged, decode_payload, pack
from raylight.store.rows import Row
from raylight.types import CallKey, FinishReason, Generation, HistoryNote, IntArray

CALL = "call_id, rollout_id, attempt_id, base, shared, generation"
"""Columns of a recorded call. `base` is the id of a call of the same attempt, or NULL; `shared` is the number
of its tokens (prompt and output) with which this call's prompt begins."""
CallId = tuple[str, str]
"""`(attempt_id, call_id)`."""


def generation_bytes(call: Generation, shared: int = 0) -> bytes:
    """A generation without its key, and without the first `shared` tokens of its prompt.

    Raises:
        TypeError: its sampling parameters cannot be stored.
    """
    versions = call.weight_versions
    is_constant = len(versions) > 0 and bool((versions == versions[0]).all())
    return pack(
        [
            call.model,
            call.prompt_ids[shared:].tobytes(),
            call.output_ids.tobytes(),
            call.logprobs.tobytes(),
            int(versions[0]) if is_constant else versions.tobytes(),
            call.finish_reason,
            call.start_time,
            call.end_time,
            call.sampling,
            call.agent,
            list(call.history) if call.history else None,
            call.policy_logprobs.tobytes(),
            call.allowed.tobytes(),
        ]
    )


def sampled_tokens(generation: bytes) -> tuple[int, FinishReason]:
    """Return the number of tokens that a stored generation has sampled, and its finish reason."""
    fields = decode_payload(generation)
    return len(fields[2]) // np.dtype(np.int32).itemsize, fields[5]


def call_versions(generation: bytes) -> list[int]:
    """Return the distinct weight versions that sampled a stored generation, oldest first."""
    fields = decode_payload(generation)
    if not fields[2]:
        return []
    if isinstance(fields[4], int):
        return [fields[4]]
    return sorted(set(np.frombuffer(fields[4], np.int64).tolist()))


def generations_from_rows(rows: Iterable[Row]) -> dict[CallId, Generation]:
    """Generations of calls, in the given order, from columns CALL.

    The rows must include the bases of the calls, and theirs. Prompts of one conversation share memory.

    Raises:
        StoreError: a base is missing, or a call is damaged.
    """
    try:
        calls = {(row[2], row[0]): _StoredCall(row) for row in rows}
        _join_prompts(calls)
        return {call_id: call.generation() for call_id, call in calls.items()}
    except (ValueError, TypeError, IndexError) as error:
        raise damaged(error) from None


class _StoredCall:
    """A call as its row has it, and its prompt once that is complete."""

    __slots__ = ("added", "base", "fields", "key", "length", "output", "prompt", "shared")

    def __init__(self, row: Row) -> None:
        call_id, rollout_id, attempt_id, base, shared, data = row
        self.key = CallKey(rollout_id, attempt_id, call_id)
        self.base: CallId | None = None if base is None else (attempt_id, base)
        self.shared = shared
        self.fields: list[Any] = decode_payload(data)
        self.added: IntArray = np.frombuffer(self.fields[1], np.int32)
        self.output: IntArray = np.frombuffer(self.fields[2], np.int32)
        self.length = shared + len(self.added)
        """Number of tokens of the prompt."""
        self.prompt: IntArray = self.added

    def generation(self) -> Generation:
        model, _, _, logprobs, versions, reason, start, end, sampling, agent = self.fields[:10]
        history, policy_logprobs, allowed = self.fields[10:]
        if isinstance(versions, int):
            weight_versions = np.full(len(self.output), versions, np.int64)
        else:
            weight_versions = np.frombuffer(versions, np.int64)
        return Generation(
            key=self.key,
            model=model,
            prompt_ids=self.prompt,
            output_ids=self.output,
            logprobs=np.frombuffer(logprobs, np.float32),
            weight_versions=weight_versions,
            finish_reason=reason,
            start_time=start,
            end_time=end,
            sampling=sampling,
            agent=agent,
            history=HistoryNote(*history) if history else None,
            policy_logprobs=np.frombuffer(policy_logprobs, np.float32),
            allowed=np.frombuffer(allowed, np.int32),
        )


def _join_prompts(calls: dict[CallId, _StoredCall]) -> None:
    """Complete the prompts.

    A call whose prompt begins with that of its base, and is the longest one that does, continues it. The
    prompts of calls that continue one another are parts of one array, whose tokens are copied once.
    """
    followers: dict[CallId | None, list[_StoredCall]] = defaultdict(list)
    for call in calls.values():
        if call.base is not None and call.base not in calls:
            raise StoreError(
                f"the store's file is damaged: it lacks the call {call.base[1]!r}, which the call "
                f"{call.key.call_id!r} continues; use a copy of the file"
            )
        followers[call.base].append(call)
    heads = followers[None]  # calls that continue no other one; those of a base come after it
    for head in heads:
        chain = [head]
        while after := followers.get((chain[-1].key.attempt_id, chain[-1].key.call_id)):
            longest = max(after, key=lambda call: call.length)
            continues = longest.shared >= chain[-1].length
            heads += [call for call in after if not (continues and call is longest)]
            if not continues:
                break
            chain.append(longest)
        _join_chain(chain, calls)


def _join_chain(chain: list[_StoredCall], calls: dict[CallId, _StoredCall]) -> None:
    """Complete the prompts of calls that continue one another."""
    head = chain[0]
    if len(chain) == 1 and head.base is None:
        return
    tokens = np.empty(chain[-1].length, np.int32)
    if head.base is not None:
        base = calls[head.base]
        tokens[: head.shared] = _first_tokens(base.prompt, base.output, head.shared)
    tokens[head.shared : head.length] = head.added
    for before, call in itertools.pairwise(chain):
        tokens[before.length : call.shared] = before.output[: call.shared - before.length]
        tokens[call.shared : call.length] = call.added
    tokens.flags.writeable = False
    for call in chain:
        call.prompt = tokens[: call.length]


def _first_tokens(prompt: IntArray, output: IntArray, count: int) -> IntArray:
    return prompt[:count] if count <= len(prompt) else np.concatenate([prompt, output])[:count]
