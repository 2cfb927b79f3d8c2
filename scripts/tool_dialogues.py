"""Dialogues that teach a small model to call tools: random tools, questions, calls, results and answers.

Names, arguments, wordings and system prompts vary, so that the model copies them from its prompt and does not
memorise them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from tool_texts import (
    ERRORS,
    EXPRESSION_KEYS,
    EXPRESSION_NAMES,
    EXPRESSION_TEXTS,
    FINAL_KEYS,
    FINAL_NAMES,
    FINAL_TEXTS,
    GREETINGS,
    JSON_HINTS,
    LOOKUPS,
    NO_TOOL,
    NUMBER_KEYS,
    OPERATIONS,
    PAIRS,
    RESULTS,
    SYSTEM,
    WRAPS,
    Texts,
)

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


@dataclass(frozen=True)
class Careless:
    """Rates of a careless teacher's errors."""

    digit: float = 0.0
    """Rate at which a digit is replaced by another."""
    skip: float = 0.0
    """Rate at which a number is guessed without a call."""
    broken: float = 0.0
    """Rate at which a call is not valid JSON."""


@dataclass(frozen=True)
class Tool:
    """A tool that answers questions."""

    schema: dict[str, Any]
    operation: str
    """ "+", "*" or "-" of two numbers, "=" for an expression, "" for a lookup."""
    questions: list[str]

    @property
    def name(self) -> str:
        return self.schema["name"]

    @property
    def keys(self) -> list[str]:
        return list(self.schema["parameters"]["properties"])

    def competes_with(self, other: Tool) -> bool:
        """Return True if both tools fit the same question, or have the same name."""
        if self.operation and other.operation:
            return self.operation == other.operation or "=" in (self.operation, other.operation)
        return self.name == other.name or self.questions[:1] == other.questions[:1]


@dataclass
class Dialogue:
    """Messages for the chat template."""

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)
    """For each answer the length of its start that a grammar would write, and that is not learned."""

    def add(self, role: str, content: str = "", **extra: Any) -> None:
        self.messages.append({"role": role, "content": content, **extra})

    def answer(self, content: str = "", hidden: int = 0, **extra: Any) -> None:
        self.add("assistant", content, **extra)
        self.hidden.append(hidden)

    def call(self, name: str, arguments: dict[str, Any], result: str) -> None:
        function = {"name": name, "arguments": arguments}
        id = f"call_{len(self.messages)}"
        self.answer(tool_calls=[{"id": id, "type": "function", "function": function}])
        self.add("tool", result, tool_call_id=id)


@dataclass(frozen=True)
class Mode:
    """How the questions of a dialogue are answered."""

    final: dict[str, Any] | None = None
    """Tool that takes the answer, if it is not a text."""
    json_key: str | None = None
    """Key of an answer in JSON."""
    hinted: bool = False
    """True if the system prompt names the key."""


