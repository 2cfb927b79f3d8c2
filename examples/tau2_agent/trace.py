"""What was said in a rollout, by every agent, from the store that a run left."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import raylight as rl
from raylight.types import FinishedRollout


async def read_rollouts(path: Path) -> list[FinishedRollout]:
    """All rollouts of a store, with their spans."""
    service = rl.StoreService(path, read_only=True)
    store = rl.StoreClient(service)
    try:
        return await store.collect([rollout.rollout_id for rollout in await store.query_rollouts()], with_spans=True)
    finally:
        await service.close()


def calls_of(spans: Sequence[rl.Span]) -> list[rl.Triplet]:
    """The recorded calls of all agents in their order, whether their tokens are known or not."""
    return rl.TracerTraceToTriplet().adapt(spans)


def render(finished: FinishedRollout, trained: str) -> str:
    """A rollout as text: every call with what is new in its prompt, what it answered, and whether it would be trained.

    Args:
        trained: name of the agent that is.
    """
    lines = [f"task {finished.rollout.input['id']}: {finished.rollout.status}"]
    seen: dict[str | None, int] = defaultdict(int)
    for number, call in enumerate(calls_of(finished.spans), start=1):
        agent = call.metadata["agent_name"]
        tokens = len(call.response["token_ids"])
        known = f"{tokens} tokens" if tokens else "tokens unknown"
        lines.append(f"\n--- call {number}, {agent} ({'trained' if agent == trained else 'not trained'}, {known})")
        prompt = call.prompt["raw_content"] or []
        lines += [_message(message) for message in prompt[seen[agent] :]]
        lines += [f">>> {_message(message)}" for message in call.response["raw_content"] or []]
        seen[agent] = len(prompt) + 1  # its own answer comes back in the next prompt
    if (attempt := finished.rollout.attempt) is not None and attempt.failure is not None:
        lines.append(f"\nfailed: {attempt.failure.error}")
    told = " ".join(f"{name}={value:g}" for name, value in finished.rewards.items())
    return "\n".join([*lines, f"\nrewards: {told or 'none'}"])


def _message(message: dict[str, Any]) -> str:
    said = [f"[{message['role']}] {_text(message.get('content'))}".rstrip()]
    for call in message.get("tool_calls") or ():
        said.append(f"  {call['function']['name']}({call['function']['arguments']})")
    return "\n".join(said)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)
