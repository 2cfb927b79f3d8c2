"""New turns of a conversation as tokens, without what came before them.

The chat template renders all messages, with a mark in place of the last answer; what follows the mark is the end of the assistant's
turn, the new turns, and the beginning of the next answer. It must not depend on what was answered, and must show all new turns: for
each shape of a conversation's end this is tried out once.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from raylight.serving.conversations.canonical import arguments_of, text_of

logger = logging.getLogger(__name__)

RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Names that are no variables of a template, but arguments of the tokenizer."""
LONGEST_ENDING = 16
"""Tokens with which a template ends a turn and begins the next, at most."""
MOST_SHAPES = 1000

Message: TypeAlias = dict[str, Any]


class TemplateRefusal(Exception):
    """The chat template does not let its turns be taken apart; the text tells why."""


@dataclass(frozen=True)
class _Mark:
    """A message that nobody sent, and that ends in a word that is found again."""

    before: str = ""
    word: str = field(default_factory=lambda: "Zq" + uuid.uuid4().hex)

    @property
    def content(self) -> str:
        return self.before + self.word


FIRST, SECOND = _Mark(), _Mark("Well,\n\n that {differs}. ")


@dataclass(frozen=True)
class _Ending:
    """A conversation from its beginning to its new turns, as the template is given it."""

    before: list[Message]
    answer: Message
    new: list[Message]
    tools: Any
    kwargs: dict[str, Any]

    @property
    def shape(self) -> Hashable:
        calls = len(self.answer.get("tool_calls", ()))
        new = tuple((m["role"], bool(m["content"]), "tool_calls" in m) for m in self.new)
        return calls, new, bool(self.tools), repr(self.kwargs)


@dataclass(frozen=True)
class _Way:
    """How to find the text after an answer."""

    calls: bool
    """Whether the answer is shown with its tool calls."""
    end: str = ""
    """The token that ends a turn with tool calls,"""
    passed: int = 0
    """and how many of these come between the arguments of the last call and that end."""


