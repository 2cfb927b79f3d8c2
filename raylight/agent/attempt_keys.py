"""URL path and API key of one attempt. A key authorises requests to its own attempt only."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import quote


def attempt_path(rollout_id: str, attempt_id: str, agent_id: str | None = None) -> str:
    """Return the URL path of an attempt, and of the calling agent if it is named. Ids are percent-encoded."""
    path = f"/rollout/{_segment(rollout_id)}/attempt/{_segment(attempt_id)}"
    return path if agent_id is None else f"{path}/agent/{_segment(agent_id)}"


def _segment(name: str) -> str:
    """Encode a name as one path segment. Clients would resolve a segment of dots as a relative path."""
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def attempt_key(secret: str, rollout_id: str, attempt_id: str) -> str:
    """Return the API key of an attempt, derived from the run's secret and the attempt's unique path."""
    digest = hmac.new(secret.encode(), attempt_path(rollout_id, attempt_id).encode(), hashlib.sha256)
    return f"rl-{digest.hexdigest()[:40]}"


def is_attempt_key(key: str, secret: str, rollout_id: str, attempt_id: str) -> bool:
    """Return True if `key` is the key of the attempt. The comparison takes constant time."""
    return hmac.compare_digest(key.encode(), attempt_key(secret, rollout_id, attempt_id).encode())
