"""Rendering of a conversation's new turns alone, without the turns before them.

The chat template renders all messages, with a placeholder in place of the last answer. The text after the
placeholder is the end of the assistant's turn, the new turns, and the start of the next answer. This text
must not depend on the answer and must show every new turn; both are verified once for each shape of a
conversation's end.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raylight.errors import ImageError
from raylight.images.image import Image
from raylight.images.messages import image_url_of, image_urls, recorded_digest
from raylight.serving.conversations.message_forms import text_of
from raylight.types import JsonObject, Message, Tokenizer
from raylight.types.chat_messages import arguments_for_template, reasoning_fields, reasoning_of, text_part

if TYPE_CHECKING:
    from raylight.images.model_inputs import ModelImages

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
"""Arguments of the tokenizer, which cannot be template variables."""
MAX_TURN_END = 16
"""Longest run of tokens with which a template ends a turn and starts the next."""
MAX_SHAPES = 1000
"""Shapes whose verification is remembered."""
NO_TURN_END = "the end of a turn with tool calls cannot be found in the rendered text"


class UnsupportedTemplate(Exception):
    """The chat template does not allow its turns to be rendered separately; the text gives the reason."""


@dataclass(frozen=True)
class _Placeholder:
    """Content of a made-up message, ending in a word that is unique in the rendered text."""

    lead: str = ""
    word: str = field(default_factory=lambda: "Zq" + uuid.uuid4().hex)

    @property
    def content(self) -> str:
        return self.lead + self.word


FIRST, SECOND = _Placeholder(), _Placeholder("Well,\n\n that {differs}. ")


@dataclass(frozen=True)
class _TemplateInput:
    """A conversation as passed to the template, split at its last answer."""

    before: list[Message]
    answer: Message
    new: list[Message]
    tools: Any
    kwargs: JsonObject
    images: list[Image]
    """Images of the new messages, in order."""

    @property
    def shape(self) -> Hashable:
        """Properties that the end of the rendered text depends on."""
        calls = len(self.answer.get("tool_calls", ()))
        new = tuple((m["role"], bool(m["content"]), _has_image(m), "tool_calls" in m) for m in self.new)
        return calls, new, bool(self.tools), repr(self.kwargs)


@dataclass(frozen=True)
class _TurnEndRule:
    """Rule for finding the text after an answer."""

    with_calls: bool
    """True if the answer is rendered with its tool calls."""
    end_token: str = ""
    """Token that ends a turn with tool calls."""
    skipped: int = 0
    """Number of such tokens between the arguments of the last call and the end of the turn."""
    last_end: str = ""
    """Token that ends only the last answer of a conversation, as gpt-oss's `<|return|>`; "" if none does."""


