"""Images of chat requests: read once, named by their digests within the gateway, and sent to the engine.

Between the two layers of this module an image is its digest, so that requests are compared and recorded
without its bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.errors import ImageError
from raylight.http.errors import RequestError
from raylight.http.request import JsonRequest, json_request
from raylight.images.image import LIMITS, Image, ImageLimits, kept_image, read_data_url, unread_image
from raylight.images.messages import image_urls, recorded_digest, recorded_url, replace_urls
from raylight.images.urls import ImageFetcher
from raylight.types import JsonObject

IMAGES_KEY = "raylight.images"
"""Key of the ASGI scope that holds the images of a request, by digest."""

Images = Mapping[str, Image]


class ImageReader:
    """Reads the images of requests.

    Args:
        limits: of each image.
        max_images: images that a request may have.
        fetcher: fetches http URLs; None refuses them.
        is_remote: True if the model runs elsewhere: images that cannot be read here are left to it. Those in
            data URLs are named by their digests too, so that no record has their bytes.
    """

    def __init__(
        self,
        limits: ImageLimits = LIMITS,
        max_images: int = 1500,
        fetcher: ImageFetcher | None = None,
        is_remote: bool = False,
    ) -> None:
        self._limits, self._max_images = limits, max_images
        self._fetcher = fetcher
        self._is_remote = is_remote

    async def take(self, body: JsonObject) -> tuple[JsonObject, Images]:
        """Return a chat request with digests in place of its images' URLs, and the images.

        Raises:
            RequestError: 400, an image cannot be read, or there are too many.
        """
        places = list(image_urls(body.get("messages")))
        if not places:
            return body, {}
        if self._max_images == 0:
            raise RequestError(
                "messages: this model takes no images in this run (engine.max_images=0, which a run with a "
                "teacher in engines sets); send text, or give the teacher kind='learner'"
            )
        if len(places) > self._max_images:
            raise RequestError(
                f"messages: {len(places)} images, and at most {self._max_images} are allowed; send fewer, or "
                "raise engine.max_images"
            )
        found = await self._read_all({url for _, url in places})
        urls: dict[str, str] = {}
        images: dict[str, Image] = {}
        for path, url in places:
            if isinstance(image := found[url], Image):
                urls[url] = recorded_url(image.sha256)
                images[image.sha256] = image
            elif self._is_remote and url.lstrip()[:5].lower() != "data:" and recorded_digest(url) is None:
                urls[url] = url
            else:
                raise RequestError(f"{path}: {image}", code="image_parse_error")
        return body | {"messages": replace_urls(body["messages"], urls.__getitem__)}, images

    async def _read_all(self, urls: set[str]) -> dict[str, Image | ImageError]:
        """Return the images of URLs, or what is wrong with them."""
        remote = {url for url in urls if url[:6].lower().startswith(("http:", "https:"))}
        local = urls - remote
        found: dict[str, Image | ImageError] = {
            url: image for url in local if (image := kept_image(url, self._limits)) is not None
        }
        if unread := local - found.keys():
            found |= await asyncio.to_thread(lambda: {url: self._read(url) for url in unread})
        fetched = await asyncio.gather(*map(self._fetch, remote))
        return found | dict(zip(remote, fetched, strict=True))

    def _read(self, url: str) -> Image | ImageError:
        try:
            if self._is_remote:
                with contextlib.suppress(ImageError):
                    return read_data_url(url, self._limits)
                return unread_image(url)
            return read_data_url(url, self._limits)
        except ImageError as error:
            return error

    async def _fetch(self, url: str) -> Image | ImageError:
        if self._fetcher is None:
            return ImageError(
                f"{url[:200]!r} is not fetched, because engine.fetch_images is off; send a data URL"
            )
        try:
            return await self._fetcher.fetch(url)
        except ImageError as error:
            return error


class ImageSender:
    """ASGI middleware that sends the images of a request to the engine, as data URLs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        images: Images = scope.get(IMAGES_KEY, {})
        if images:
            fields = (await json_request(scope, receive)).fields

            def data_url(url: str) -> str:
                image = images.get(recorded_digest(url) or "")
                return url if image is None else image.data_url

            receive = JsonRequest(fields | {"messages": replace_urls(fields["messages"], data_url)}, receive)
            scope = receive.put_into(scope)
        await self._app(scope, receive, send)
