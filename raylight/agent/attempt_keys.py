"""URL path and keys of one attempt. A key authorises requests to its own attempt only, and for one use."""

from __future__ import annotations

import functools
import hashlib
import hmac
from typing import Literal, get_args
from urllib.parse import quote

KeyUse = Literal["model", "train", "traces", "model-budgets", "train-budgets"]
"""Use of a key: "model" calls models, "train" calls them in a rollout whose calls are trained, "traces" sends
spans and rewards. With "-budgets", the store is asked before each call what the attempt may still use."""


def attempt_path(rollout_id: str, attempt_id: str, agent_id: str | None = None) -> str:
    """Return the URL path of an attempt, and of the calling agent if it is named. Ids are percent-encoded."""
    path = f"/rollout/{_segment(rollout_id)}/attempt/{_segment(attempt_id)}"
    return path if agent_id is None else f"{path}/agent/{_segment(agent_id)}"


def _segment(name: str) -> str:
    """Encode a name as one path segment. Clients would resolve a segment of dots as a relative path."""
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def attempt_key(secret: str, rollout_id: str, attempt_id: str, use: KeyUse = "model") -> str:
    """Return a key of an attempt, derived from the run's secret, the attempt's unique path and the use."""
    return _keys(secret, rollout_id, attempt_id)[use].decode()


@functools.lru_cache(8192)
def key_use(key: str, secret: str, rollout_id: str, attempt_id: str) -> KeyUse | None:
    """Return the use of a key of the attempt; None if it is not one. Comparisons take constant time.

    Answers are remembered: an attempt makes many calls with one key.
    """
    given, found = key.encode(), None
    for use, known in _keys(secret, rollout_id, attempt_id).items():
        if hmac.compare_digest(given, known):
            found = use
    return found


@functools.lru_cache(8192)
def _keys(secret: str, rollout_id: str, attempt_id: str) -> dict[KeyUse, bytes]:
    """Return the keys of an attempt by use."""
    path = attempt_path(rollout_id, attempt_id)
    messages = {
        use: path if use == "model" else f"{path}#{use}" for use in get_args(KeyUse)
    }  # a path has no "#"
    return {
        use: f"rl-{hmac.digest(secret.encode(), message.encode(), hashlib.sha256).hex()[:40]}".encode()
        for use, message in messages.items()
    }
