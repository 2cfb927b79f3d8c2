"""Rows of captured calls, each stored as what it adds to an earlier call of its attempt: its base.

The prompt of a call mostly begins with the tokens of an earlier call. Its row has the id of that call and the
number of tokens that both share, and only the tokens after them.

`CallDeltas` encodes the calls of a client. It remembers the latest one of each branch of an attempt's
conversations, since that has the tokens and texts of those before. Nothing depends on it: a call whose
beginning it does not hold is stored completely.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cachetools import LRUCache

from raylight.errors import StoreError
from raylight.semconv import INPUT_MESSAGES, REQUEST_PARAMETERS, TOOL_DEFINITIONS
from raylight.store.payloads import damaged, decode_payload, pack
from raylight.store.rows import Row, call_span_row
from raylight.types import (
    CallKey,
    FinishReason,
    Generation,
    HistoryNote,
    IntArray,
    JsonObject,
    PlacedImage,
    RouteArray,
    Span,
    TokenSets,
)
from raylight.types.token_sets import NO_TOKEN_SETS

CALL = "call_id, rollout_id, attempt_id, base, shared, generation"
"""Columns of a recorded call. `base` is the id of a call of the same attempt, or NULL; `shared` is the number
of its tokens (prompt and output) with which this call's prompt begins."""
ClosedCall = tuple[str, str, str, str | None, int, bytes | None, int, Row | None]
"""`(rollout_id, attempt_id, call_id, base, shared, generation, tokens, span)`; the generation is None if
nothing was sampled, the span if there is none. `tokens` is the number of sampled ones; CALL explains `base`
and `shared`."""
CallId = tuple[str, str]
"""`(attempt_id, call_id)`."""


def generation_bytes(call: Generation, shared: int = 0, routed: int = 0, seen: int = 0) -> bytes:
    """A generation without its key, and without the first `shared` tokens of its prompt, the routes of its
    first `routed` tokens, and its first `seen` images.

    Raises:
        TypeError: its sampling parameters cannot be stored.
    """
    versions, candidates = call.weight_versions, call.candidates
    prompt = call.prompt_ids[shared:].tobytes()
    is_constant = len(versions) > 0 and bool((versions == versions[0]).all())
    return pack(
        [
            call.model,
            zlib.compress(prompt, 1) if call.images else prompt,
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
            *([_compress(candidates.sizes), _compress(candidates.values)] if len(candidates) else ()),
            *([] if call.routed_experts is None else [_route_fields(call.routed_experts, routed)]),
            *([_image_fields(call.images, seen)] if call.images else ()),
        ]
    )


def _compress(values: IntArray) -> bytes:
    """Encode int32 values, shape (values,), that are mostly ids in ascending order."""
    differences = np.diff(values, prepend=np.int32(0))
    return zlib.compress(np.ascontiguousarray(differences.view(np.uint8).reshape(-1, 4).T).tobytes(), 1)


def _decompress(data: bytes) -> IntArray:
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view(np.int32).ravel().cumsum(dtype=np.int32)


def _route_fields(routes: RouteArray, start: int) -> list[object]:
    """Return the routes from a token on, with its index, their type and their shape."""
    return [start, routes.dtype.str, *routes.shape[1:], routes[start:].tobytes()]


def _image_fields(images: Sequence[PlacedImage], seen: int) -> JsonObject:
    """Return the images after the first `seen`; a mapping, which no other last field is.

    A call with such a field has a compressed prompt, because images are long runs of one token.
    """
    added = [[bytes.fromhex(image.sha256), image.start, image.stop] for image in images[seen:]]
    return {"seen": seen, "images": added}


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
    except (ValueError, TypeError, IndexError, zlib.error) as error:
        raise damaged(error) from None


class _StoredCall:
    """A call as its row has it, and its prompt once that is complete."""

    __slots__ = (
        *("added", "base", "fields", "images", "key", "length", "output", "prompt", "routed", "routes"),
        *("seen", "shared"),
    )

    def __init__(self, row: Row) -> None:
        call_id, rollout_id, attempt_id, base, shared, data = row
        self.key = CallKey(rollout_id, attempt_id, call_id)
        self.base: CallId | None = None if base is None else (attempt_id, base)
        self.shared = shared
        self.fields: list[Any] = decode_payload(data)
        self.seen = 0
        """Number of its first images that its base has."""
        self.images: tuple[PlacedImage, ...] = ()
        if isinstance(self.fields[-1], dict):
            images = self.fields.pop()
            self.seen = images["seen"]
            self.images = tuple(PlacedImage(name.hex(), *place) for name, *place in images["images"])
            self.fields[1] = zlib.decompress(self.fields[1])
        self.added: IntArray = np.frombuffer(self.fields[1], np.int32)
        self.output: IntArray = np.frombuffer(self.fields[2], np.int32)
        self.length = shared + len(self.added)
        """Number of tokens of the prompt."""
        self.prompt: IntArray = self.added
        self.routed = 0
        """Number of its first tokens that have the routes of its base."""
        self.routes: RouteArray | None = None
        if len(self.fields) % 2 == 0:  # candidates are two fields, or none
            self.routed, dtype, layers, top_k, routes = self.fields.pop()
            self.routes = np.frombuffer(routes, dtype).reshape(-1, layers, top_k)

    def generation(self) -> Generation:
        model, _, _, logprobs, versions, reason, start, end, sampling, agent = self.fields[:10]
        history, policy_logprobs, allowed = self.fields[10:13]
        candidates = list(map(_decompress, self.fields[13:15]))
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
            candidates=TokenSets(*candidates) if candidates else NO_TOKEN_SETS,
            routed_experts=self.routes,
            images=self.images,
        )


