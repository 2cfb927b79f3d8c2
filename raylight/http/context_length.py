"""The error of a prompt that is longer than the model's context, in the wording of each provider.

Clients recognise it by that wording, and shorten the conversation instead of giving up.
"""

from __future__ import annotations

import re

from raylight.http.errors import CONTEXT_LENGTH, RequestError

_LIMIT = re.compile(r"(?:maximum context length is|configured limit of) (\d+)")
_PROMPT = re.compile(
    r"(?:resulted in|prompt contains) (?:at least )?(\d+) (?:input )?tokens|(\d+) in your prompt"
)
_OUTPUT = re.compile(r"requested (\d+) output tokens|(\d+) for the completion")
_CHARS = re.compile(r"upper bound for (\d+) input tokens")


class ContextLengthError(RequestError):
    """A prompt that does not fit into the model's context.

    Args:
        limit: tokens of the longest prompt with its response.
        tokens: tokens of the prompt.
        at_least: True if `tokens` is a lower bound, because the text was not encoded to its end.
    """

    def __init__(self, limit: int, tokens: int, *, at_least: bool = False) -> None:
        count = f"at least {tokens}" if at_least else str(tokens)
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{count} tokens. Please reduce the length of the messages. ({CONTEXT_LENGTH})",
            code=CONTEXT_LENGTH,
        )


def anthropic_message(message: str) -> str:
    """Return the message of a context length error in Anthropic's wording, with the numbers of the original.

    Its maximum leaves room for the requested response. The original is this module's, OpenAI's or
    vLLM's; any other wording is quoted.
    """
    limit, prompt, output = (_number(pattern, message) for pattern in (_LIMIT, _PROMPT, _OUTPUT))
    if prompt is None and (longest := _number(_CHARS, message)) is not None:
        prompt = longest + 1
    if limit is None or prompt is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {prompt} tokens > {limit - (output or 0)} maximum"


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(next(filter(None, match.groups()))) if match else None
