"""Sessions of clients, which end when their heartbeats stop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from raylight.http.errors import RequestError

MAX_SESSIONS = 1000


class ClientSessions:
    """Open sessions.

    Args:
        lease_s: seconds without a heartbeat after which a session ends.
        on_end: called with the id of an ended session.
    """

    def __init__(self, lease_s: float, on_end: Callable[[str], None]) -> None:
        self._lease_s, self._on_end = lease_s, on_end
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def ids(self) -> list[str]:
        """Ids of the open sessions, oldest first."""
        return list(self._timers)

    def open(self) -> str:
        """Open a session; return its id.

        Raises:
            RequestError: 429, too many are open.
        """
        if len(self._timers) >= MAX_SESSIONS:
            raise RequestError(f"{MAX_SESSIONS} sessions are open; try again later", 429)
        session_id = str(uuid.uuid4())
        self._timers[session_id] = self._start_timer(session_id)
        return session_id

    def renew(self, session_id: str) -> None:
        """Note a heartbeat.

        Raises:
            RequestError: 404, there is no such session.
        """
        self.check(session_id)
        self._timers[session_id].cancel()
        self._timers[session_id] = self._start_timer(session_id)

    def check(self, session_id: str) -> None:
        """Check that a session is open.

        Raises:
            RequestError: 404, there is no such session.
        """
        if session_id not in self._timers:
            raise RequestError(
                f"session_id: there is no session {session_id!r:.200}, or it ended after "
                f"{self._lease_s:g} s without a heartbeat; create another ServiceClient",
                404,
            )

    def finish(self, session_id: str) -> None:
        """End a session; one that has ended is ignored."""
        if (timer := self._timers.get(session_id)) is not None:
            timer.cancel()
            self._end(session_id)

    def close(self) -> None:
        """Stop all timers."""
        for timer in self._timers.values():
            timer.cancel()

    def _start_timer(self, session_id: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._lease_s, self._end, session_id)

    def _end(self, session_id: str) -> None:
        del self._timers[session_id]
        self._on_end(session_id)
