"""Watch over the process of vLLM's engine core, which vLLM takes for healthy as long as it exists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from raylight.errors import WeightSyncError

CORE_TIMEOUT_S = 180.0
"""Time without a response after which the core counts as hanging. It responds between two steps, and may
compile in a step on a CPU."""


class CoreWatch:
    """Notices a core that hangs.

    A health check must end quickly, so it does not wait for the core: it looks at the age of an earlier call.

    Args:
        call: calls the core.
    """

    def __init__(
        self, call: Callable[[], Coroutine[object, object, object]], timeout_s: float = CORE_TIMEOUT_S
    ) -> None:
        self._call, self._timeout_s = call, timeout_s
        self._waiting: asyncio.Task[object] | None = None
        self._called = 0.0

    def check(self) -> None:
        """Call the core, unless a call is under way.

        Raises:
            WeightSyncError: the core did not respond in time. Errors of the call are raised too.
        """
        now = asyncio.get_running_loop().time()
        if self._waiting is not None and self._waiting.done():
            answered, self._waiting = self._waiting, None
            answered.result()
        if self._waiting is None:
            self._waiting, self._called = asyncio.create_task(self._call()), now
        elif now - self._called > self._timeout_s:
            raise WeightSyncError(f"vLLM's engine core did not respond for {now - self._called:.0f} s")

    def reset(self) -> None:
        """Forget the call under way: the core is known to be busy."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
