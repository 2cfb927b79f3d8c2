"""Images of http URLs, fetched for a client whose URL may point anywhere.

Law: a connection goes to an address that was checked, even after a redirect, or after the name's server gave
another address: a name is resolved once, and the connection is opened to the address itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import httpx2
from cachetools import TTLCache

from raylight.errors import ImageError
from raylight.images.image import LIMITS, Image, ImageLimits, read_image

MAX_URL = 4096
MAX_REDIRECTS = 3
MAX_FETCHES = 32
"""Most fetches at a time; further ones wait."""
TIMEOUT_S = 15.0
"""Longest time of a fetch, its wait included."""
KEPT_BYTES = 128 * 2**20
"""Size of the fetched images that are kept."""
KEPT_S = 600.0
"""Time for which an image is not fetched again, because an agent sends the URLs of earlier turns again."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All IPv6 addresses of the public internet. Python's `is_global` is True for several outside of it."""

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host and a port."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host.

    Raises:
        OSError: it has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Return True for an address of the public internet, which no IPv4 address within it contradicts."""
    try:
        outer: Address = ipaddress.ip_address(address)
    except ValueError:  # with a zone, as link-local addresses have
        return False
    inner: list[Address | None] = [outer]
    if isinstance(outer, ipaddress.IPv6Address):
        inner += [outer.ipv4_mapped, outer.sixtofour, *(outer.teredo or ())]
        if outer in NAT64:
            inner.append(ipaddress.IPv4Address(int(outer) & 0xFFFFFFFF))
        elif outer not in GLOBAL_UNICAST:
            return False
    return all(one.is_global and not one.is_multicast for one in inner if one is not None)


class ImageFetcher:
    """Fetches images, and keeps the latest ones for some minutes. Belongs to one event loop.

    Args:
        limits: of each image.
        resolve: returns the addresses of a host.
        is_allowed: returns True for an address that may be connected to.
    """

    def __init__(
        self,
        limits: ImageLimits = LIMITS,
        resolve: Resolve = resolve,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._limits = limits
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        # a transport alone: no proxy, which would resolve the name itself, no cookies, no redirects; and no
        # connection is used again, because its certificate was checked for one name of the address
        self._transport = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_keepalive_connections=0))
        self._kept: TTLCache[str, Image] = TTLCache(KEPT_BYTES, KEPT_S, getsizeof=lambda one: len(one.data))

    async def fetch(self, url: str) -> Image:
        """Return the image at a URL.

        Raises:
            ImageError: the URL leads to no public address, or to no image within the limits and the time.
        """
        if (kept := self._kept.get(url)) is not None:
            return kept
        try:
            async with asyncio.timeout(TIMEOUT_S), self._slots:
                data = await self._download(url)
                image = await asyncio.to_thread(read_image, data, self._limits)
        except TimeoutError:
            raise ImageError(f"{url[:200]!r} was not fetched within {TIMEOUT_S:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            text = str(error)[:200] or type(error).__name__
            raise ImageError(f"{url[:200]!r} cannot be fetched: {text}") from None
        if len(data) <= KEPT_BYTES:
            self._kept[url] = image
        return image

    async def _download(self, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            request = await self._checked_request(url)
            response = await self._transport.handle_async_request(request)
            try:
                if not response.has_redirect_location:
                    return await self._read(response, url)
                url = str(httpx2.URL(url).join(response.headers["location"]))
            finally:
                await response.aclose()
        raise ImageError(f"{url[:200]!r} has more than {MAX_REDIRECTS} redirects; send the last URL")

    async def _checked_request(self, url: str) -> httpx2.Request:
        """Return a request to a checked address of a URL's host."""
        parsed = httpx2.URL(url) if len(url) <= MAX_URL else None
        if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
            raise ImageError(
                f"{url[:200]!r} is not an image URL; send an http or https URL without a user's name, of "
                f"up to {MAX_URL} characters"
            )
        host = parsed.host
        addresses = await self._resolve(host, parsed.port or (443 if parsed.scheme == "https" else 80))
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise ImageError(f"{host[:200]!r} has no public address; send the image as a data URL")
        headers = {"host": parsed.netloc.decode(), "accept": "image/*", "accept-encoding": "identity"}
        return httpx2.Request(
            "GET",
            parsed.copy_with(host=addresses[0], fragment=None),
            headers=headers,
            extensions={"sni_hostname": host, "timeout": httpx2.Timeout(TIMEOUT_S).as_dict()},
        )

    async def _read(self, response: httpx2.Response, url: str) -> bytes:
        if response.status_code != 200:
            raise ImageError(f"{url[:200]!r} was answered with status {response.status_code}")
        data, most = bytearray(), self._limits.max_bytes
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > most:
                raise ImageError(f"{url[:200]!r} has more than {most} bytes; send a smaller image")
        return bytes(data)
