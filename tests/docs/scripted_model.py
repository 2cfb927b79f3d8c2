"""OpenAI-compatible mock model that adds two numbers, with a tool if the request offers one."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scripted_models import completion, serve_chat
from starlette.requests import Request
from starlette.responses import JSONResponse


def reply(body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request.

    The model asks the first tool for the sum of two numbers, written as 12+30=, and answers with the tool's
    result: as text, as the arguments of the last tool if a tool must be called, or in the form that the
    request or its system prompt demands. A single number is repeated.

    Raises:
        ValueError: the conversation contains neither a sum nor a number.
    """
    messages, tools = body["messages"], [tool["function"] for tool in body.get("tools", [])]
    texts = [text_of(message) for message in messages]
    questions = re.findall(r"(\d+)\+(\d+)=", "\n".join(texts))
    if not questions:  # the answer of another agent
        return answer(re.findall(r"\d+", texts[-1])[0])
    a, b = map(int, questions[-1])
    values = {"a": a, "b": b}
    observed = messages[-1]["role"] == "tool" or re.search(r"Observation:|observation_0", texts[-1])
    if tools and not observed:
        return call(tools[0], values, a + b)
    if tools and body.get("tool_choice", "auto") != "auto":
        return call(tools[-1], values, a + b)
    if "json_schema" in body.get("response_format", {}):
        schema = body["response_format"]["json_schema"]["schema"]
        return answer(json.dumps(fill(schema, values, a + b)))
    if "<code>" in texts[0]:  # smolagents
        return answer(f"The tool adds.\n<code>\nfinal_answer(add({a}, {b}))\n")
    if "[[ ## " in texts[0]:  # DSPy
        return answer(fields(texts[0], values, bool(observed)))
    return answer(str(a + b))


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def fill(schema: dict[str, Any], values: dict[str, int], total: int) -> dict[str, Any]:
    """Return arguments for a schema: the values by name, and the total for other names."""
    return {
        name: values.get(name, str(total) if field.get("type") == "string" else total)
        for name, field in schema["properties"].items()
    }


def call(tool: dict[str, Any], values: dict[str, int], total: int) -> dict[str, Any]:
    function = {"name": tool["name"], "arguments": json.dumps(fill(tool["parameters"], values, total))}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def fields(instructions: str, values: dict[str, int], observed: bool) -> str:
    """Return the fields of an answer that DSPy's adapter asks for."""
    known = {
        "next_thought": "The tool adds.",
        "next_tool_name": "finish" if observed else "add",
        "next_tool_args": "{}" if observed else json.dumps(values),
    }
    if "next_tool_name" not in instructions:
        known = {"reasoning": "The tool has added.", "total": str(sum(values.values()))}
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in known.items())


@contextmanager
def scripted_model() -> Iterator[str]:
    """Serve the model on a free local port. Yield its base URL, which ends in `/v1`."""
    numbers = iter(range(1, 1_000_000))

    async def chat(request: Request) -> JSONResponse:
        body = await request.json()
        message = reply(body)
        return JSONResponse(completion(body["model"], message, id=f"chatcmpl-{next(numbers)}"))

    with serve_chat(chat) as url:
        yield url