def _join_prompts(calls: dict[CallId, _StoredCall]) -> None:
    """Complete each prompt with the tokens that it shares with its base call.

    A call whose prompt begins with its base's prompt, and is the longest one that does, continues it. The
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
    heads = followers[None]  # calls that continue no other one; calls of a base come after it
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
    _join_routes(chain, calls)
    for call in chain:
        if call.seen and call.base is not None:
            call.images = calls[call.base].images[: call.seen] + call.images
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


def _join_routes(chain: list[_StoredCall], calls: dict[CallId, _StoredCall]) -> None:
    """Complete the routes of calls that continue one another. They are parts of one array, unless a call's
    end is not part of the next one's prompt."""
    known = None if chain[0].base is None else calls[chain[0].base].routes
    buffer: RouteArray | None = None
    last = max((i for i, call in enumerate(chain) if call.routes is not None), default=-1)
    for call, after in zip(chain[: last + 1], [*chain[1:], None], strict=False):
        if call.routes is None:
            known = buffer = None
            continue
        end = call.routed + len(call.routes)
        if buffer is None or len(buffer) < end:
            buffer = np.empty(
                (chain[last].length + len(chain[last].output), *call.routes.shape[1:]), call.routes.dtype
            )
            if call.routed:
                assert known is not None, "a call has its base's routes only if that has some"
                buffer[: call.routed] = known[: call.routed]
        buffer[call.routed : end] = call.routes
        call.routes = known = buffer[:end]
        if after is not None and after.routes is not None and after.routed < end:
            buffer = None


def _first_tokens(prompt: IntArray, output: IntArray, count: int) -> IntArray:
    return prompt[:count] if count <= len(prompt) else np.concatenate([prompt, output])[:count]


CAPACITY = 2**26
"""Bytes that a client remembers. The attempts that were used last are kept."""
OVERHEAD = 1_400
"""Memory of a branch without its tokens and texts, in bytes."""
MAX_BRANCHES = 64
"""Branches of an attempt that are remembered."""
MIN_TOKENS = 16
"""Fewest tokens that are worth sharing."""
MIN_TEXT = 64
"""Fewest characters that are worth sharing."""
TEXTS = (INPUT_MESSAGES, TOOL_DEFINITIONS, REQUEST_PARAMETERS)
"""Attributes of a call's span that repeat earlier calls'."""


@dataclass(frozen=True, slots=True, eq=False)
class _Branch:
    """The latest call of a branch, with the tokens and texts of its record."""

    call_id: str
    tokens: tuple[IntArray, ...]
    """Tokens of the prompt and of the output; empty for a call without tokens."""
    span_id: str
    """Id of its span; "" if it has none."""
    texts: dict[str, str]
    routed: int
    """Number of its tokens that have routes."""
    images: tuple[PlacedImage, ...]
    size: int
    """Memory in bytes."""

    @property
    def messages(self) -> str:
        return self.texts.get(INPUT_MESSAGES, "")

    def token(self, index: int) -> int | None:
        """Token at a position; None behind the end."""
        for part in self.tokens:
            if index < len(part):
                return part[index]
            index -= len(part)
        return None

    def count_shared(self, prompt: IntArray) -> int:
        """Number of this call's tokens with which a prompt, shape (tokens,), begins."""
        count = 0
        for part in self.tokens:
            shared = _count_equal(prompt[count:], part)
            count += shared
            if shared < len(part):
                break
        return count

    def is_within(self, other: _Branch, shared: int) -> bool:
        """True if another call, which begins with `shared` tokens of this one, has all its tokens and
        messages, apart from the last bracket."""
        return shared == sum(map(len, self.tokens)) and other.messages.startswith(self.messages[:-1])


