"""An engine and an agent in conversation, over tokenizers whose chat templates change past turns."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from template_helpers import ADD, call_of, make_tokenizer, result, says, template, user

from raylight.engines.capture_context import AttemptScope
from raylight.serving.conversations import conversations as core
from raylight.types import CallKey, Generation

SCOPE = AttemptScope("ro-1", "at-1")
CALL = re.compile(r"<tool_call>\n(\{.*?\})\n</tool_call>", re.DOTALL)
TOKENIZERS = {
    name: make_tokenizer(template(name))
    for name in (
        "chatml",
        "tools",
        "thinking",
        "collapsing",
        "headers",
        "strict",
        "channels",
        "parts",
        "open_turns",
    )
}
ENDS = {"headers": "<|eot_id|>", "strict": "</s>", "channels": "<|end|>", "open_turns": "<|user|>"}
"""Tokens with which answers end. An answer in channels that ends with <|return|> is not continued."""
STARTS = {"channels": "<|message|>"}
CALL_ENDS = {"channels": "<|call|>", "open_turns": "<|observation|>"}
TOOL_TEMPLATES = {"tools", "thinking", "headers", "strict", "channels", "open_turns"}
"""Templates that support tools."""


@dataclass
class Splice:
    """A spliced prompt."""

    tokens: list[int]
    complete: bool


class Conversations(core.Conversations):
    """Conversations that read every request themselves."""

    def splice(self, scope: AttemptScope, body: dict[str, Any]) -> Splice | None:
        prompt = self.prompt(self.read(scope, body))
        return None if prompt.tokens is None else Splice(prompt.tokens, prompt.source == "spliced")

    def missing(self, scope: AttemptScope, body: dict[str, Any]) -> bytes | None:
        return self.unknown_answer(self.read(scope, body))

    def store(
        self, scope: AttemptScope, body: dict[str, Any], answer: dict[str, Any], tokens: list[int], n: int = 1
    ) -> None:
        self.remember(self.read(scope, body), answer, np.array(tokens, np.int32), len(tokens) - n)

    def has(self, scope: AttemptScope, body: dict[str, Any], answer: dict[str, Any]) -> bool:
        return self.knows(self.read(scope, body), answer)


@dataclass
class Spoken:
    """The model's output in a turn, before its end token."""

    thought: str = ""
    text: list[int] = field(default_factory=list)
    """Any tokens, not necessarily the tokenizer's own tokenisation."""
    call: str = ""
    """Arguments as JSON text."""
    ends: bool = True


@dataclass
class Table:
    """An engine and an agent in conversation; the agent changes messages as real agents do."""

    name: str
    splices: bool = True
    calls: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = TOKENIZERS[self.name]
        self.conversations = Conversations(self.tokenizer)
        self.messages: list[dict[str, Any]] = [user("the cat sat?")]

    def turn(self, spoken: Spoken) -> None:
        body = self.body()
        splice = self.conversations.splice(SCOPE, body) if self.splices else None
        prompt = splice.tokens if splice else self.render(body)
        output = self._sample(spoken)
        message = self._parse(output)
        self.calls.append(generation(len(self.calls), prompt, output))
        self.conversations.store(SCOPE, body, message, prompt + output, len(output))
        self.messages = [*self.messages, self._echo(message)]
        calls = message.get("tool_calls")
        self.messages += [result(" 3.5\n", call["id"]) for call in calls] if calls else [user("and  then? ")]

    def body(self, messages: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Return a request with the agent's messages, or with others."""
        return {
            "messages": self.messages if messages is None else messages,
            "tools": [ADD] if self.name in TOOL_TEMPLATES else None,
        }

    def render(self, body: dict[str, Any]) -> list[int]:
        messages = [dict(message) for message in body["messages"]]
        for message in messages:
            if "tool_calls" in message:
                message["tool_calls"] = [
                    {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
                    for c in message["tool_calls"]
                ]
        return list(
            self.tokenizer.apply_chat_template(
                messages, tools=body["tools"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def _sample(self, spoken: Spoken) -> list[int]:
        thought = (
            f"<think>\n{spoken.thought}\n</think>\n\n" if spoken.thought and self.name == "thinking" else ""
        )
        calls = bool(spoken.call) and self.name in TOOL_TEMPLATES
        call = f'\n<tool_call>\n{{"name": "add", "arguments": {spoken.call}}}\n</tool_call>' if calls else ""
        end = (
            (CALL_ENDS if calls and self.name in CALL_ENDS else ENDS).get(self.name, "<|im_end|>")
            if spoken.ends
            else ""
        )
        encode = self.tokenizer.encode
        return [
            *encode(STARTS.get(self.name, "") + thought),
            *spoken.text,
            *encode(call),
            *encode(end),
        ] or encode("a")

    def _parse(self, output: list[int]) -> dict[str, Any]:
        """Extract reasoning and calls from the text, as an engine's parsers do."""
        text = self.tokenizer.decode(output, skip_special_tokens=True)
        thought, found, rest = text.partition("</think>")
        text = rest if found else text
        calls = [json.loads(found) for found in CALL.findall(text)]
        message = says(
            CALL.sub("", text),
            *(
                call_of(c["name"], json.dumps(c["arguments"]), f"call_{len(self.calls)}_{i}")
                for i, c in enumerate(calls)
            ),
        )
        return message | ({"reasoning_content": thought} if found else {})

    def _echo(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer as agents send it: stripped, without reasoning, JSON rewritten, keys added."""
        echo = {"role": "assistant", "content": message["content"].strip()}
        calls = [
            {
                **c,
                "function": {
                    **c["function"],
                    "arguments": json.dumps(json.loads(c["function"]["arguments"]), indent=1),
                },
            }
            for c in message.get("tool_calls", [])
        ]
        return echo | {"name": "agent", "annotations": []} | ({"tool_calls": calls} if calls else {})


def generation(number: int, prompt: list[int], output: list[int]) -> Generation:
    return Generation(
        key=CallKey("ro-1", "at-1", f"call-{number}"),
        model="policy",
        prompt_ids=prompt,
        output_ids=output,
        logprobs=[-1.0] * len(output),
        weight_versions=[0] * len(output),
        finish_reason="stop",
        start_time=float(number),
        end_time=number + 1.0,
        sampling={"temperature": 1.0},
    )


def speak(text: str, tokenizer: Any = TOKENIZERS["chatml"], **more: Any) -> Spoken:
    return Spoken(text=tokenizer.encode(text), **more)
