"""Messages and texts to the tokens of a prompt."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

from raylight.engines.transformers.requests import ChatMessage, Prompted
from raylight.http.errors import RequestError

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine


def render(engine: TransformersEngine, request: Prompted) -> list[int]:
    """The tokens of messages, by the model's own chat template.

    Raises:
        RequestError: the template cannot take the messages or the tools, or they are too long.
    """
    tokenizer: Any = engine.tokenizer
    template = engine.style.template
    if request.tools and "tools" not in template:
        raise RequestError("this model's chat template knows no tools")
    settings = dict(request.chat_template_kwargs or {})
    if taken := settings.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys():
        raise RequestError(f"chat_template_kwargs: {min(taken)} is no variable of a template")
    if request.reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise RequestError("this model's chat template knows no reasoning_effort")
        settings["reasoning_effort"] = request.reasoning_effort
    messages = [_shown(message) for message in request.messages]
    engine.check_text("".join(message["content"] for message in messages))
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **settings,
            tokenize=False,
        )
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise RequestError(f"the chat template refused the messages: {error}") from error
    return encode(
        engine, text, add_special_tokens=False
    )  # with the length of what the template and the tools add checked


def encode(engine: TransformersEngine, text: str, add_special_tokens: bool) -> list[int]:
    """The tokens of a text.

    Raises:
        RequestError: it is no Unicode, or too long.
    """
    engine.check_text(text)
    try:
        return engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeError) as error:
        raise RequestError(f"the text cannot be encoded: {error}") from error


def _shown(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, and the arguments of calls as mappings."""
    shown = message.model_dump(exclude_none=True)
    if message.role == "developer":
        shown["role"] = "system"  # its newer name, which templates do not know
    if isinstance(message.content, list):
        shown["content"] = "\n".join(part.text for part in message.content)
    shown.setdefault("content", "")
    if thought := message.reasoning_content or message.reasoning:
        shown["reasoning_content"] = thought
    for call in shown.get("tool_calls", ()):
        call["function"]["arguments"] = _mapping(call["function"].get("arguments"))
    return shown


def _mapping(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the arguments of a tool call are not JSON: {error}") from None
    if not arguments:
        return {}
    if not isinstance(arguments, dict):
        raise RequestError("the arguments of a tool call are no JSON object")
    return arguments