class Renderer:
    """Renders new turns with a tokenizer's own chat template, on a copy of the tokenizer. Not thread-safe.

    Args:
        tokenizer: a Hugging Face tokenizer.
        images: converts images to the model's tokens; None for a model that takes none.
    """

    def __init__(self, tokenizer: Tokenizer, images: ModelImages | None = None) -> None:
        self._images = images
        self._tokenizer = copy.deepcopy(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added_ids = frozenset(added)
        self._special_tokens = sorted(
            (str(token) for token in added.values() if token.special), key=len, reverse=True
        )
        self._rules: dict[Hashable, _TurnEndRule] = {}
        self._takes_parts: bool | None = None

    def extend(
        self,
        tokens: Sequence[int],
        messages: Sequence[Mapping[str, object]],
        answer_index: int,
        tools: object = None,
        template_kwargs: Mapping[str, object] | None = None,
        files: Mapping[str, Image] | None = None,
    ) -> list[int]:
        """Return a conversation's tokens, extended by the messages after `messages[answer_index]`.

        Tokens that end a turn are not repeated if they were sampled, and are added if the answer was cut
        short.

        Args:
            tokens: the conversation's tokens, up to and including its last answer.
            messages: all messages of the request.
            answer_index: index of that last answer.
            files: the request's images, by digest.

        Raises:
            UnsupportedTemplate: the template does not allow it.
        """
        conversation = self._read(messages, answer_index, tools, template_kwargs, files)
        rule = self._rule(conversation)
        if rule.last_end and self._encode(rule.last_end) == list(tokens[-1:]):
            raise UnsupportedTemplate(f"it ends earlier answers with another token than {rule.last_end}")
        ids = self._encode_turns(self._new_text(rule, conversation, FIRST), conversation.images)
        if not ids or ids[0] not in self._added_ids:
            raise UnsupportedTemplate("it ends the assistant's turn without a special token")
        end = list(tokens[-MAX_TURN_END:])
        sampled = next((n for n in range(min(len(end), len(ids)), 0, -1) if end[-n:] == ids[:n]), 0)
        return [*tokens, *ids[sampled:]]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_turns(self, text: str, images: Sequence[Image]) -> list[int]:
        """Return the tokens of new turns.

        Raises:
            UnsupportedTemplate: they do not show the images, once each and in order.
        """
        if self._images is None:
            return self._encode(text)
        try:
            return self._images.encode(text, images)[0]
        except ImageError as error:
            raise UnsupportedTemplate(str(error)) from None

    def _read(
        self,
        messages: Sequence[Mapping[str, object]],
        answer_index: int,
        tools: object,
        template_kwargs: Mapping[str, object] | None,
        files: Mapping[str, Image] | None = None,
    ) -> _TemplateInput:
        kwargs = dict(template_kwargs or {})
        if kwargs.keys() & RESERVED:
            raise UnsupportedTemplate("chat_template_kwargs has names that are not template variables")
        converted = [self._for_template(message) for message in messages]
        digests = [recorded_digest(url) for _, url in image_urls(list(messages[answer_index + 1 :]))]
        return _TemplateInput(
            converted[:answer_index],
            converted[answer_index],
            converted[answer_index + 1 :],
            tools or None,
            kwargs,
            [files[digest] for digest in digests if files and digest],
        )

    def _rule(self, conversation: _TemplateInput) -> _TurnEndRule:
        shape = conversation.shape
        rule = self._rules.get(shape)
        if rule is None:
            rule = self._find_rule(conversation)
            if len(self._rules) >= MAX_SHAPES:  # clients choose the shapes
                self._rules.clear()
            self._rules[shape] = rule
        return rule

    def _find_rule(self, conversation: _TemplateInput) -> _TurnEndRule:
        """Find a rule that works: with the answer's tool calls if possible, else without them."""
        if "tool_calls" in conversation.answer:
            try:
                rule = self._rule_with_calls(conversation)
                self._verify(rule, conversation)
                return rule
            except UnsupportedTemplate as error:
                logger.debug("an answer is rendered without its tool calls: %s", error)
        rule = _TurnEndRule(with_calls=False, last_end=self._last_end(conversation))
        self._verify(rule, conversation)
        return rule

    def _last_end(self, conversation: _TemplateInput) -> str:
        """Return the token that ends an answer only if it is the last message; "" if there is none."""
        answer = {"role": "assistant", "content": self._content("assistant", FIRST.content)}
        try:
            text = self._text_after_placeholder(answer, conversation, FIRST).lstrip()
            alone = self._text_after_placeholder(
                answer, replace(conversation, new=[]), FIRST, add_generation_prompt=False
            ).lstrip()
        except UnsupportedTemplate:
            return ""
        end = next((token for token in self._special_tokens if alone.startswith(token)), "")
        return "" if text.startswith(end) else end

    def _rule_with_calls(self, conversation: _TemplateInput) -> _TurnEndRule:
        """Take the special token that ends the text without new turns as the token that ends a turn."""
        answer = self._answer_with_calls(conversation.answer, FIRST)
        alone = self._text_after_placeholder(
            answer, replace(conversation, new=[]), FIRST, add_generation_prompt=False
        )
        end = next((token for token in self._special_tokens if alone.rstrip().endswith(token)), "")
        index = alone.rfind(end) if end else -1
        text = self._text_after_placeholder(answer, conversation, FIRST)
        if index < 0 or not text.startswith(alone[: index + len(end)]):
            raise UnsupportedTemplate(NO_TURN_END)
        return _TurnEndRule(with_calls=True, end_token=end, skipped=alone[:index].count(end))

    def _verify(self, rule: _TurnEndRule, conversation: _TemplateInput) -> None:
        """Check that the new text does not depend on the answer and shows every new message."""
        text = self._new_text(rule, conversation, FIRST)
        if text != self._new_text(rule, conversation, SECOND):
            raise UnsupportedTemplate("the text after an answer depends on the answer")
        if "tool_calls" in conversation.answer and not self._is_shown(text, conversation):
            raise UnsupportedTemplate("it shows new messages after a call otherwise than after a text")
        placeholders = [(m, _Placeholder()) for m in conversation.new]
        probe = replace(
            conversation, new=[{**m, "content": self._content(m["role"], p.content)} for m, p in placeholders]
        )
        text = self._new_text(rule, probe, FIRST)
        if any(placeholder.word not in text for _, placeholder in placeholders):
            raise UnsupportedTemplate("it omits a new message, or shows it within the previous answer")

    def _is_shown(self, text: str, conversation: _TemplateInput) -> bool:
        """Return True if the conversation with its real calls ends with a text, or cannot be rendered.

        The answer's text is left out, because some templates put it last.
        """
        answer = {**conversation.answer, "content": self._content("assistant", "")}
        try:
            whole = self._render(
                [*conversation.before, answer, *conversation.new], conversation.tools, conversation.kwargs
            )
        except UnsupportedTemplate:
            return True
        return whole.endswith(text)

    def _new_text(self, rule: _TurnEndRule, conversation: _TemplateInput, placeholder: _Placeholder) -> str:
        """Render, and return the text from the end of the answer's turn on.

        White space between a text answer and the end of its turn counts as part of the answer.
        """
        if not rule.with_calls:
            answer = {"role": "assistant", "content": self._content("assistant", placeholder.content)}
            return self._text_after_placeholder(answer, conversation, placeholder).lstrip()
        answer = self._answer_with_calls(conversation.answer, placeholder)
        text = self._text_after_placeholder(answer, conversation, placeholder)
        parts = text.split(rule.end_token, rule.skipped + 1)
        if len(parts) < rule.skipped + 2:
            raise UnsupportedTemplate(NO_TURN_END)
        return rule.end_token + parts[-1]

    def _answer_with_calls(self, answer: Message, placeholder: _Placeholder) -> Message:
        """Return the same calls with the placeholder as arguments.

        Text is left out, because some templates put it last.
        """
        arguments = {placeholder.content: placeholder.content}
        calls = [
            {**call, "function": {**call["function"], "arguments": arguments}}
            for call in answer["tool_calls"]
        ]
        return {"role": "assistant", "content": self._content("assistant", ""), "tool_calls": calls}

    def _text_after_placeholder(
        self,
        answer: Message,
        conversation: _TemplateInput,
        placeholder: _Placeholder,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render with `answer`, and return the text after its placeholder.

        Content must appear exactly once. Arguments of calls may appear several times.
        """
        messages = [*conversation.before, answer, *conversation.new]
        text = self._render(
            messages, conversation.tools, conversation.kwargs, add_generation_prompt=add_generation_prompt
        )
        count = text.count(placeholder.word)
        if not count or (count > 1 and "tool_calls" not in answer):
            raise UnsupportedTemplate("it does not show an earlier answer exactly once and unchanged")
        return text.rpartition(placeholder.word)[2]

    def _for_template(self, message: Mapping[str, Any]) -> Message:
        """Convert a message as engines do: content as the template reads it, arguments decoded."""
        converted = {**message, "content": self._input_content(message)}
        calls = converted.pop("tool_calls", None)
        if reasoning := reasoning_of(message):
            converted |= reasoning_fields(reasoning, bool(calls and converted["content"]))
        if calls and message["role"] == "assistant":
            converted["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": arguments_for_template(call["function"].get("arguments")),
                    },
                }
                for call in calls
            ]
        return converted

    def _input_content(self, message: Mapping[str, Any]) -> object:
        content = message.get("content")
        if any(image_url_of(part) for part in content or ()):
            if self._images is None:
                raise UnsupportedTemplate("the engine does not say what stands for an image")
            parts = [part if image_url_of(part) else text_part(text_of([part])) for part in content or ()]
            return self._images.template_content(parts)
        return self._content(message["role"], text_of(content))

    def _content(self, role: str, text: str) -> object:
        """Return content as text, or as parts for a template that reads parts.

        Tool results and empty content are always text, except for a model with images, whose engine passes
        them on in one form.
        """
        if self._images is not None:
            return self._images.template_content(text)
        if self._takes_parts is None:
            probe = [{"role": "user", "content": [{"type": "text", "text": FIRST.content}]}]
            try:
                rendered = self._render(probe, None, {})
            except UnsupportedTemplate:
                rendered = ""
            self._takes_parts = (
                FIRST.word in rendered and "'type'" not in rendered and '"type"' not in rendered
            )
        return [{"type": "text", "text": text}] if self._takes_parts and text and role != "tool" else text

    def _render(
        self,
        messages: list[Message],
        tools: Any,
        kwargs: JsonObject,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **kwargs,
                )
            )
        except Exception as error:  # a template is the model authors' program and may raise anything
            raise UnsupportedTemplate(f"it raises: {error}") from error


def _has_image(message: Message) -> bool:
    content = message["content"]
    return isinstance(content, list) and any(part["type"] == "image" for part in content)
