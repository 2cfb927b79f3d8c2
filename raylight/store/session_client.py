"""The part of the store's client for sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from raylight.store.call_batcher import Channel
from raylight.store.payloads import decode_payload, encode_payload
from raylight.store.rows import N_STATE, Row, config_from_json, new_id, state_from_row
from raylight.types import RolloutConfig, RolloutState


class Session(NamedTuple):
    """A session: an attempt that an agent outside the run executes."""

    state: RolloutState
    """State of its rollout, with the session's own attempt."""
    config: RolloutConfig
    task: Any
    expires: float | None
    """Time at which it expires without a call or a heartbeat, in seconds since the epoch; None: never."""
    calls: int
    """Number of its recorded calls."""
    sampled_tokens: int
    """Number of tokens that they sampled."""

    @property
    def session_id(self) -> str:
        """Id of the session, which is that of its attempt."""
        assert self.state.attempt is not None, "a session has an attempt"
        return self.state.attempt.attempt_id


class SessionClient:
    """Methods of `StoreClient` for sessions. An unknown id raises UnknownIdError."""

    _channel: Channel

    async def begin_session(self, task: Any, group: str | None = None) -> Session | None:
        """Take a free place that the run offers; None if there is none.

        Raises:
            InvalidTransitionError: the group has another task.
            StoreError: the task cannot be stored.
        """
        row = await self._channel.call("begin_session", new_id("se"), encode_payload(task, "task"), group)
        return None if row is None else _session(row)

    async def get_session(self, session_id: str) -> Session:
        """Return a session."""
        return _session(await self._channel.call("session_state", session_id))

    async def renew_session(self, session_id: str) -> Session:
        """Renew a session that has not ended, as each of its calls does."""
        return _session(await self._channel.call("renew_session", session_id))

    async def stop_time(self) -> None:
        """Let no attempt or session expire until `continue_time`: the run is not there yet to serve them."""
        await self._channel.call("stop_time")

    async def continue_time(self) -> None:
        """Let the time of attempts and sessions go on."""
        await self._channel.call("continue_time")

    async def has_open_call(self, session_id: str) -> bool:
        """Return True if a call of a session has begun and is not recorded yet."""
        return not await self._channel.send("wait_for_records", session_id, 0.0)

    async def wait_until_final(self, rollout_ids: Sequence[str]) -> None:
        """Wait until all of these rollouts are decided for good: not only failed because their session
        expired, which may still be rewarded."""
        await self._channel.send("wait_until_decided", list(rollout_ids), None, None, True)


def _session(row: Row) -> Session:
    config, task, *rest = row[N_STATE:]
    return Session(state_from_row(row[:N_STATE]), config_from_json(config), decode_payload(task), *rest)
