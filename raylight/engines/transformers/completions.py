"""The completions route: texts or tokens in, their continuations out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from raylight.engines.transformers.choices import Choices
from raylight.engines.transformers.prompt import encode
from raylight.engines.transformers.reply import (
    Grown,
    Head,
    Reader,
    adapter_of,
    finite,
    numbered,
    usage,
)
from raylight.engines.transformers.requests import CompletionRequest

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def begin_completion(engine: TransformersEngine, body: Any) -> CompletionReply:
    """Begin to answer a completions request.

    Raises:
        RequestError: the request is malformed, asks for another model, or for what the engine cannot do.
    """
    request = CompletionRequest.read(body)
    adapter = adapter_of(engine, request.model)
    prompts = _prompts(engine, request)
    grammar = None
    if request.response_format is not None and request.response_format.type != "text":
        wanted = request.response_format.json_schema
        grammar = await engine.grammars.schema(wanted.schema_ if wanted else {"type": "object"})
    params = request.params(
        request.max_tokens or DEFAULT_MAX_TOKENS, engine.vocab_size, request.logprobs or 0, grammar
    )
    each = request.n or 1
    repeated = [prompt for prompt in prompts for _ in range(each)]
    choices = engine.begin(repeated, numbered(params, len(repeated)), adapter, bool(request.stream))
    return CompletionReply(engine, request, prompts, choices)


def _prompts(engine: TransformersEngine, request: CompletionRequest) -> list[list[int]]:
    given: list[Any] = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    if isinstance(given[0], int):
        given = [given]
    return [
        encode(engine, item, request.add_special_tokens) if isinstance(item, str) else item for item in given
    ]


class CompletionReply:
    """The answer to a completions request."""

    def __init__(
        self,
        engine: TransformersEngine,
        request: CompletionRequest,
        prompts: list[list[int]],
        choices: Choices,
    ) -> None:
        self.choices, self.streams = choices, bool(request.stream)
        self._engine, self._request, self._prompts = engine, request, prompts
        self._head = Head("cmpl", "text_completion", request.model)
        self._readers = [Reader(s, engine.vocabulary) for s in choices.sequences]
        self._offsets = [0] * len(self._readers)

    async def whole(self) -> dict[str, Any]:
        await self.choices.end()
        parts = [self._part(index, reader) for index, reader in enumerate(self._readers)]
        return {**self._head.part(), "choices": parts, "usage": self._usage()}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        extra: dict[str, Any] = {"usage": None} if self._request.includes_usage else {}
        async for _ in self.choices.progress():
            for index, reader in enumerate(self._readers):
                part = self._part(index, reader)
                if part is not None:
                    yield {**self._head.part(), "choices": [part], **extra}
        if extra:
            yield {**self._head.part(), "choices": [], "usage": self._usage()}

    def _part(self, index: int, reader: Reader) -> dict[str, Any] | None:
        """What is new of a choice; None if there is nothing to tell."""
        grown = reader.read()
        asked = self._request.return_token_ids
        if grown is None or not (grown.text or grown.reason or asked or self._request.logprobs is not None):
            return None
        part: dict[str, Any] = {
            "index": index,
            "text": grown.text,
            "logprobs": self._logprobs(index, reader, grown),
            **grown.end,
        }
        if asked:
            part["token_ids"] = grown.ids
            part["prompt_token_ids"] = None if grown.first else reader.sequence.sample.prompt_ids
        return part

    def _logprobs(self, index: int, reader: Reader, grown: Grown) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        vocabulary, sequence = self._engine.vocabulary, reader.sequence
        words = [vocabulary.word(token) for token in grown.ids]
        places = range(grown.first, grown.first + len(words))
        offsets = []
        for word in words:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(word)
        return {
            "tokens": words,
            "token_logprobs": [finite(sequence.sample.logprobs[place]) for place in places],
            "top_logprobs": [
                {vocabulary.word(t): finite(p) for t, p in sequence.tops[place]} for place in places
            ]
            if self._request.logprobs
            else None,
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, int]:
        return usage(self.choices.sequences, self._prompts)
