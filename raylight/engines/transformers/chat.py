"""Route of chat completions: renders messages as a prompt, and parses choices into messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raylight.engines.transformers.message import PARSERS, HarmonyParser, MessageParser, think_first
from raylight.engines.transformers.prompt import PromptTokens, read_prompt
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
from raylight.engines.transformers.requests import ChatRequest, NamedTool
from raylight.engines.transformers.sequence import Choices, Sequence
from raylight.engines.transformers.text import Vocabulary
from raylight.engines.transformers.tools import MessagePiece
from raylight.http.errors import RequestError
from raylight.types import JsonObject
from raylight.types.request_fields import log_dropped

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine

PROMPT_END = 16
"""Tokens at the end of a prompt that show whether it opens or closes the model's reasoning."""


async def begin_chat(engine: TransformersEngine, body: object) -> ChatReply:
    """Start sampling for a chat completions request.

    Raises:
        RequestError: the request is malformed, names another model, or uses a feature that the engine does
            not have.
    """
    request = ChatRequest.read(body)
    adapter = resolve_adapter(engine, request.model)
    _check_tools(engine, request)
    prompt = await read_prompt(engine, request, request.prompt_ids)
    prompt_end = engine.vocabulary.text(prompt.ids[-PROMPT_END:]) if engine.style.reasoning else None
    grammar = await _grammar(engine, request, prompt_end)
    max_tokens = request.max_completion_tokens or request.max_tokens or engine.max_model_len
    params = request.params(max_tokens, engine.vocab_size, request.top_logprobs or 0, grammar)
    count = request.n or 1
    choices = engine.begin(
        [prompt.ids] * count,
        params_per_choice(params, count),
        adapter,
        bool(request.stream),
        prompt.images,
        prompt.places,
    )
    return ChatReply(engine, request, prompt, choices, prompt_end)


def _may_call_tools(request: ChatRequest) -> bool:
    """True if the answer may call tools."""
    return bool(request.tools) and request.tool_choice != "none"


def _check_tools(engine: TransformersEngine, request: ChatRequest) -> None:
    if _may_call_tools(request) and engine.style.tool_format is None:
        raise RequestError(
            f"tools: the notation of this model's tool calls is not known ({engine.style.reason}); set the "
            f"engine argument tool_parser ({', '.join(PARSERS)})"
        )
    if (
        isinstance(request.tool_choice, NamedTool)
        and request.tool_choice.function.name not in request.schemas()
    ):
        raise RequestError(f"tool_choice: the request has no tool {request.tool_choice.function.name!r:.200}")


async def _grammar(engine: TransformersEngine, request: ChatRequest, prompt_end: str | None) -> object:
    """Compile the grammar of the answer; None if the answer is unconstrained.

    Args:
        prompt_end: last text of the prompt of a model that thinks, which it does before what is constrained.
    """
    format, structure, field = request.response_format, _tags(engine, request), "tools"
    grammars, schema = engine.grammars, None
    if format is not None and format.type != "text":
        given = format.json_schema.schema_ if format.json_schema else {"type": "object"}
        as_json = {"type": "json_schema", "json_schema": given}
        if structure is not None:
            structure = {"type": "or", "elements": [as_json, structure]}
        else:
            strict = format.json_schema is None or format.json_schema.strict
            if not strict and grammars.skip("the schema of response_format (without strict)"):
                return None
            structure, schema, field = as_json, given, "response_format.json_schema.schema"
    if structure is None:
        return None
    if prompt_end is not None:
        assert engine.style.reasoning is not None
        structure, shortest = think_first(structure, prompt_end, engine.style.reasoning)
        return await grammars.compile_structure(structure, field, shortest)
    return await (
        grammars.compile_structure(structure) if schema is None else grammars.compile_schema(schema)
    )


def _tags(engine: TransformersEngine, request: ChatRequest) -> JsonObject | None:
    """Return the structural tag of an answer that calls tools; None if the answer may be any text.

    Raises:
        RequestError: the calls must fit a schema, which the model's tool format does not support.
    """
    if not _may_call_tools(request):
        return None
    assert engine.style.tool_format is not None
    optional = request.tool_choice in (None, "auto")
    with_schema = request.response_format is not None and request.response_format.type != "text"
    strict = {tool.function.name for tool in request.tools or () if tool.function.strict}
    if optional and not strict and not with_schema:
        return None
    schemas = dict(request.schemas())
    if isinstance(request.tool_choice, NamedTool):
        schemas = {request.tool_choice.function.name: schemas[request.tool_choice.function.name]}
    elif optional:
        schemas = {name: schema if name in strict else {"type": "object"} for name, schema in schemas.items()}
    parallel = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)
    tags = engine.style.tool_format.grammar(schemas, required=not optional or with_schema, parallel=parallel)
    if tags is None and optional and not with_schema:
        log_dropped("tools[].function.strict", "this model's format of tool calls cannot enforce")
    elif tags is None:
        field = "response_format" if optional else "tool_choice"
        raise RequestError(
            f"{field}: this model's tool calls cannot be constrained to a schema; use tool_choice auto, and "
            "no response_format together with tools"
        )
    return tags


