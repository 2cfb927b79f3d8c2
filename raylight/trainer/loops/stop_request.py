"""The request to end a training after the step in progress."""

from __future__ import annotations

import asyncio
from typing import NoReturn


class TrainingStopped(Exception):
    """The training was asked to end; what it waits for is not needed any more."""


class StopRequest:
    """Asks a training to end: an update that has begun is completed, and the weights are saved."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self) -> None:
        """Ask for the end, in the event loop of the training."""
        self._event.set()

    @property
    def is_made(self) -> bool:
        """True once the end was asked for."""
        return self._event.is_set()

    async def wait(self) -> NoReturn:
        """Raise TrainingStopped as soon as the end is asked for."""
        await self._event.wait()
        raise TrainingStopped
