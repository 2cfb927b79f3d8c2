"""Limit on the sandboxes that exist at once in a process."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator
from typing import Any

from raylight.errors import ConfigError
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import Sandbox


class SandboxPool:
    """Starts sandboxes, at most so many at once in this process, and stops every one of them.

    Those that wait are started in their order. A copy in another process has a limit of its own.

    Args:
        max_sandboxes: sandboxes at once; None: no limit.

    Raises:
        ConfigError: the limit is no positive number.
    """

    def __init__(self, max_sandboxes: int | None = None) -> None:
        if max_sandboxes is not None and (isinstance(max_sandboxes, bool) or max_sandboxes < 1):
            raise ConfigError(
                f"max_sandboxes is {max_sandboxes!r}; give a number from 1, or None for no limit"
            )
        self._max_sandboxes = max_sandboxes
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SandboxPool, (self._max_sandboxes,)

    @contextlib.asynccontextmanager
    async def started(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Yield a started sandbox, and stop it at the end: also one whose start failed or was cancelled.

        A further cancellation does not cut the stop short.

        Raises:
            SandboxUnavailableError, SandboxError: it cannot be started.
        """
        async with self._slot():
            sandbox = spec.create()
            try:
                await sandbox.start()
                yield sandbox
            finally:
                stopping = asyncio.ensure_future(sandbox.stop())
                try:
                    await asyncio.shield(stopping)
                except asyncio.CancelledError:
                    await asyncio.wait([stopping])
                    raise

    def _slot(self) -> contextlib.AbstractAsyncContextManager[None]:
        if self._max_sandboxes is None:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self._max_sandboxes)
        return self._slots[loop]