class Renderer:
    """Renders with a tokenizer's own chat template, in a copy of the tokenizer, which no other thread may borrow.

    Args:
        tokenizer: of Hugging Face.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = frozenset(added)
        self._special = sorted(
            (str(token) for token in added.values() if token.special), key=len, reverse=True
        )
        self._ways: dict[Hashable, _Way] = {}
        self._parts: bool | None = None

    def extend(
        self,
        tokens: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        answered: int,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A prompt: a conversation's tokens as they are, and the messages after its last answer `messages[answered]`.

        Tokens that end a turn are not repeated where they were sampled, and are added where the answer was cut short.

        Raises:
            TemplateRefusal: the template does not allow it.
        """
        text = self.after(messages, answered, tools, template_kwargs)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        if not ids or ids[0] not in self._added:
            raise TemplateRefusal("it ends the assistant's turn without a token of its own")
        end = list(tokens[-LONGEST_ENDING:])
        sampled = next((n for n in range(min(len(end), len(ids)), 0, -1) if end[-n:] == ids[:n]), 0)
        return [*tokens, *ids[sampled:]]

    def after(
        self,
        messages: Sequence[Mapping[str, Any]],
        answered: int,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that follows the answer `messages[answered]`, from the token on that ends its turn.

        Raises:
            TemplateRefusal: the template raises, has no such text, or one that depends on the answer or leaves a message out.
        """
        kwargs = dict(template_kwargs or {})
        if kwargs.keys() & RESERVED:
            raise TemplateRefusal("chat_template_kwargs has names that are no variables of a template")
        shown = [self._shown(message) for message in messages]
        ending = _Ending(shown[:answered], shown[answered], shown[answered + 1 :], tools or None, kwargs)
        shape = ending.shape
        way = self._ways.get(shape)
        if way is None:
            way = self._find_way(ending)
            if len(self._ways) >= MOST_SHAPES:
                self._ways.clear()
            self._ways[shape] = way
        return self._after(way, ending, FIRST)

    def _find_way(self, ending: _Ending) -> _Way:
        """With its tool calls an answer is shown as it was; some templates show it such that its turn's end cannot be told."""
        if "tool_calls" in ending.answer:
            try:
                way = self._past_calls(ending)
                self._try_out(way, ending)
                return way
            except TemplateRefusal as refusal:
                logger.debug("an answer is shown without its tool calls: %s", refusal)
        way = _Way(calls=False)
        self._try_out(way, ending)
        return way

    def _past_calls(self, ending: _Ending) -> _Way:
        """A turn ends with the special token that comes last where there are no new turns."""
        answer = self._calling(ending.answer, FIRST)
        alone = self._tail(answer, replace(ending, new=[]), FIRST, add_generation_prompt=False)
        end = next((token for token in self._special if alone.rstrip().endswith(token)), "")
        at = alone.rfind(end) if end else -1
        if at < 0 or not self._tail(answer, ending, FIRST).startswith(alone[: at + len(end)]):
            raise TemplateRefusal("a turn in which a tool is called has no end that could be found")
        return _Way(calls=True, end=end, passed=alone[:at].count(end))

    def _try_out(self, way: _Way, ending: _Ending) -> None:
        if self._after(way, ending, FIRST) != self._after(way, ending, SECOND):
            raise TemplateRefusal("what it shows after an answer depends on the answer")
        renamed = [{**m, "role": "system"} if m["role"] == "developer" else m for m in ending.new]
        if renamed != ending.new and self._after(way, replace(ending, new=renamed), FIRST) != self._after(
            way, ending, FIRST
        ):
            raise TemplateRefusal(
                "it shows a developer's message otherwise than a system's, and engines differ in which they take"
            )
        sent = [(m, _Mark()) for m in ending.new]
        probe = replace(
            ending, new=[{**m, "content": self._content(m["role"], mark.content)} for m, mark in sent]
        )
        text = self._after(way, probe, FIRST)
        if any(mark.word not in text for _, mark in sent):
            raise TemplateRefusal("it leaves a message out, or shows it within the answer before it")

    def _after(self, way: _Way, ending: _Ending, mark: _Mark) -> str:
        """Space between an answer of text alone and the token that ends its turn is the answer's, if anyone's."""
        if not way.calls:
            return self._tail(
                {"role": "assistant", "content": self._content("assistant", mark.content)}, ending, mark
            ).lstrip()
        parts = self._tail(self._calling(ending.answer, mark), ending, mark).split(way.end, way.passed + 1)
        if len(parts) < way.passed + 2:
            raise TemplateRefusal("a turn in which a tool is called has no end that could be found")
        return way.end + parts[-1]

    def _calling(self, answer: Message, mark: _Mark) -> Message:
        """The same calls with other arguments, and without the text that came first, which some templates put last."""
        arguments = {mark.content: mark.content}
        calls = [
            {**call, "function": {**call["function"], "arguments": arguments}}
            for call in answer["tool_calls"]
        ]
        return {"role": "assistant", "content": self._content("assistant", ""), "tool_calls": calls}

    def _tail(
        self, answer: Message, ending: _Ending, mark: _Mark, *, add_generation_prompt: bool = True
    ) -> str:
        """What follows the mark in an answer. Text must be shown once; arguments of calls may be shown several times."""
        shown = [*ending.before, answer, *ending.new]
        text = self._render(shown, ending.tools, ending.kwargs, add_generation_prompt=add_generation_prompt)
        marks = text.count(mark.word)
        if not marks or (marks > 1 and "tool_calls" not in answer):
            raise TemplateRefusal("it does not show an earlier answer exactly once, and as it is")
        return text.rpartition(mark.word)[2]

    def _shown(self, message: Mapping[str, Any]) -> Message:
        """A message as engines hand it to templates: content in the form that the template reads, arguments as data."""
        shown = {**message, "content": self._content(message["role"], text_of(message.get("content")))}
        if reasoning := message.get("reasoning") or message.get("reasoning_content"):
            shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
        calls = shown.pop("tool_calls", None)
        if calls and message["role"] == "assistant":
            shown["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": arguments_of(call["function"].get("arguments")),
                    },
                }
                for call in calls
            ]
        return shown

    def _content(self, role: str, text: str) -> Any:
        """Content as text, or in parts for a template that reads parts; results of tools are text for all."""
        if self._parts is None:
            probe = [{"role": "user", "content": [{"type": "text", "text": FIRST.content}]}]
            try:
                shown = self._render(probe, None, {})
            except TemplateRefusal:
                shown = ""
            self._parts = FIRST.word in shown and "'type'" not in shown and '"type"' not in shown
        return [{"type": "text", "text": text}] if self._parts and role != "tool" else text

    def _render(
        self,
        shown: list[Message],
        tools: Any,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    shown, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
                )
            )
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            raise TemplateRefusal(f"it raises: {error}") from error
