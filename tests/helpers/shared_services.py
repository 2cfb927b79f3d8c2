"""The end of the services that rollouts of an event loop share."""

import asyncio

from raylight.environments.shared_services import _SHARED


async def close_shared_services() -> None:
    """End the services of this event loop."""
    services = _SHARED.pop(asyncio.get_running_loop(), {}).values()
    await asyncio.gather(*(service.close() for service in services))
