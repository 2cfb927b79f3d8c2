"""Images of requests to vLLM: their places in the prompt, and prompts in tokens that show them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from raylight.engines.protocol import PROMPT_IDS
from raylight.errors import ImageError
from raylight.http.errors import RequestError
from raylight.images.image import read_data_url
from raylight.images.messages import image_urls
from raylight.types import JsonObject
from raylight.types.images import PlacedImage

PROMPT_FIELD = "kv_transfer_params"
NOT_SHOWN = (
    f"{PROMPT_FIELD}.{PROMPT_IDS}: the tokens do not show the images of the messages; send the images of all "
    "messages, in order"
)


class RequestImages(NamedTuple):
    """Images of a request."""

    digests: list[str]
    prompt_ids: list[int] | None
    """Tokens of the prompt, if the request gives them."""


_SHOWN: ContextVar[RequestImages | None] = ContextVar("raylight_vllm_images", default=None)
"""Images of the running task's request."""


async def take_images(body: JsonObject) -> dict[str, object]:
    """Note the images of a chat request for the running task.

    Returns:
        The fields that replace the request's own. A prompt in tokens is taken out, because vLLM would sample
        from it without the images.

    Raises:
        RequestError: an image is invalid.
    """
    urls = list(image_urls(body.get("messages")))
    # decoding images takes up to seconds
    digests = await asyncio.to_thread(_read_digests, urls) if urls else []
    _SHOWN.set(None)
    if not digests:
        return {}
    given = body.get(PROMPT_FIELD)
    ids = given.get(PROMPT_IDS) if isinstance(given, dict) else None
    _SHOWN.set(RequestImages(digests, ids))
    if given is None or ids is None:
        return {}
    return {PROMPT_FIELD: {name: value for name, value in given.items() if name != PROMPT_IDS} or None}


def _read_digests(urls: Iterable[tuple[str, str]]) -> list[str]:
    digests = []
    for path, url in urls:
        try:
            digests.append(read_data_url(url).sha256)
        except ImageError as error:
            raise RequestError(f"{path}.image_url: {error}") from None
    return digests


def place_images(request: EngineCoreRequest) -> tuple[PlacedImage, ...]:
    """Return the places of images in the prompt of the running task's request.

    Args:
        request: vLLM's request for its engine core.
    """
    shown, places = _SHOWN.get(), []
    positions = sorted((f.mm_position for f in request.mm_features or ()), key=lambda each: each.offset)
    for digest, position in zip(shown.digests if shown else (), positions, strict=True):
        first, last = 0, position.length - 1
        if position.is_embed is not None:  # other tokens around the image's
            first, last = position.is_embed.nonzero().flatten()[[0, -1]].tolist()
        places.append(PlacedImage(digest, position.offset + first, position.offset + last + 1))
    return tuple(places)


class ImagePrompts:
    """Lets a request with images give its prompt in tokens.

    vLLM 0.29 always puts the tokens of an image in the place of a placeholder. Here a prompt that has these
    tokens stays as it is. Two methods of the client's renderer and its processors are replaced.

    Args:
        client: an `AsyncLLM`.
    """

    def __init__(self, client: AsyncLLM) -> None:
        renderer = client.renderer
        self._process, renderer._process_tokens_async = renderer._process_tokens_async, self._process_prompt
        for processor in (renderer.mm_processor, renderer._readonly_mm_processor):
            if processor is not None:
                processor._maybe_apply_prompt_updates = _keep_expanded(processor)

    async def _process_prompt(self, prompt: JsonObject, **more: object) -> object:
        shown = _SHOWN.get()
        ids = shown.prompt_ids if shown is not None else None
        if ids is None or not prompt.get("multi_modal_data"):
            return await self._process(prompt, **more)
        try:
            processed = await self._process({**prompt, "prompt_token_ids": ids}, **more)
        except (AssertionError, RuntimeError) as error:  # vLLM finds no place for an image
            raise VLLMValidationError(NOT_SHOWN) from error
        if processed["prompt_token_ids"] != ids:
            raise VLLMValidationError(NOT_SHOWN)
        return processed


def _keep_expanded(processor: Any) -> object:
    """Wrap the method of a processor that puts in the tokens of images."""
    apply = processor._maybe_apply_prompt_updates

    def apply_unless_expanded(
        mm_items: Any, prompt_ids: list[int], mm_kwargs: object, mm_prompt_updates: object
    ) -> object:
        counts = mm_items.get_all_counts()
        found = processor._find_mm_placeholders(prompt_ids, mm_prompt_updates)
        if all(len(found.get(kind, ())) == count for kind, count in counts.items()):
            return prompt_ids, found
        return apply(mm_items, prompt_ids, mm_kwargs, mm_prompt_updates)

    return apply_unless_expanded
