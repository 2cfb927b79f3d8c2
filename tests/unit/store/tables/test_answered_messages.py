"""The last message of each client: found again, and dropped once many others came later."""

import asyncio
from collections.abc import Iterator

import pytest

from raylight.errors import InvalidTransitionError, StoreError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.store.tables import answered_messages
from raylight.store.tables.answered_messages import AnsweredMessages
from raylight.store.tables.journal import Journal


@pytest.fixture
def journal() -> Iterator[Journal]:
    journal = Journal(None)
    yield journal
    journal.close()


def n_clients(journal: Journal) -> int:
    (count,) = journal.fetch_one("SELECT COUNT(*) FROM clients") or (0,)
    return count


def test_results_are_found_again(journal: Journal) -> None:
    messages = AnsweredMessages(journal)
    row = ("ro", 1.5, None, b"\x00", ("at", 2**62))
    messages.add(
        "client", 3, [(True, row), (True, [1, None]), (False, InvalidTransitionError("a -> \ud800"))]
    )
    assert messages.find("client", 4) is None
    assert messages.find("other", 3) is None
    found = AnsweredMessages(journal).find("client", 3)
    assert found[:2] == [(True, row), (True, [1, None])]
    succeeded, again = found[2]
    assert (succeeded, type(again), str(again)) == (False, InvalidTransitionError, "a -> \ud800")
    with pytest.raises(StoreError, match="message 2 of a client arrived after its message 3"):
        messages.find("client", 2)


def test_clients_that_sent_nothing_for_long_are_dropped(journal: Journal) -> None:
    messages = AnsweredMessages(journal, max_clients=100)
    with journal.transaction():
        for number in range(3 * answered_messages.PRUNE_EVERY):
            messages.add("busy", number, [(True, number)])
            messages.add(f"short-{number}", 1, [(True, None)])
    assert n_clients(journal) == 100
    assert messages.find("busy", number) == [(True, number)]
    assert messages.find(f"short-{number}", 1) == [(True, None)]
    assert messages.find("short-0", 1) is None


def test_hundreds_of_event_loops_leave_a_bounded_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answered_messages, "PRUNE_EVERY", 50)

    async def open_store() -> StoreService:
        service = StoreService()
        service._answered = AnsweredMessages(service._journal, max_clients=20)
        return service

    service = asyncio.run(open_store())
    client = StoreClient(service)
    for _ in range(300):
        asyncio.run(client.update_worker("w"))
        assert n_clients(service._journal) <= 70
    asyncio.run(service.close())
