"""Demonstrations: conversations to learn from, as token rows in which only answers are learned.

Prompts and answers are rendered by the model's own chat template, turn by turn, as an engine renders them. So
a row has the tokens that the model reads and samples in a rollout. A template that changes earlier turns, as
those do that drop reasoning, makes several rows of a conversation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from raylight.errors import DatasetError
from raylight.types import JsonObject, Tokenizer
from raylight.types.chat_messages import is_reasoning, reasoning_fields, reasoning_of

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class Demonstration:
    """A conversation in the form of OpenAI's chat API, ready for a chat template.

    Attributes:
        messages: at least one of them is an answer of the assistant. The text of a message is a string, and
            the arguments of a tool call are a dict. An answer with `"weight": 0` is context, and not learned.
        tools: tools as a request has them.
    """

    messages: list[JsonObject]
    tools: list[JsonObject] = field(default_factory=list)

    @classmethod
    def parse(cls, value: object, source: str) -> Self:
        """Return the demonstration that a value describes: `{"messages": [...], "tools": [...]}`, where
        `tools` may be missing, or a list of messages.

        Args:
            source: name of the value's origin, for error messages.

        Raises:
            DatasetError: the value has no messages, a message is malformed, or none is an answer that is
                learned.
        """
        if isinstance(value, list | tuple):
            value = {"messages": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("messages"), list | tuple):
            raise DatasetError(
                f"{source} is {value!r:.80}; a demonstration is {{'messages': [...]}}, with OpenAI messages"
            )
        tools = value.get("tools") or []
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
            raise DatasetError(
                f"{source}: tools is {tools!r:.80}; give a list of tools as a request has them"
            )
        messages = [_message(m, f"{source}, message {i}") for i, m in enumerate(value["messages"], 1)]
        if not any(_is_learned(message) for message in messages):
            raise DatasetError(
                f"{source} has no answer of the assistant to learn; add a message with this role"
            )
        return cls(messages, [dict(tool) for tool in tools])

    @classmethod
    def parse_pair(cls, value: object, source: str) -> tuple[Self, Self]:
        """Return the chosen and the rejected conversation that a value describes: `{"prompt": [...],
        "chosen": [...], "rejected": [...], "tools": [...]}`, each a list of messages. Without `prompt`, what
        `chosen` and `rejected` have in common at their beginning is the prompt. Only answers after the prompt
        are learned.

        Raises:
            DatasetError: as for `parse`; or the value is not a pair, or both conversations are equal.
        """
        names = ("chosen", "rejected")
        if not isinstance(value, Mapping) or not all(isinstance(value.get(n), list | tuple) for n in names):
            raise DatasetError(
                f"{source} is {value!r:.80}; a pair is {{'prompt': [...], 'chosen': [...], 'rejected': "
                "[...]}}, each a list of OpenAI messages"
            )
        chosen, rejected = list(value["chosen"]), list(value["rejected"])
        if chosen == rejected:
            raise DatasetError(f"{source}: the chosen and the rejected answer are equal; leave the pair out")
        prompt = value.get("prompt")
        if prompt is None:
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
            prompt = [message for message, _ in same]
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not isinstance(prompt, list | tuple):
            raise DatasetError(f"{source}: prompt is {prompt!r:.80}; give a list of OpenAI messages")
        context = [{**m, "weight": 0} if isinstance(m, Mapping) else m for m in prompt]
        tools = value.get("tools") or []
        parsed = [
            cls.parse({"messages": [*context, *answer], "tools": tools}, f"{source}, {name}")
            for answer, name in zip((chosen, rejected), names, strict=True)
        ]
        return parsed[0], parsed[1]


@dataclass(frozen=True)
class DemonstrationRow:
    """The tokens of a conversation.

    Attributes:
        tokens: token ids.
        answers: start and end of each learned answer; the end includes the token that ends the turn.
    """

    tokens: list[int]
    answers: list[tuple[int, int]]

    @property
    def learned(self) -> list[int]:
        """Positions of the learned tokens."""
        return [position for start, end in self.answers for position in range(start, end)]


def render_demonstration(tokenizer: Tokenizer, demonstration: Demonstration, source: str) -> str:
    """Return the text of a whole conversation, as the chat template of a tokenizer renders it.

    Args:
        source: name of the demonstration's origin, for error messages.

    Raises:
        DatasetError: the template rejects the messages.
    """
    return _Template(tokenizer, source).render(demonstration.messages, demonstration.tools, prompt=False)


def demonstration_rows(
    tokenizer: Tokenizer, demonstration: Demonstration, source: str
) -> list[DemonstrationRow]:
    """Return the rows of a demonstration: one, unless the template changes earlier turns.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        source: name of the demonstration's origin, for error messages.

    Raises:
        DatasetError: the template rejects the messages, does not show a tool call or the tools, renders
            nothing before an answer, or does not end an answer with the end token. Or a text has a control
            token of the tokenizer, or a part that the tokenizer has no tokens for.
    """
    return [row.encoded for row in _text_rows(_Template(tokenizer, source), demonstration)]


@dataclass
class _TextRow:
    """A row under construction: its text so far and, for each piece, the tokens."""

    template: _Template
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: str, learned: bool) -> None:
        start = len(self.tokens)
        self.tokens += self.template.encode(text)
        self.text += text
        if learned:
            self.answers.append((start, len(self.tokens)))

    @property
    def encoded(self) -> DemonstrationRow:
        return DemonstrationRow(self.tokens, self.answers)


def _text_rows(template: _Template, demonstration: Demonstration) -> Iterator[_TextRow]:
    messages, tools = demonstration.messages, demonstration.tools
    template.check_texts(messages, tools)
    row = _TextRow(template)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:index], tools, prompt=True)
        if not row.answers and tools and prompt == template.render(messages[:index], [], prompt=True):
            raise DatasetError(f"{template.source}: the chat template does not show tools; leave them out")
        if not prompt.startswith(row.text):
            if row.answers:
                yield row
            row = _TextRow(template)
        if not prompt and _is_learned(message):
            raise DatasetError(
                f"{template.source}: the chat template renders nothing before the first answer, whose first "
                "token cannot be learned then; give a prompt that is not empty"
            )
        row.add(prompt[len(row.text) :], learned=False)
        row.add(template.answer(messages[: index + 1], tools, prompt), learned=_is_learned(message))
    if row.answers:
        yield row


class _Template:
    """A tokenizer's chat template, with errors that name the demonstration."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self._tokenizer = tokenizer
        self.source = source
        self._end = str(tokenizer.eos_token or "")

    def render(self, messages: list[JsonObject], tools: list[JsonObject], *, prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=[*tools] or None, add_generation_prompt=prompt, tokenize=False
                )
            )
        except Exception as error:  # a template is the model authors' program and may raise anything
            raise DatasetError(f"{self.source}: the chat template rejects the messages: {error}") from error

    def answer(self, messages: list[JsonObject], tools: list[JsonObject], prompt: str) -> str:
        """Return the text that the model has to sample after the prompt, with the end token."""
        whole = self.render(messages, tools, prompt=False)
        if not whole.startswith(prompt):
            raise DatasetError(
                f"{self.source}: the chat template renders an answer differently after its own prompt, as "
                "templates do that start the reasoning there; such a model cannot learn from these messages"
            )
        answer = whole[len(prompt) :]
        text, end, _ = answer.rpartition(self._end) if self._end else ("", "", "")
        if not end:
            raise DatasetError(
                f"{self.source}: the chat template does not end an answer with the end token {self._end!r}"
            )
        last = messages[-1]
        for call in last.get("tool_calls", ()):
            function = call["function"]
            names = [function["name"], *function["arguments"]]
            without = {key: value for key, value in last.items() if key != "tool_calls"}
            plain = self.render([*messages[:-1], without], tools, prompt=False)
            if whole == plain or not all(json.dumps(name)[1:-1] in text or name in text for name in names):
                raise DatasetError(
                    f"{self.source}: the chat template does not show the call of {function['name']!r}; use a "
                    "model whose template has tool calls, or write the call into the answer's text"
                )
        return text + end

    def check_texts(self, messages: list[JsonObject], tools: list[JsonObject]) -> None:
        """Reject texts with control tokens, which would end a turn or begin another one."""
        text = json.dumps([messages, tools], ensure_ascii=False)
        for token in getattr(self._tokenizer, "all_special_tokens", ()):
            if token and json.dumps(token, ensure_ascii=False)[1:-1] in text:
                raise DatasetError(
                    f"{self.source}: a text has the tokenizer's control token {token!r}; remove it"
                )

    def encode(self, text: str) -> list[int]:
        try:
            tokens = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except (TypeError, UnicodeError) as error:
            raise DatasetError(f"{self.source}: a text cannot be encoded: {error}") from error
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        if text and (not tokens or (unknown is not None and unknown in tokens)):
            raise DatasetError(
                f"{self.source}: the tokenizer has no tokens for a part of {text!r:.80}; use a model with a "
                "byte-level tokenizer, or other texts"
            )
        return tokens


