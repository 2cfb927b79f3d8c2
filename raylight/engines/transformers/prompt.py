"""Rendering of messages and texts as prompt tokens, by the model's chat template."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from raylight.engines.transformers.requests import ChatMessage, ImagePart, MessagesBody
from raylight.errors import ImageError
from raylight.http.errors import RequestError
from raylight.images.image import Image, read_data_url
from raylight.types import JsonObject
from raylight.types.chat_messages import arguments_for_template, reasoning_fields, reasoning_of
from raylight.types.images import PlacedImage

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine


class PromptTokens(NamedTuple):
    """Tokens of a prompt, its images, and their places among the tokens."""

    ids: list[int]
    images: tuple[Image, ...] = ()
    places: tuple[PlacedImage, ...] = ()


async def read_prompt(
    engine: TransformersEngine, request: MessagesBody, ids: list[int] | None = None
) -> PromptTokens:
    """Return the prompt of a request with messages.

    Args:
        ids: its tokens; None renders the messages.

    Raises:
        RequestError: see `read_images`, `place_images` and `render`.
    """

    def read() -> PromptTokens:
        images = read_images(engine, request)
        if ids is None:
            return render(engine, request, images)
        return place_images(engine, ids, images)

    # decoding and scaling images takes up to seconds
    return await asyncio.to_thread(read) if request.has_images else read()


def read_images(engine: TransformersEngine, request: MessagesBody) -> tuple[Image, ...]:
    """Return the images of all messages, in order.

    Raises:
        RequestError: the model takes none, or one is invalid.
    """
    images: list[Image] = []
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                path = f"messages[{i}].content[{j}]"
                if engine.images is None:
                    raise RequestError(f"{path}: this model accepts text only, not images")
                try:
                    images.append(read_data_url(part.image_url.url))
                except ImageError as error:
                    raise RequestError(f"{path}.image_url: {error}") from None
    return tuple(images)


def place_images(engine: TransformersEngine, ids: list[int], images: tuple[Image, ...]) -> PromptTokens:
    """Return a prompt that is given in tokens.

    Raises:
        RequestError: the tokens do not show the images.
    """
    if engine.images is None:
        return PromptTokens(ids)
    try:
        return PromptTokens(ids, images, engine.images.place(ids, images))
    except ImageError as error:
        raise RequestError(f"kv_transfer_params.prompt_token_ids: {error}") from None


def render(engine: TransformersEngine, request: MessagesBody, images: tuple[Image, ...]) -> PromptTokens:
    """Render messages with the model's own chat template, and return the tokens.

    Args:
        images: images of all messages.

    Raises:
        RequestError: the template does not support the messages or the tools, or they are too long.
    """
    tokenizer, template = engine.tokenizer, engine.style.template
    if request.tools and "tools" not in template:
        raise RequestError("tools: this model's chat template does not support them")
    variables = dict(request.chat_template_kwargs or {})
    if variables:
        known = inspect.signature(tokenizer.apply_chat_template).parameters
        if reserved := variables.keys() & known.keys():
            raise RequestError(f"chat_template_kwargs: {min(reserved)} is not a template variable")
    if request.reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise RequestError("reasoning_effort: this model's chat template does not read it")
        variables["reasoning_effort"] = request.reasoning_effort
    messages = [_for_template(engine, message) for message in request.messages]
    engine.check_text("".join(map(_text_of, messages)))
    try:
        text: Any = tokenizer.apply_chat_template(
            messages,
            tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **variables,
            tokenize=False,
        )
    except Exception as error:  # a template is the model authors' program and may raise anything
        raise RequestError(f"messages: the chat template rejected them: {error}") from error
    # checks the length again, with the text that the template and the tools add
    engine.check_text(text)
    try:
        if engine.images is not None:
            ids, places = engine.images.encode(text, images)
            return PromptTokens(ids, images, places)
    except ImageError as error:
        raise RequestError(f"messages: {error}") from None
    return PromptTokens(encode(engine, text, add_special_tokens=False))


def encode(engine: TransformersEngine, text: str, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text.

    Raises:
        RequestError: the text is too long, or is not valid Unicode.
    """
    engine.check_text(text)
    try:
        return engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeError) as error:
        raise RequestError(f"the text cannot be encoded: {error}") from error


def _for_template(engine: TransformersEngine, message: ChatMessage) -> JsonObject:
    """Convert a message for the template: content as one string, arguments of calls as mappings."""
    converted = message.model_dump(exclude_none=True)
    if message.role == "developer":
        converted["role"] = "system"  # templates know only the older name
    if engine.images is not None:
        converted["content"] = engine.images.template_content(converted.get("content"))
    elif isinstance(message.content, list):
        converted["content"] = _text_of(converted)
    converted.setdefault("content", "")
    calls = converted.get("tool_calls", ())
    if reasoning := reasoning_of(converted):
        converted |= reasoning_fields(reasoning, bool(calls and converted["content"]))
    for call in calls:
        call["function"]["arguments"] = arguments_for_template(call["function"].get("arguments"))
    return converted


def _text_of(message: JsonObject) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
