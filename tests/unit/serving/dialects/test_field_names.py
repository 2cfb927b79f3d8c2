"""Names of fields in errors, translated back to the agent's request."""

from typing import Any

import anthropic
import openai
import pytest
from app_clients import anthropic_client, openai_client
from dialect_helpers import FakeChat, Say, translated
from starlette.types import ASGIApp
from template_helpers import user

from raylight.http.errors import RequestError
from raylight.serving.dialects.dialect import FieldNames

NAMES = FieldNames(
    {
        "max_completion_tokens": "max_tokens",
        "stop": "stops",
        "tools[].function": "tools[]",
        "tools[].function.a": "tools[].b",
    },
    lambda: [{"": "system"}, {"": "messages[0]", "content[1]": "messages[0].content[3]"}],
)


@pytest.mark.parametrize(
    ("chat", "agent"),
    [
        ("temperature", "temperature"),
        ("max_completion_tokens", "max_tokens"),
        ("max_completion_tokens_too", "max_completion_tokens_too"),
        ("tools[12].function.a.type", "tools[12].b.type"),
        ("tools[0].function.name", "tools[0].name"),
        ("tools[0]", "tools[0]"),
        ("messages[0].content", "system.content"),
        ("messages[1]", "messages[0]"),
        ("messages[1].content[0].type", "messages[0].content[0].type"),
        ("messages[1].content[1].type", "messages[0].content[3].type"),
        ("messages[1].content[10]", "messages[0].content[10]"),
        ("messages[7].content", "messages[7].content"),
    ],
)
def test_paths(chat: str, agent: str) -> None:
    assert NAMES.of(chat) == agent


def test_only_names_of_fields_are_renamed_in_a_message() -> None:
    message = "stop: at most 4; max_completion_tokens=9 is too large. To stop, see 'tools[0].function.name'"
    renamed = NAMES.rename(RequestError(message, 413, "request_too_large"))
    assert renamed.message == message.replace("stop:", "stops:").replace(
        "max_completion_tokens", "max_tokens"
    )
    assert (renamed.status, renamed.kind) == (413, "request_too_large")
    assert NAMES.rename(RequestError("max_completion_tokens: it is negative")).param == "max_tokens"


WRONG = {"type": "strng"}
WRONG_FORMAT = {"type": "json_schema", "schema": WRONG}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "strng"}}}}
PIXEL = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, PIXEL]}
HI = user("hi")


def rejecting(message: str | None) -> tuple[FakeChat, ASGIApp]:
    """Return an engine that answers with an error, and the dialects in front of it."""
    error = {"message": message, "type": "invalid_request_error"}
    return translated(Say(status=400, error={"error": error}))


@pytest.mark.parametrize(
    ("fields", "said", "expected"),
    [
        ({"tools": [TOOL]}, None, "tools[0].input_schema: the schema of tool 'f' is not a valid JSON schema"),
        ({"tools": [TOOL | {"name": "a b"}]}, None, "tools[0].name: 'a b' is not a name"),
        ({"output_config": {"format": WRONG_FORMAT}}, None, "output_config.format.schema: "),
        ({"extra_body": {"output_format": WRONG_FORMAT}}, None, "output_format.schema: "),
        ({"thinking": {"type": "enabled"}}, None, "thinking.budget_tokens: Field required"),
        ({"output_config": {"effort": "some"}}, None, "output_config.effort: "),
        (
            {"messages": [user([{"type": "text", "text": "x", "cache": 1}])]},
            None,
            "messages[0].content[0].cache: this field is not supported; to drop unknown fields, set "
            "engine={'ignore_fields': ['messages.content.cache']}",
        ),
        ({}, "max_completion_tokens: 9 is more than 8", "max_tokens: 9 is more"),
        ({}, "reasoning_effort: the model has no 'low'", "output_config.effort: the model has no 'low'"),
        ({}, "chat_template_kwargs: wrong", "thinking: wrong"),
        (
            {"system": "s", "messages": [HI, user([RESULT])]},
            "messages[3].content[0]: this model accepts text only",
            "messages[1].content[0].content[1]: this model accepts text only",
        ),
    ],
)
async def test_errors_of_messages_name_its_own_fields(
    fields: dict[str, Any], said: str | None, expected: str
) -> None:
    fake, app = rejecting(said)
    asked: Any = {"model": "policy", "max_tokens": 9, "messages": [HI], **fields}
    with pytest.raises(anthropic.BadRequestError) as caught:
        await anthropic_client(app).messages.create(**asked)
    assert expected in caught.value.message
    assert bool(fake.asked) == (said is not None)


FUNCTION = {"type": "function", "name": "f"}
IMAGE = {"type": "input_image", "image_url": "https://x/y.png"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "done"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"tools": [FUNCTION | {"name": "a b"}]}, None, "tools[0].name"),
        ({}, "messages: the chat template rejected them", "input"),
        ({"tools": [FUNCTION | {"parameters": WRONG}]}, None, "tools[0].parameters"),
        ({"text": {"format": WRONG_FORMAT | {"name": "x"}}}, None, "text.format.schema"),
        ({"input": [HI, OUTPUT, user([{"type": "input_file"}])]}, None, "input[2].content[0]"),
        ({"text": {"verbosity": 3}}, None, "text.verbosity"),
        ({"input": [HI, IMAGE]}, None, "input[1]"),
        ({}, "max_tokens: too large", "max_output_tokens"),
        ({}, "reasoning_effort: unknown", "reasoning.effort"),
        ({"instructions": "s"}, "messages[0].content: too long", "instructions.content"),
        ({"input": [HI, user([IMAGE])]}, "messages[1].content[0]: text only", "input[1].content[0]"),
        (
            {"input": [HI, CALL, OUTPUT]},
            "messages[1].tool_calls[0].function.arguments: no JSON",
            "input[1].arguments",
        ),
        ({"input": [HI, CALL, OUTPUT]}, "messages[2].content: too long", "input[2].output"),
    ],
)
async def test_errors_of_responses_name_its_own_fields(
    fields: dict[str, Any], said: str | None, param: str
) -> None:
    fake, app = rejecting(said)
    asked: Any = {"model": "policy", "input": "hi", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client(app).responses.create(**asked)
    assert (caught.value.param, f"{param}: " in caught.value.message) == (param, True)
    assert bool(fake.asked) == (said is not None)


async def test_errors_of_chat_name_its_own_fields() -> None:
    _, app = translated()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"required": 1}}}
    asked: Any = {"model": "policy", "messages": [HI], "tools": [tool]}
    with pytest.raises(openai.BadRequestError, match=r"parameters: .*at required") as caught:
        await openai_client(app).chat.completions.create(**asked)
    assert caught.value.param == "tools[0].function.parameters"
