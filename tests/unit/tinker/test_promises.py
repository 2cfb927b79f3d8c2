"""Results are kept for a time; failures are results."""

import asyncio
import json

import pytest

from raylight.errors import ConfigError
from raylight.http.errors import RequestError
from raylight.tinker.promises import KEPT_S, Promises, ResultBody


async def test_a_result_is_kept_for_a_time() -> None:
    now = 0.0
    promises = Promises(lambda: now)
    work: asyncio.Future[ResultBody] = asyncio.get_running_loop().create_future()
    promises.add("a", work)
    assert await promises.wait("a", 0.001) is None
    work.set_result(ResultBody(b"done"))
    assert await promises.wait("a", 1) == ResultBody(b"done")
    now = KEPT_S - 1
    assert await promises.wait("a", 1) == ResultBody(b"done")
    now = KEPT_S + 1
    with pytest.raises(RequestError, match="no longer") as caught:
        await promises.wait("a", 1)
    assert caught.value.status == 410
    with pytest.raises(RequestError, match="there is no request 'b'") as unknown:
        await promises.wait("b", 1)
    assert unknown.value.status == 404


@pytest.mark.parametrize(
    ("error", "category"),
    [(RequestError("bad"), "user"), (ConfigError("bad"), "user"), (RuntimeError("bad"), "server")],
)
async def test_a_failure_is_a_result_in_the_sdks_form(error: Exception, category: str) -> None:
    promises = Promises()
    work: asyncio.Future[ResultBody] = asyncio.get_running_loop().create_future()
    promises.add("a", work)
    work.set_exception(error)
    answer = await promises.wait("a", 1)
    found = json.loads(answer.content)
    assert found["category"] == category
    assert "bad" in found["error"]


async def test_cancelled_work_is_a_failure() -> None:
    promises = Promises()
    work: asyncio.Future[ResultBody] = asyncio.get_running_loop().create_future()
    promises.add("a", work)
    work.cancel()
    answer = await promises.wait("a", 1)
    assert b"was cancelled" in answer.content
