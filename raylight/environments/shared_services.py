"""Services that all rollouts on one event loop share, such as a connection or a process."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar


class Service(Protocol):
    """Service of an event loop, begun when it is created. It ends with the loop."""

    @property
    def is_usable(self) -> bool:
        """False once the service has ended or is lost."""

    async def close(self) -> None:
        """End the service."""


Description = TypeVar("Description", bound=Hashable)
AnyService = TypeVar("AnyService", bound=Service)

_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Any]] = (
    weakref.WeakKeyDictionary()
)


def shared_service(kind: Callable[[Description], AnyService], description: Description) -> AnyService:
    """Return the service of this kind and description on this event loop; a new one if the last has ended."""
    services = _SHARED.setdefault(asyncio.get_running_loop(), {})
    service: AnyService | None = services.get((kind, description))
    if service is None or not service.is_usable:
        service = services[kind, description] = kind(description)
    return service
