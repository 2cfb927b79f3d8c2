"""Route of completions: samples continuations of texts or tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from raylight.engines.transformers.prompt import encode
from raylight.engines.transformers.reply import (
    ChoiceReader,
    Envelope,
    Increment,
    finite,
    params_per_choice,
    resolve_adapter,
    usage,
    usage_field,
)
from raylight.engines.transformers.requests import CompletionRequest
from raylight.engines.transformers.sequence import Choices
from raylight.types import JsonObject

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine

DEFAULT_MAX_TOKENS = 16
"""Default of OpenAI's API."""


async def begin_completion(engine: TransformersEngine, body: object) -> CompletionReply:
    """Start sampling for a completions request.

    Raises:
        RequestError: the request is malformed, names another model, or uses a feature that the engine does
            not have.
    """
    request = CompletionRequest.read(body)
    adapter = resolve_adapter(engine, request.model)
    prompts = _prompts(engine, request)
    grammar = None
    if request.response_format is not None and request.response_format.type != "text":
        json_schema = request.response_format.json_schema
        schema = json_schema.schema_ if json_schema else {"type": "object"}
        grammar = await engine.grammars.compile_schema(schema)
    params = request.params(
        request.max_tokens or DEFAULT_MAX_TOKENS, engine.vocab_size, request.logprobs or 0, grammar
    )
    repeated = [prompt for prompt in prompts for _ in range(request.n or 1)]
    choices = engine.begin(repeated, params_per_choice(params, len(repeated)), adapter, bool(request.stream))
    return CompletionReply(engine, request, prompts, choices)


def _prompts(engine: TransformersEngine, request: CompletionRequest) -> list[list[int]]:
    prompts: list[Any] = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    if isinstance(prompts[0], int):
        prompts = [prompts]
    return [
        encode(engine, prompt, request.add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


class CompletionReply:
    """The response to a completions request."""

    def __init__(
        self,
        engine: TransformersEngine,
        request: CompletionRequest,
        prompts: list[list[int]],
        choices: Choices,
    ) -> None:
        self.choices, self.streams = choices, bool(request.stream)
        self._engine, self._request, self._prompts = engine, request, prompts
        self._envelope = Envelope("cmpl", "text_completion", request.model)
        self._readers = [ChoiceReader(s, engine.vocabulary) for s in choices.sequences]
        self._offsets = [0] * len(self._readers)

    async def body(self) -> JsonObject:
        await self.choices.end()
        choices = [self._choice(index, reader) for index, reader in enumerate(self._readers)]
        return {**self._envelope.fields(), "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[JsonObject]:
        async for _ in self.choices.progress():
            for index, reader in enumerate(self._readers):
                choice = self._choice(index, reader)
                if choice is not None:
                    counts = usage_field(self._request, self._usage)
                    yield {**self._envelope.fields(), "choices": [choice], **counts}
        if self._request.includes_usage:
            yield {**self._envelope.fields(), "choices": [], "usage": self._usage()}

    def _choice(self, index: int, reader: ChoiceReader) -> JsonObject | None:
        """Return the new part of a choice; None if there is nothing to send."""
        new = reader.read()
        with_ids = self._request.return_token_ids
        if new is None or not (new.text or new.reason or with_ids or self._request.logprobs is not None):
            return None
        choice: JsonObject = {
            "index": index,
            "text": new.text,
            "logprobs": self._logprobs(index, reader, new),
            **new.finish_fields,
        }
        if with_ids:
            choice["token_ids"] = new.ids
            choice["prompt_token_ids"] = None if new.first else reader.sequence.sample.prompt_ids.tolist()
        return choice

    def _logprobs(self, index: int, reader: ChoiceReader, new: Increment) -> JsonObject | None:
        if self._request.logprobs is None:
            return None
        vocabulary, sequence = self._engine.vocabulary, reader.sequence
        words = [vocabulary.word(token) for token in new.ids]
        positions = range(new.first, new.first + len(words))
        offsets = []
        for word in words:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(word)
        top_logprobs = None
        if self._request.logprobs:
            top_logprobs = [
                {vocabulary.word(t): finite(p) for t, p in sequence.top_logprobs[i]} for i in positions
            ]
        return {
            "tokens": words,
            "token_logprobs": [finite(sequence.sample.logprobs[i]) for i in positions],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, int]:
        return usage(self.choices.sequences, self._prompts)
