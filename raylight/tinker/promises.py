"""Futures: results of requests, kept for a while for clients that long-poll."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachetools import LRUCache, TTLCache

from raylight.errors import AdapterLostError, CheckpointError, ConfigError, NonFiniteGradientError
from raylight.http.errors import RequestError

logger = logging.getLogger(__name__)

KEPT_S = 900.0
"""Seconds for which a result is kept."""
MAX_BYTES = 2**29
"""Bytes of results that are kept; the oldest are dropped first."""
MAX_REMEMBERED = 100_000
"""Ids of requests that are remembered, to distinguish a dropped result from an unknown one."""
USER_ERRORS = (RequestError, ConfigError, CheckpointError, NonFiniteGradientError)
"""Failures that the same request would have again."""


@dataclass(frozen=True)
class ResultBody:
    """Body of an HTTP answer."""

    content: bytes
    media_type: str = "application/json"


def json_answer(fields: Mapping[str, object]) -> ResultBody:
    return ResultBody(json.dumps(fields).encode())


def failure(error: BaseException) -> ResultBody:
    """Return the result of a failed request, in the SDK's form."""
    category = "user" if isinstance(error, USER_ERRORS) else "server"
    if category == "server" and not isinstance(error, AdapterLostError):  # which was logged once
        logger.error("a request of the Tinker API failed", exc_info=error)
    text = str(error) if category == "user" else f"{type(error).__name__}: {error}"
    return json_answer({"error": text, "category": category})


class Promises:
    """Results of accepted requests, by id.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pending: dict[str, asyncio.Future[ResultBody]] = {}
        self._done: TTLCache[str, ResultBody] = TTLCache(
            MAX_BYTES, KEPT_S, timer=clock, getsizeof=lambda answer: len(answer.content)
        )
        self._known: LRUCache[str, None] = LRUCache(MAX_REMEMBERED)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def add(self, request_id: str, work: asyncio.Future[ResultBody]) -> None:
        """Keep the result of a request, once it is there. A failure is a result."""
        self._pending[request_id], self._known[request_id] = work, None
        work.add_done_callback(lambda work: self._finish(request_id, work))

    def cancel(self, request_id: str) -> None:
        """Cancel a request that is not done; others are ignored."""
        if (work := self._pending.get(request_id)) is not None:
            work.cancel()

    async def wait(self, request_id: str, timeout: float) -> ResultBody | None:
        """Return a result; None if it is not there within `timeout` seconds.

        Raises:
            RequestError: 404, the request does not exist; 410, its result has been dropped.
        """
        if (work := self._pending.get(request_id)) is not None:
            await asyncio.wait([work], timeout=timeout)
            if not work.done():
                return None
            self._finish(request_id, work)
        if (answer := self._done.get(request_id)) is not None:
            return answer
        if request_id in self._known:
            raise RequestError(
                f"the result of {request_id!r:.200} is kept no longer; send the request again", 410
            )
        raise RequestError(f"there is no request {request_id!r:.200}", 404)

    def _finish(self, request_id: str, work: asyncio.Future[ResultBody]) -> None:
        if self._pending.pop(request_id, None) is None:
            return
        if work.cancelled():
            error: BaseException | None = RequestError(
                "the request was cancelled: by the client, or because its session ended"
            )
        else:
            error = work.exception()
        self._done[request_id] = work.result() if error is None else failure(error)
