"""URL path and keys of one attempt. A key authorises requests to its own attempt only, and for one use."""

from __future__ import annotations

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
    # a path has no "#"
    message = attempt_path(rollout_id, attempt_id) + ("" if use == "model" else f"#{use}")
    return f"rl-{hmac.new(secret.encode(), message.encode(), hashlib.sha256).hexdigest()[:40]}"


def key_use(key: str, secret: str, rollout_id: str, attempt_id: str) -> KeyUse | None:
    """Return the use of a key of the attempt; None if it is not one. Comparisons take constant time."""
    uses: tuple[KeyUse, ...] = get_args(KeyUse)
    matches = [
        hmac.compare_digest(key.encode(), attempt_key(secret, rollout_id, attempt_id, use).encode())
        for use in uses
    ]
    return uses[matches.index(True)] if any(matches) else None
