"""The address and the key of one attempt. A key opens the routes of its attempt and no others."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import quote


def attempt_path(rollout_id: str, attempt_id: str, agent_id: str | None = None) -> str:
    """The part of a URL that names an attempt, and the agent in it that calls, where there are several. Ids are percent-encoded."""
    path = f"/rollout/{_segment(rollout_id)}/attempt/{_segment(attempt_id)}"
    return path if agent_id is None else f"{path}/agent/{_segment(agent_id)}"


def _segment(name: str) -> str:
    """A name as one segment of a path; clients would take one of dots for a way up."""
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def attempt_key(secret: str, rollout_id: str, attempt_id: str) -> str:
    """The API key of one attempt, derived from the run's secret and the attempt's path, which tells any two attempts apart."""
    digest = hmac.new(secret.encode(), attempt_path(rollout_id, attempt_id).encode(), hashlib.sha256)
    return f"rl-{digest.hexdigest()[:40]}"


def is_attempt_key(key: str, secret: str, rollout_id: str, attempt_id: str) -> bool:
    """Whether `key` is the attempt's own, compared in constant time."""
    return hmac.compare_digest(key.encode(), attempt_key(secret, rollout_id, attempt_id).encode())