class _Branches(list[_Branch]):
    """Branches of an attempt, and their memory in bytes."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        super().__init__()
        self.size = 0


class CallDeltas:
    """Encoder of the calls that one client records.

    Args:
        capacity: bytes that are remembered.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._attempts: LRUCache[str, _Branches] = LRUCache(capacity, getsizeof=lambda known: known.size)

    def encode(self, key: CallKey, generation: Generation | None, span: Span | None) -> ClosedCall:
        """Encode a call, and remember it.

        If the store does not receive it, `forget` its attempt.

        Raises:
            SpanError: the span cannot be stored.
            TypeError: the sampling parameters cannot be stored.
        """
        branches: list[_Branch] = self._attempts.get(key.attempt_id, [])
        base, shared, data, tokens = None, 0, None, 0
        if generation is not None:
            base, shared = _find_base(branches, generation.prompt_ids)
            routed = min(shared, base.routed) if base is not None else 0
            seen = _count_seen(generation.images, base.images) if base is not None else 0
            data, tokens = generation_bytes(generation, shared, routed, seen), len(generation.output_ids)
        texts = {} if span is None else _texts_of(span)
        row, continued = (None, None) if span is None else _span_delta(branches, span, texts)
        if generation is not None or span is not None:
            branch = _branch(key.call_id, generation, span, texts)
            before = base if generation is not None else continued
            if before is not None and not before.is_within(branch, shared):
                before = None
            self._remember(key.attempt_id, branch, before)
        base_id = base.call_id if base is not None else None
        return key.rollout_id, key.attempt_id, key.call_id, base_id, shared, data, tokens, row

    def forget(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts: the store may not have their latest calls."""
        for attempt_id in attempt_ids:
            self._attempts.pop(attempt_id, None)

    def _remember(self, attempt_id: str, branch: _Branch, before: _Branch | None) -> None:
        """Add a branch in place of the one that it continues."""
        known = self._attempts.get(attempt_id) or _Branches()
        if before is not None:
            known.remove(before)
        known.append(branch)
        known.size += branch.size - (before.size if before is not None else 0)
        while len(known) > MAX_BRANCHES or known.size > self._attempts.maxsize:
            known.size -= known.pop(0).size
        self._attempts[attempt_id] = known


def _branch(call_id: str, generation: Generation | None, span: Span | None, texts: dict[str, str]) -> _Branch:
    size = OVERHEAD + sum(map(sys.getsizeof, texts.values()))
    tokens = () if generation is None else (generation.prompt_ids, generation.output_ids)
    size += sum(part.nbytes for part in tokens)
    routes = None if generation is None else generation.routed_experts
    routed = 0 if routes is None else len(routes)
    images = () if generation is None else generation.images
    return _Branch(call_id, tokens, span.span_id if span else "", texts, routed, images, size)


def _find_base(branches: list[_Branch], prompt: IntArray) -> tuple[_Branch | None, int]:
    """Return the call that shares the longest beginning, and its length; None and 0 if it is too short."""
    best, length = None, MIN_TOKENS - 1
    for branch in reversed(branches):
        if length >= len(prompt):
            break
        if branch.token(length) == prompt[length] and (shared := branch.count_shared(prompt)) > length:
            best, length = branch, shared
    return (best, length) if best else (None, 0)


def _span_delta(branches: list[_Branch], span: Span, texts: dict[str, str]) -> tuple[Row, _Branch | None]:
    """Row of a call's span, and the branch whose texts it continues."""
    messages = texts.get(INPUT_MESSAGES, "")
    base, longest = None, MIN_TEXT - 1
    for branch in reversed(branches):
        if longest >= len(messages) - 1:  # all but the last bracket
            break
        if branch.span_id and branch.messages.startswith(messages[: longest + 1]):
            base, longest = branch, _count_shared(messages, branch.messages)
    if base is None:
        return call_span_row(span, span.attributes), None
    lengths = {name: _count_shared(text, base.texts.get(name, "")) for name, text in texts.items()}
    shared = {name: length for name, length in lengths.items() if length >= MIN_TEXT}
    attributes = {name: span.attributes[name][length:] for name, length in shared.items()}
    return call_span_row(span, span.attributes | attributes, base.span_id, shared), base


def _texts_of(span: Span) -> dict[str, str]:
    """Texts that later spans may continue."""
    texts = ((name, span.attributes.get(name)) for name in TEXTS)
    return {name: text for name, text in texts if isinstance(text, str)}


def _count_equal(one: IntArray, other: IntArray) -> int:
    """Number of equal tokens at the beginning of both."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _count_seen(images: Sequence[PlacedImage], earlier: Sequence[PlacedImage]) -> int:
    """Number of equal images at the beginning of both."""
    pairs = zip(images, earlier, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _count_shared(text: str, earlier: str) -> int:
    """Number of equal characters at the beginning of both, without the last bracket of the earlier one."""
    low, high = 0, min(len(text), len(earlier) - 1)
    middle = high  # mostly all of them are equal
    while low < high:
        if text.startswith(earlier[low:middle], low):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
