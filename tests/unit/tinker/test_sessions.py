"""A session lives as long as its heartbeats come."""

import asyncio

import pytest
from unit_helpers import within

from raylight.http.errors import RequestError

pytest.importorskip("tinker.proto", reason="pip install 'raylight[tinker]'")
from raylight.tinker.service import ClientSessions


async def test_a_session_ends_without_heartbeats() -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    sessions = ClientSessions(0.05, ended.put_nowait)
    session = sessions.open()
    async with within():
        assert await ended.get() == session
    with pytest.raises(RequestError, match="there is no session") as caught:
        sessions.renew(session)
    assert caught.value.status == 404


async def test_a_heartbeat_renews_a_session() -> None:
    ended: list[str] = []
    sessions = ClientSessions(60.0, ended.append)
    session = sessions.open()
    before = sessions._timers[session].when()
    sessions.renew(session)
    assert sessions._timers[session].when() >= before
    assert sessions.ids == [session]
    sessions.finish(session)
    sessions.finish(session)
    assert ended == [session]
    sessions.close()