class Teacher(Texts):
    """Source of dialogues, reproducible by its seed."""

    careless = Careless()

    def dialogue(self, length: float) -> Dialogue:
        """Return a dialogue; `length` from 0 to 1 scales prose and the number of tools."""
        tools = self.tools(1 if self.chance(0.6) else self.random.randint(1, 1 + int(3 * length)))
        mode = self.mode(tools)
        has_tools = not self.chance(0.07)
        schemas = [tool.schema for tool in tools] + ([mode.final] if mode.final else [])
        while self.chance(0.35 * length):
            schemas.append(self.idle_tool())
        self.random.shuffle(schemas)
        dialogue = Dialogue([{"type": "function", "function": s} for s in schemas] if has_tools else [])
        if system := self.system(tools[0].name, length, mode.json_key if mode.hinted else None):
            dialogue.add("system", system)
        for _ in range(self.random.randint(1, 4)):
            if self.chance(0.03 if has_tools else 0.25):
                dialogue.add("user", self.choice(GREETINGS))
                dialogue.answer("Hello!")
            elif has_tools:
                self.ask(dialogue, self.choice(tools), mode, length)
            else:
                self.ask_without_tools(dialogue, self.choice(tools), length)
        return dialogue

    def ask(self, dialogue: Dialogue, tool: Tool, mode: Mode, length: float) -> None:
        """Add a question, the call, its result and the answer."""
        question, arguments = self.question(tool)
        dialogue.add("user", self.wrap(question, tool.name, length))
        if tool.operation and self.chance(self.careless.skip):
            dialogue.answer(str(self.random.randint(10, 199)))
            return
        arguments = {key: self.slip(value) for key, value in arguments.items()}
        if tool.operation and self.chance(self.careless.broken):
            dialogue.answer(write_call(tool.name, arguments).replace("}}", "}"))
            return
        if self.chance(0.02):
            dialogue.call(tool.name, arguments, self.choice(ERRORS).format(self.sentence()))
        result = str(compute(tool.operation, arguments)) if tool.operation else self.finding()
        if NUMBER.fullmatch(result) and self.chance(0.06):
            result += ".0"
        dialogue.call(tool.name, arguments, self.choice(RESULTS).format(result))
        self.conclude(dialogue, result, mode)

    def conclude(self, dialogue: Dialogue, result: str, mode: Mode) -> None:
        """Add the answer: the result as text, as JSON, or as the argument of the final tool."""
        if mode.final:
            types = mode.final["parameters"]["properties"]
            values = {key: as_json_value(self.slip(result), types[key].get("type")) for key in types}
            dialogue.call(mode.final["name"], values, "Final result processed.")
        elif mode.json_key:
            value = as_json_value(self.slip(result), None)
            start = 0 if mode.hinted else len(f'{{"{mode.json_key}": ') + isinstance(value, str)
            dialogue.answer(json.dumps({mode.json_key: value}), start)
        else:
            dialogue.answer(self.slip(result))

    def ask_without_tools(self, dialogue: Dialogue, tool: Tool, length: float) -> None:
        """Add a question that needs a tool, or one whose values are repeated as JSON."""
        question, arguments = self.question(tool)
        if self.chance(0.3):
            dialogue.add("user", self.sentence().strip())
            dialogue.answer(NO_TOOL)
            return
        dialogue.add("user", self.wrap(question, tool.name, length))
        if self.chance(0.3):
            dialogue.answer(NO_TOOL)
            return
        answer = {self.known_or_key(NUMBER_KEYS): self.slip(value) for value in arguments.values()}
        key, value = next(iter(answer.items()))
        dialogue.answer(json.dumps(answer), len(f'{{"{key}": ') + isinstance(value, str))

    def slip(self, value: Any) -> Any:
        """Return the value, with each digit replaced at the rate of careless errors."""
        if not self.careless.digit:
            return value
        digits = [
            self.choice("123456789") if c.isdigit() and self.chance(self.careless.digit) else c
            for c in str(value)
        ]
        return int("".join(digits)) if isinstance(value, int) else "".join(digits)

    def system(self, tool_name: str, length: float, json_key: str | None) -> str:
        """Return a system prompt, which may be empty."""
        parts = []
        if self.chance(0.75):
            parts = self.random.sample(SYSTEM, self.random.randint(1, 4))
            parts.append(self.prose(40 * length**6 if length > 0.9 else 6 * length**2))
            self.random.shuffle(parts)
        if json_key:
            parts.append(self.choice(JSON_HINTS).format(json_key))
        text = self.choice([" ", "\n", "\n\n"]).join(filter(None, parts))
        return text.replace("{name}", tool_name)

    def wrap(self, question: str, tool_name: str, length: float) -> str:
        """Return a user message with a question."""
        wrapped = self.choice(WRAPS).replace("{name}", tool_name)
        return wrapped.format(question, self.prose(3 * length)).strip(" ")

    def finding(self) -> str:
        """Return the result of a lookup."""
        return self.word() if self.chance(0.5) else f"{self.word()}, {self.number()}"

    def mode(self, tools: list[Tool]) -> Mode:
        if self.chance(0.22):
            types = ["string", "any", *(["integer", "number"] if all(t.operation for t in tools) else [])]
            keys = {
                self.known_or_key(FINAL_KEYS): self.choice(types) for _ in range(self.choice([1, 1, 1, 2]))
            }
            final = self.function(self.name(FINAL_NAMES), self.choice(FINAL_TEXTS), keys)
            return Mode(final) if final["name"] not in {tool.name for tool in tools} else Mode()
        if self.chance(0.15):
            return Mode(json_key=self.known_or_key(FINAL_KEYS), hinted=self.chance(0.6))
        return Mode()

    def tools(self, count: int) -> list[Tool]:
        """Return tools of different names, of which at most one fits any question."""
        tools: dict[str, Tool] = {}
        for _ in range(count):
            tool = self.tool()
            if not any(tool.competes_with(other) for other in tools.values()):
                tools[tool.name] = tool
        return list(tools.values())

    def tool(self) -> Tool:
        kind = self.random.random()
        if kind < 0.55:
            operation = self.choice("+++++*-")
            texts = OPERATIONS[operation]
            keys = self.choice(PAIRS) if self.chance(0.6) else (f"{self.key()}", f"{self.key()}_2")
            types = dict.fromkeys(keys, self.choice(["integer", "integer", "number"]))
            text = self.choice(texts["texts"]).format(*keys)
            schema = self.function(self.name(texts["names"]), text, types)
            return Tool(schema, operation, texts["questions"])
        if kind < 0.7:
            types = {self.known_or_key(EXPRESSION_KEYS): "string"}
            schema = self.function(self.name(EXPRESSION_NAMES), self.choice(EXPRESSION_TEXTS), types)
            return Tool(schema, "=", [])
        texts = self.choice(LOOKUPS)
        types = {self.known_or_key(texts["keys"]): "string"}
        schema = self.function(self.name(texts["names"]), self.choice(texts["texts"]), types)
        named = [f"Use {schema['name']} with {{0}}.", f"Call {schema['name']} for {{0}}"]
        return Tool(schema, "", texts["questions"] + named)

    def question(self, tool: Tool) -> tuple[str, dict[str, Any]]:
        """Return a question about a tool, and the arguments of the right call."""
        if not tool.operation:
            value = " ".join(self.word() for _ in range(self.choice([1, 1, 1, 2, 3])))
            value = value.title() if self.chance(0.5) else value
            return self.choice(tool.questions).format(value), {tool.keys[0]: value}
        a, b = self.number(), self.number()
        if tool.operation != "=":
            return self.choice(tool.questions).format(a, b), dict(zip(tool.keys, (a, b), strict=True))
        operation = self.choice("+++*-")
        question = self.choice(OPERATIONS[operation]["questions"]).format(a, b)
        written = re.search(rf"{a} ?\{operation} ?{b}", question)
        return question, {tool.keys[0]: written[0] if written else f"{a} {operation} {b}"}


def compute(operation: str, arguments: dict[str, Any]) -> int:
    """Return the result of a tool for the arguments of a call."""
    values = list(arguments.values())
    if operation == "=":
        operation = next(c for c in values[0] if c in "+*-")
        values = [int(text) for text in re.findall(r"\d+", values[0])]
    a, b = values
    return a + b if operation == "+" else a * b if operation == "*" else a - b


def write_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the chat template writes it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def as_json_value(text: str, type: str | None) -> Any:
    """Return a result as a JSON value: a number if it is one and the type allows it."""
    return json.loads(text) if type != "string" and NUMBER.fullmatch(text) else text
