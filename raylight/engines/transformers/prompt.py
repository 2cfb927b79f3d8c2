"""Messages and texts to the tokens of a prompt."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from raylight.engines.transformers.requests import ChatMessage, MessagesBody
from raylight.http.errors import RequestError
from raylight.types.chat_messages import arguments_for_template, reasoning_fields, reasoning_of

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine


def render(engine: TransformersEngine, request: MessagesBody) -> list[int]:
    """Render messages with the model's own chat template, and return the tokens.

    Raises:
        RequestError: the template does not support the messages or the tools, or they are too long.
    """
    tokenizer: Any = engine.tokenizer
    template = engine.style.template
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
    messages = [_for_template(message) for message in request.messages]
    engine.check_text("".join(message["content"] for message in messages))
    try:
        text = tokenizer.apply_chat_template(
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
    return encode(engine, text, add_special_tokens=False)


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


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """Convert a message for the template: content as one string, arguments of calls as mappings."""
    converted = message.model_dump(exclude_none=True)
    if message.role == "developer":
        converted["role"] = "system"  # templates know only the older name
    if isinstance(message.content, list):
        converted["content"] = "\n".join(part.text for part in message.content)
    converted.setdefault("content", "")
    calls = converted.get("tool_calls", ())
    if reasoning := reasoning_of(converted):
        converted |= reasoning_fields(reasoning, bool(calls and converted["content"]))
    for call in calls:
        call["function"]["arguments"] = arguments_for_template(call["function"].get("arguments"))
    return converted
