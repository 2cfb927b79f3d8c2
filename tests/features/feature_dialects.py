"""Clients of the dialects through their SDKs, with a common form of requests and answers."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import anthropic
import openai

MODEL = "policy"


@dataclass(frozen=True)
class Call:
    """Tool call. `arguments` is JSON text, or the object that the SDK decoded."""

    id: str
    name: str
    arguments: Any


@dataclass
class DialectAnswer:
    """Answer of a model, in the form common to all dialects."""

    texts: list[str]
    """Text of each choice."""
    prompt_tokens: int
    tokens: int
    end: str | None
    """Finish reason, as the dialect spells it."""
    calls: list[Call] = field(default_factory=list)
    turn: list[Any] = field(default_factory=list)
    """Turns that repeat the answer in the next request."""
    logprobs: list[float] | None = None
    pieces: int = 0
    """Number of stream events with content."""
    announced: int | None = None
    """Number of prompt tokens in the first event of a stream; None if the dialect has none there."""
    id: str = ""

    @property
    def text(self) -> str:
        return self.texts[0]


class Dialect:
    """Client of a dialect. This base class has the defaults of OpenAI's dialects.

    Settings of `ask`: max_tokens, temperature, seed, stop, n, logprobs, tools, tool_choice ("required" or a
    tool's name), parallel, schema, system, image, previous.
    """

    name: str
    truncated = "length"
    streaming: ClassVar[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
    sync_client: Any = openai.OpenAI
    async_client: Any = openai.AsyncOpenAI
    tool_schema: ClassVar[str]
    """Path of the schema of a tool."""
    hints: ClassVar[dict[str, Any]]
    """Settings of a style that the model does not have."""

    def base(self, url: str) -> str:
        return f"{url}/v1"

    def method(self, client: Any) -> Any:
        raise NotImplementedError

    def request(self, turns: list[Any], **asked: Any) -> dict[str, Any]:
        """Return the SDK's arguments for a request."""
        raise NotImplementedError

    def allowed_tools(self, name: str) -> dict[str, Any]:
        """Return the choice that requires a call of one tool among those allowed."""
        raise NotImplementedError

    def read(self, answer: Any) -> DialectAnswer:
        raise NotImplementedError

    def read_stream(self, events: list[Any]) -> DialectAnswer:
        raise NotImplementedError

    def results(self, *results: tuple[Call, str]) -> list[Any]:
        """Return the turns that pass tool results to a model."""
        raise NotImplementedError

    def ask(self, client: Any, turns: list[Any], stream: bool = False, **asked: Any) -> DialectAnswer:
        request = {"model": MODEL} | self.request(turns, **asked)
        if stream:
            return self.read_stream(list(self.method(client)(**request, **self.streaming)))
        return self.read(self.method(client)(**request))

    async def ask_async(
        self, client: Any, turns: list[Any], stream: bool = False, **asked: Any
    ) -> DialectAnswer:
        request = {"model": MODEL} | self.request(turns, **asked)
        if stream:
            return self.read_stream(
                [event async for event in await self.method(client)(**request, **self.streaming)]
            )
        return self.read(await self.method(client)(**request))


def renamed(asked: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in asked.items()}


class Chat(Dialect):
    name = "chat"
    tool_schema = "tools[{}].function.parameters: "
    hints: ClassVar[dict[str, Any]] = {
        "reasoning_effort": "low",
        "reasoning": {"effort": "low"},
        "verbosity": "low",
        "thinking": {"type": "disabled"},
    }

    def method(self, client: Any) -> Any:
        return client.chat.completions.create

    def request(self, turns: list[Any], **asked: Any) -> dict[str, Any]:
        if system := asked.pop("system", None):
            turns = [{"role": "system", "content": system}, *turns]
        if image := asked.pop("image", None):
            turns = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]
        if tools := asked.pop("tools", None):
            asked["tools"] = [{"type": "function", "function": tool} for tool in tools]
        if asked.get("tool_choice", "required") != "required":
            asked["tool_choice"] = {"type": "function", "function": {"name": asked["tool_choice"]}}
        if schema := asked.pop("schema", None):
            asked["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            }
        if "logprobs" in asked:
            asked |= {"logprobs": True, "top_logprobs": asked["logprobs"]}
        return {"messages": turns, **renamed(asked, parallel="parallel_tool_calls")}

    def read(self, answer: Any) -> DialectAnswer:
        messages = [choice.message for choice in answer.choices]
        calls = [
            Call(c.id, c.function.name, c.function.arguments) for m in messages for c in m.tool_calls or []
        ]
        first, usage = answer.choices[0], answer.usage
        logprobs = [token.logprob for token in first.logprobs.content] if first.logprobs else None
        texts = [message.content or "" for message in messages]
        return DialectAnswer(
            texts,
            usage.prompt_tokens,
            usage.completion_tokens,
            first.finish_reason,
            calls,
            [first.message],
            logprobs,
        )

    def read_stream(self, events: list[Any]) -> DialectAnswer:
        text, pieces, end, calls = "", 0, None, {}
        for choice in (choice for event in events for choice in event.choices):
            text += choice.delta.content or ""
            pieces += bool(choice.delta.content or choice.delta.tool_calls)
            end = choice.finish_reason or end
            for piece in choice.delta.tool_calls or []:
                known = calls.get(piece.index) or Call(piece.id, piece.function.name, "")
                calls[piece.index] = Call(
                    known.id, known.name, known.arguments + (piece.function.arguments or "")
                )
        usage = events[-1].usage
        return DialectAnswer(
            [text], usage.prompt_tokens, usage.completion_tokens, end, [*calls.values()], pieces=pieces
        )

    def results(self, *results: tuple[Call, str]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in results]

    def allowed_tools(self, name: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}


class Completions(Dialect):
    name = "completions"

    def method(self, client: Any) -> Any:
        return client.completions.create

    def request(self, turns: list[Any], **asked: Any) -> dict[str, Any]:
        return {"prompt": turns[0]["content"], **asked}

    def read(self, answer: Any) -> DialectAnswer:
        first, usage = answer.choices[0], answer.usage
        logprobs = first.logprobs.token_logprobs if first.logprobs else None
        texts = [choice.text for choice in answer.choices]
        return DialectAnswer(
            texts, usage.prompt_tokens, usage.completion_tokens, first.finish_reason, logprobs=logprobs
        )

    def read_stream(self, events: list[Any]) -> DialectAnswer:
        choices = [choice for event in events for choice in event.choices]
        text, usage = "".join(choice.text for choice in choices), events[-1].usage
        end, pieces = choices[-1].finish_reason, sum(bool(choice.text) for choice in choices)
        return DialectAnswer([text], usage.prompt_tokens, usage.completion_tokens, end, pieces=pieces)


class Responses(Dialect):
    name = "responses"
    tool_schema = "tools[{}].parameters: "
    hints: ClassVar[dict[str, Any]] = {
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
    }
    truncated = "max_output_tokens"
    streaming: ClassVar[dict[str, Any]] = {"stream": True}

    def method(self, client: Any) -> Any:
        return client.responses.create

    def request(self, turns: list[Any], **asked: Any) -> dict[str, Any]:
        if image := asked.pop("image", None):
            turns = [
                {"role": "user", "content": [{"type": "input_image", "image_url": image, "detail": "auto"}]}
            ]
        if tools := asked.pop("tools", None):
            asked["tools"] = [{"type": "function", "strict": True, **tool} for tool in tools]
        if asked.get("tool_choice", "required") != "required":
            asked["tool_choice"] = {"type": "function", "name": asked["tool_choice"]}
        if schema := asked.pop("schema", None):
            asked["text"] = {
                "format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
            }
        names = {
            "max_tokens": "max_output_tokens",
            "parallel": "parallel_tool_calls",
            "system": "instructions",
        }
        return {"input": turns, **renamed(asked, **names, previous="previous_response_id")}

    def read(self, answer: Any) -> DialectAnswer:
        calls = [
            Call(item.call_id, item.name, item.arguments)
            for item in answer.output
            if item.type == "function_call"
        ]
        end = answer.incomplete_details.reason if answer.status == "incomplete" else answer.status
        texts, usage = [answer.output_text], answer.usage
        return DialectAnswer(
            texts, usage.input_tokens, usage.output_tokens, end, calls, answer.output, id=answer.id
        )

    def read_stream(self, events: list[Any]) -> DialectAnswer:
        assert [event.sequence_number for event in events] == list(range(len(events)))
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        arguments = [
            event.delta for event in events if event.type == "response.function_call_arguments.delta"
        ]
        answer = self.read(events[-1].response)
        assert (answer.text, "".join(call.arguments for call in answer.calls)) == (
            "".join(texts),
            "".join(arguments),
        )
        answer.pieces = len(texts) + len(arguments)
        return answer

    def results(self, *results: tuple[Call, str]) -> list[Any]:
        return [
            {"type": "function_call_output", "call_id": call.id, "output": result} for call, result in results
        ]

    def allowed_tools(self, name: str) -> dict[str, Any]:
        tools = [{"type": "function", "name": name}]
        return {"type": "allowed_tools", "mode": "required", "tools": tools}


class Messages(Dialect):
    name = "messages"
    tool_schema = "tools[{}].input_schema: "
    hints: ClassVar[dict[str, Any]] = {
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        "output_config": {"effort": "low"},
    }
    truncated = "max_tokens"
    streaming: ClassVar[dict[str, Any]] = {"stream": True}
    sync_client: Any = anthropic.Anthropic
    async_client: Any = anthropic.AsyncAnthropic

    def base(self, url: str) -> str:
        return url

    def method(self, client: Any) -> Any:
        return client.messages.create

    def request(self, turns: list[Any], **asked: Any) -> dict[str, Any]:
        if image := asked.pop("image", None):
            source = {"type": "base64", "media_type": "image/png", "data": image.partition(",")[2]}
            turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        if tools := asked.pop("tools", None):
            asked["tools"] = [renamed(tool, parameters="input_schema") for tool in tools]
        if choice := asked.pop("tool_choice", None):
            asked["tool_choice"] = (
                {"type": "any"} if choice == "required" else {"type": "tool", "name": choice}
            )
            asked["tool_choice"]["disable_parallel_tool_use"] = not asked.pop("parallel", True)
        if schema := asked.pop("schema", None):
            asked["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        if "temperature" in asked:  # the SDK no longer has this argument
            asked["extra_body"] = {"temperature": asked.pop("temperature"), **asked.get("extra_body", {})}
        return {"messages": turns, "max_tokens": 16, **renamed(asked, stop="stop_sequences")}

    def read(self, answer: Any) -> DialectAnswer:
        calls = [
            Call(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"
        ]
        text = "".join(block.text for block in answer.content if block.type == "text")
        turn = [{"role": "assistant", "content": answer.content}]
        return DialectAnswer(
            [text], answer.usage.input_tokens, answer.usage.output_tokens, answer.stop_reason, calls, turn
        )

    def read_stream(self, events: list[Any]) -> DialectAnswer:
        text, arguments, blocks, pieces = "", {}, {}, 0
        for event in events:
            if event.type == "content_block_start" and event.content_block.type == "tool_use":
                blocks[event.index], arguments[event.index] = event.content_block, ""
            elif event.type == "content_block_delta":
                pieces += 1
                if event.delta.type == "text_delta":
                    text += event.delta.text
                else:
                    arguments[event.index] += event.delta.partial_json
        (start,) = [event.message for event in events if event.type == "message_start"]
        (end,) = [event for event in events if event.type == "message_delta"]
        calls = [Call(block.id, block.name, arguments[index]) for index, block in blocks.items()]
        return DialectAnswer(
            [text],
            end.usage.input_tokens,
            end.usage.output_tokens,
            end.delta.stop_reason,
            calls,
            pieces=pieces,
            announced=start.usage.input_tokens,
        )

    def results(self, *results: tuple[Call, str]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result} for call, result in results
        ]
        return [{"role": "user", "content": blocks}]


DIALECTS: dict[str, type[Dialect]] = {
    dialect.name: dialect for dialect in (Chat, Completions, Responses, Messages)
}