def _is_learned(message: Mapping[str, object]) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _message(value: object, source: str) -> JsonObject:
    """Return a message for the template: content as one string, the arguments of tool calls as dicts."""
    if not isinstance(value, Mapping) or value.get("role") not in ROLES:
        roles = ", ".join(sorted(ROLES))
        raise DatasetError(
            f"{source} is {value!r:.80}; a message is a dict with a role ({roles}) and content"
        )
    message = {key: item for key, item in value.items() if item is not None}
    if message["role"] == "developer":
        message["role"] = "system"  # templates know only the older name
    reasoning = reasoning_of(message) if message["role"] == "assistant" else ""
    message["content"] = _text(message.get("content", ""), source)
    calls = message.pop("tool_calls", None)
    if reasoning:
        message |= reasoning_fields(reasoning, bool(calls and message["content"]))
    if calls:
        if message["role"] != "assistant" or not isinstance(calls, list | tuple):
            raise DatasetError(f"{source}: tool_calls is {calls!r:.80}; an answer has a list of calls")
        message["tool_calls"] = [_call(call, source) for call in calls]
    if message["role"] == "assistant" and not calls and not message["content"]:
        raise DatasetError(f"{source} is an answer with neither text nor tool calls")
    return message


def _text(content: object, source: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    parts = [part for part in parts if not is_reasoning(part)]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DatasetError(f"{source}: the content is {content!r:.80}; give a text, or a list of text parts")
    return "\n".join(map(str, texts))


def _call(call: Any, source: str) -> JsonObject:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DatasetError(
            f"{source}: the tool call {call!r:.80} is malformed; write {{'function': {{'name': ..., "
            "'arguments': ...}}}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"{source}: the arguments of {function['name']!r} are not valid JSON: {error}"
            ) from None
    if not isinstance(arguments, Mapping):
        raise DatasetError(
            f"{source}: the arguments of {function['name']!r} are {arguments!r:.80}, not an object"
        )
    return {**call, "type": "function", "function": {**function, "arguments": dict(arguments)}}
