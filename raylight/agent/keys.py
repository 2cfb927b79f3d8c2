"""The address and the key of one attempt. A key opens the routes of its attempt and no others."""

from __future__ import annotations

import hashlib
import hmac


def attempt_path(rollout_id: str, attempt_id: str) -> str:
    """The part of a URL that names an attempt."""
    return f"/rollout/{rollout_id}/attempt/{attempt_id}"


def scoped_key(secret: str, rollout_id: str, attempt_id: str) -> str:
    """The API key of one attempt, derived from the run's secret."""
    digest = hmac.new(secret.encode(), f"{rollout_id}/{attempt_id}".encode(), hashlib.sha256)
    return f"rl-{digest.hexdigest()[:40]}"


def key_opens(key: str, secret: str, rollout_id: str, attempt_id: str) -> bool:
    """Whether `key` is the attempt's own, compared in constant time."""
    return hmac.compare_digest(key.encode(), scoped_key(secret, rollout_id, attempt_id).encode())
