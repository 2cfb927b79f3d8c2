"""The chat-completions route: a request's messages to a prompt, and the choices to messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raylight.engines.transformers.choices import Choices
from raylight.engines.transformers.message import THINK, MessageParser, Piece
from raylight.engines.transformers.prompt import render
from raylight.engines.transformers.reply import (
    Grown,
    Head,
    Reader,
    adapter_of,
    finite,
    numbered,
    usage,
)
from raylight.engines.transformers.requests import ChatRequest, NamedTool
from raylight.engines.transformers.sequence import Sequence
from raylight.engines.transformers.vocabulary import Vocabulary
from raylight.http.errors import RequestError

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine


async def begin_chat(engine: TransformersEngine, body: Any) -> ChatReply:
    """Begin to answer a chat-completions request.

    Raises:
        RequestError: the request is malformed, asks for another model, or for what the engine cannot do.
    """
    request = ChatRequest.read(body)
    adapter = adapter_of(engine, request.model)
    _check_tools(engine, request)
    prompt = request.given_ids or render(engine, request)
    grammar = await _grammar(engine, request)
    most = request.max_completion_tokens or request.max_tokens or engine.max_model_len
    params = request.params(most, engine.vocab_size, request.top_logprobs or 0, grammar)
    count = request.n or 1
    choices = engine.begin([prompt] * count, numbered(params, count), adapter, bool(request.stream))
    return ChatReply(engine, request, prompt, choices, thinks=engine.style.thinks and grammar is None)


def _calls(request: ChatRequest) -> bool:
    """Whether the answer may call tools."""
    return bool(request.tools) and request.tool_choice != "none"


def _check_tools(engine: TransformersEngine, request: ChatRequest) -> None:
    if _calls(request) and engine.style.format is None:
        raise RequestError(
            "it is not known how this model calls tools; the engine's tool_parser can tell (hermes, qwen_xml, llama_json)"
        )
    if (
        isinstance(request.tool_choice, NamedTool)
        and request.tool_choice.function.name not in request.schemas()
    ):
        raise RequestError(f"tool_choice: there is no tool {request.tool_choice.function.name!r}")


async def _grammar(engine: TransformersEngine, request: ChatRequest) -> Any:
    """What the answer must keep to; None where it is free."""
    wanted, tags = request.response_format, _tags(engine, request)
    if wanted is None or wanted.type == "text":
        return None if tags is None else await engine.grammars.structure(tags)
    schema = wanted.json_schema.schema_ if wanted.json_schema else {"type": "object"}
    if tags is None:
        return await engine.grammars.schema(schema)
    return await engine.grammars.structure(
        {"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, tags]}
    )


def _tags(engine: TransformersEngine, request: ChatRequest) -> dict[str, Any] | None:
    """The structure of an answer that calls tools; None where it may be any text.

    Raises:
        RequestError: the calls must fit a schema, and cannot be held to one.
    """
    if not _calls(request):
        return None
    assert engine.style.format is not None
    free = request.tool_choice in (None, "auto")
    schema_too = request.response_format is not None and request.response_format.type != "text"
    strict = {tool.function.name for tool in request.tools or () if tool.function.strict}
    if free and not strict and not schema_too:
        return None
    schemas = dict(request.schemas())
    if isinstance(request.tool_choice, NamedTool):
        schemas = {request.tool_choice.function.name: schemas[request.tool_choice.function.name]}
    elif free:
        schemas = {name: schema if name in strict else {"type": "object"} for name, schema in schemas.items()}
    parallel = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)
    tags = engine.style.format.grammar(schemas, required=not free or schema_too, parallel=parallel)
    if tags is None:
        raise RequestError(
            "calls of this model's kind cannot be held to a schema: use tool_choice auto without strict tools"
        )
    return tags


@dataclass
class _Choice:
    """One choice and what it has said."""

    reader: Reader
    parser: MessageParser
    text: dict[str, str] = field(default_factory=lambda: {"reasoning": "", "content": ""})
    calls: list[dict[str, Any]] = field(default_factory=list)
    began: bool = False

    def delta(self, grown: Grown, parallel: bool) -> dict[str, Any]:
        """What is new, as a chunk of a stream tells it."""
        delta: dict[str, Any] = {} if self.began else {"role": "assistant", "content": ""}
        self.began = True
        for piece in self.parser.feed(grown.text, grown.reason is not None):
            if piece.call is None:
                self.text[piece.kind] += piece.text
                name = "reasoning_content" if piece.kind == "reasoning" else "content"
                delta[name] = delta.get(name, "") + piece.text
            elif parallel or not self.calls:
                self._call(piece, delta)
        return delta

    def _call(self, piece: Piece, delta: dict[str, Any]) -> None:
        assert piece.call is not None
        message = piece.call.message()
        delta.setdefault("tool_calls", []).append({"index": len(self.calls), **message})
        self.calls.append(message)

    def message(self) -> dict[str, Any]:
        content, thought = self.text["content"], self.text["reasoning"]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self.calls or thought else ""),
        }
        if thought:
            message["reasoning_content"] = thought
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def end(self, grown: Grown) -> dict[str, str | None]:
        return grown.end | ({"finish_reason": "tool_calls"} if grown.reason == "stop" and self.calls else {})


class ChatReply:
    """The answer to a chat-completions request."""

    def __init__(
        self,
        engine: TransformersEngine,
        request: ChatRequest,
        prompt: list[int],
        choices: Choices,
        thinks: bool,
    ) -> None:
        self.choices, self.streams = choices, bool(request.stream)
        self._engine, self._request, self._prompt = engine, request, prompt
        self._head = Head("chatcmpl", "chat.completion", request.model)
        thinking = engine.vocabulary.text(prompt[-8:]).rstrip().endswith(THINK) if thinks else None
        format, schemas = (engine.style.format, request.schemas()) if _calls(request) else (None, {})
        self._choices = [
            _Choice(Reader(s, engine.vocabulary), MessageParser(format, schemas, thinking))
            for s in choices.sequences
        ]
        self._parallel = request.parallel_tool_calls is not False

    async def whole(self) -> dict[str, Any]:
        await self.choices.end()
        answer = {
            **self._head.part(),
            "choices": [self._whole_choice(i) for i in range(len(self._choices))],
            "usage": self._usage(),
        }
        return answer | ({"prompt_token_ids": self._prompt} if self._request.return_token_ids else {})

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        grown = choice.reader.read()
        assert grown is not None
        choice.delta(grown, self._parallel)
        return {
            "index": index,
            "message": choice.message(),
            "logprobs": self._logprobs(choice, grown),
            **choice.end(grown),
            **self._ids(grown),
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        first = {"prompt_token_ids": self._prompt} if self._request.return_token_ids else {}
        extra: dict[str, Any] = {"usage": None} if self._request.includes_usage else {}
        async for _ in self.choices.progress():
            for index, choice in enumerate(self._choices):
                part = self._part(index, choice)
                if part is not None:
                    yield {**self._head.part(".chunk"), "choices": [part], **extra, **first}
                    first = {}
        if extra:
            yield {**self._head.part(".chunk"), "choices": [], "usage": self._usage()}

    def _part(self, index: int, choice: _Choice) -> dict[str, Any] | None:
        """A choice's part of a chunk; None if there is nothing to tell."""
        grown = choice.reader.read()
        if grown is None:
            return None
        delta = choice.delta(grown, self._parallel)
        if (
            not delta
            and grown.reason is None
            and not self._request.logprobs
            and not self._request.return_token_ids
        ):
            return None
        logprobs = self._logprobs(choice, grown)
        return {"index": index, "delta": delta, "logprobs": logprobs, **choice.end(grown), **self._ids(grown)}

    def _ids(self, grown: Grown) -> dict[str, Any]:
        return {"token_ids": grown.ids} if self._request.return_token_ids else {}

    def _logprobs(self, choice: _Choice, grown: Grown) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return {
            "content": token_logprobs(choice.reader.sequence, grown, self._engine.vocabulary),
            "refusal": None,
        }

    def _usage(self) -> dict[str, int]:
        return usage(self.choices.sequences, [self._prompt])


def token_logprobs(sequence: Sequence, grown: Grown, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The log-probability of each new token, and the likeliest tokens in its place."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        word = vocabulary.word(token)
        return {"token": word, "logprob": finite(logprob), "bytes": list(word.encode())}

    items = []
    for place, token in enumerate(grown.ids, grown.first):
        tops = sequence.tops[place] if sequence.params.top_logprobs else []
        items.append(
            item(token, sequence.sample.logprobs[place]) | {"top_logprobs": [item(*top) for top in tops]}
        )
    return items
