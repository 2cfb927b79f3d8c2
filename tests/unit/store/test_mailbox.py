"""Requests to the driver of a run through its store."""

import asyncio

from store_helpers import Box
from unit_helpers import within

from raylight.store import service as module
from raylight.store.service import Mailbox


async def test_a_request_waits_for_the_drivers_reply(box: Box) -> None:
    async with within():
        asking = asyncio.create_task(box.store.ask_driver("run", {"runners": 8}, timeout=60))
        other = asyncio.create_task(box.store.ask_driver("other", {"runners": 1}, timeout=0.05))
        found = await box.store.next_driver_request("run", [], timeout=60)
        assert found is not None
        key, request = found
        assert request == {"runners": 8}
        assert await box.store.next_driver_request("run", [key], timeout=0.01) is None
        await box.store.reply_to_request(key, {"runners": (2, 8)})
        assert await asking == {"runners": (2, 8)}
        assert await other is None
        assert await box.store.next_driver_request("other", [], timeout=0.01) is None  # it has been given up


async def test_a_restarted_store_gets_the_request_again() -> None:
    async with within():
        before, after = Mailbox(), Mailbox()
        first = asyncio.create_task(before.ask_driver("run", "key", {"runners": 8}, 60))
        assert await before.next_driver_request("run", [], 60) == ("key", {"runners": 8})
        first.cancel()  # with the store's process
        repeated = asyncio.create_task(after.ask_driver("run", "key", {"runners": 8}, 60))
        assert await after.next_driver_request("run", [], 60) == ("key", {"runners": 8})
        await after.reply_to_request("key", {"runners": (2, 8)})
        assert await repeated == {"runners": (2, 8)}
        assert await after.ask_driver("run", "key", {"runners": 8}, 60) == {"runners": (2, 8)}


async def test_replies_that_are_kept_are_bounded() -> None:
    mailbox = Mailbox()
    for number in range(2 * module.REMEMBERED_REPLIES):
        await mailbox.reply_to_request(str(number), {})
    assert len(mailbox._replies) == module.REMEMBERED_REPLIES