@dataclass
class _Choice:
    """One choice, and the part of its message that has been parsed."""

    reader: ChoiceReader
    parser: MessageParser | HarmonyParser
    end_of_reasoning: str
    text: dict[str, str] = field(default_factory=lambda: {"reasoning": "", "content": ""})
    calls: list[JsonObject] = field(default_factory=list)
    started: bool = False
    reasoning_tokens: int = 0
    """Tokens of the reasoning so far, with its markers."""
    thought: bool = False
    """True once the reasoning is finished."""

    def deltas(self, new: Increment, parallel: bool) -> list[JsonObject]:
        """Return the increment as the `delta` of a chunk, or of several: in each, calls follow the content,
        which follows the reasoning."""
        deltas: list[JsonObject] = [{} if self.started else {"role": "assistant", "content": ""}]
        self.started = True
        for piece in self.parser.feed(new.text, new.reason is not None):
            if piece.call is None:
                self.text[piece.kind] += piece.text
                name = "reasoning_content" if piece.kind == "reasoning" else "content"
                if "tool_calls" in deltas[-1] or (piece.kind == "reasoning" and deltas[-1].get("content")):
                    deltas.append({})
                deltas[-1][name] = deltas[-1].get(name, "") + piece.text
            elif parallel or not self.calls:
                self._add_call(piece, deltas[-1])
        if self.parser.is_reasoning:
            self.reasoning_tokens = new.first + len(new.ids)
        elif self.parser.reasoned and not self.thought:
            self.thought, self.reasoning_tokens = True, self.reader.count_until(self.end_of_reasoning)
        return deltas

    def _add_call(self, piece: MessagePiece, delta: JsonObject) -> None:
        assert piece.call is not None
        message = piece.call.as_message_part()
        delta.setdefault("tool_calls", []).append({"index": len(self.calls), **message})
        self.calls.append(message)

    def message(self) -> JsonObject:
        content, reasoning = self.text["content"], self.text["reasoning"]
        message: JsonObject = {
            "role": "assistant",
            "content": content or (None if self.calls or reasoning else ""),
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def finish_fields(self, new: Increment) -> dict[str, str | None]:
        return new.finish_fields | (
            {"finish_reason": "tool_calls"} if new.reason == "stop" and self.calls else {}
        )


class ChatReply:
    """The response to a chat completions request."""

    def __init__(
        self,
        engine: TransformersEngine,
        request: ChatRequest,
        prompt: PromptTokens,
        choices: Choices,
        prompt_end: str | None,
    ) -> None:
        self.choices, self.streams = choices, bool(request.stream)
        self._engine, self._request, self._prompt = engine, request, prompt.ids
        self._envelope = Envelope("chatcmpl", "chat.completion", request.model)
        style, schemas = engine.style, request.schemas() if _may_call_tools(request) else None
        self._choices = [
            _Choice(
                ChoiceReader(s, engine.vocabulary),
                style.parser(schemas, prompt_end),
                style.reasoning.close if style.reasoning else "",
            )
            for s in choices.sequences
        ]
        self._thinks = prompt_end is not None
        self._parallel = request.parallel_tool_calls is not False

    async def body(self) -> JsonObject:
        await self.choices.end()
        body = {
            **self._envelope.fields(),
            "choices": [self._complete_choice(i) for i in range(len(self._choices))],
            "usage": self._usage(),
        }
        return body | ({"prompt_token_ids": self._prompt} if self._request.return_token_ids else {})

    def _complete_choice(self, index: int) -> JsonObject:
        choice = self._choices[index]
        new = choice.reader.read()
        assert new is not None
        choice.deltas(new, self._parallel)
        return {
            "index": index,
            "message": choice.message(),
            "logprobs": self._logprobs(choice, new),
            **choice.finish_fields(new),
            **self._ids(new),
        }

    async def events(self) -> AsyncIterator[JsonObject]:
        request = self._request
        first = {"prompt_token_ids": self._prompt} if request.return_token_ids else {}
        async for _ in self.choices.progress():
            for index, choice in enumerate(self._choices):
                for chunk in self._chunk_choices(index, choice):
                    counts = usage_field(request, self._usage)
                    yield {**self._envelope.fields(".chunk"), "choices": [chunk], **counts, **first}
                    first = {}
        if request.includes_usage:
            yield {**self._envelope.fields(".chunk"), "choices": [], "usage": self._usage()}

    def _chunk_choices(self, index: int, choice: _Choice) -> list[JsonObject]:
        """Return a choice's parts of the next chunks; the last one has the tokens."""
        new = choice.reader.read()
        if new is None:
            return []
        *deltas, last = choice.deltas(new, self._parallel)
        nothing = Increment(new.first, [], "", None, None)
        parts = [self._part(index, choice, delta, nothing) for delta in deltas]
        if last or new.reason is not None or self._request.logprobs or self._request.return_token_ids:
            parts.append(self._part(index, choice, last, new))
        return parts

    def _part(self, index: int, choice: _Choice, delta: JsonObject, new: Increment) -> JsonObject:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(choice, new),
            **choice.finish_fields(new),
            **self._ids(new),
        }

    def _ids(self, new: Increment) -> JsonObject:
        return {"token_ids": new.ids} if self._request.return_token_ids else {}

    def _logprobs(self, choice: _Choice, new: Increment) -> JsonObject | None:
        if not self._request.logprobs:
            return None
        return {
            "content": token_logprobs(choice.reader.sequence, new, self._engine.vocabulary),
            "refusal": None,
        }

    def _usage(self) -> JsonObject:
        counts = usage(self.choices.sequences, [self._prompt])
        if not self._thinks:
            return counts
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        return counts | {"completion_tokens_details": {"reasoning_tokens": reasoning}}


def token_logprobs(sequence: Sequence, new: Increment, vocabulary: Vocabulary) -> list[JsonObject]:
    """Return the log-probability of each new token, and of the most probable tokens at its position."""

    def item(token: int, logprob: float) -> JsonObject:
        word = vocabulary.word(token)
        return {"token": word, "logprob": finite(logprob), "bytes": list(word.encode())}

    items = []
    for position, token in enumerate(new.ids, new.first):
        tops = sequence.top_logprobs[position] if sequence.params.top_logprobs else []
        items.append(
            item(token, sequence.sample.logprobs[position]) | {"top_logprobs": [item(*top) for top in tops]}
        )
    return items
