"""Unmodified agents of Anthropic's API, through the gateway with the transformers engine and a store."""

from typing import Any

import anthropic
import pytest
from conversation_table import assert_one_row, open_table
from template_helpers import user
from transformers_helpers import MakeEngine, script

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 46, "b": 87}}\n</tool_call>'
THOUGHT = "<think>\nI need the tool.\n</think>\n\n"


@anthropic.beta_async_tool
async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one
        b: other
    """
    return str(a + b)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_goes_on_without_a_thread(make_engine: MakeEngine, stream: bool) -> None:
    async with open_table(make_engine, "tools") as table:
        script(table.engine, CALL)
        runner = table.anthropic.beta.messages.tool_runner(
            model="policy", max_tokens=200, messages=[user("46+87?")], tools=[add], stream=stream
        )
        answers = []
        async for turn in runner:
            answers.append(await turn.get_final_message() if stream else turn)
            script(table.engine, "It is 133.")
        calls = await table.recorded()
        shown = table.engine.tokenizer.decode(calls[1].prompt_ids.tolist())
    assert [[block.type for block in answer.content] for answer in answers] == [["tool_use"], ["text"]]
    assert_one_row(calls, "continued")
    assert shown.index("46+87?") < shown.index(CALL) < shown.index("<tool_response>\n133\n</tool_response>")


async def test_a_thread_without_a_fallback_is_refused(make_engine: MakeEngine) -> None:
    async with open_table(make_engine, "tools") as table:
        with pytest.raises(anthropic.BadRequestError, match="send all messages") as refused:
            await table.anthropic.beta.messages.create(
                model="policy", max_tokens=9, messages=[user("hi")], thread={"type": "create"}
            )
        body: Any = refused.value.body
        assert await table.recorded() == []
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert body["error"]["details"] == details
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_that_comes_back_continues_the_conversation(
    make_engine: MakeEngine, stream: bool
) -> None:
    async with open_table(make_engine, "thinking") as table:
        messages: list[Any] = []
        for text in (f"{THOUGHT}four", f"{THOUGHT}five", "six"):
            script(table.engine, text)
            messages.append(user(f"next after {len(messages)}?"))
            asked = {"model": "policy", "max_tokens": 200, "messages": messages}
            if stream:
                async with table.anthropic.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await table.anthropic.messages.create(**asked)
            messages.append({"role": "assistant", "content": answer.content})
        calls = await table.recorded()
    assert_one_row(calls, "continued", "continued")


@pytest.mark.framework("pydantic_ai")
@pytest.mark.parametrize("stream", [False, True])
async def test_pydantic_ai_keeps_one_row(make_engine: MakeEngine, stream: bool) -> None:
    from pydantic_ai import Agent, ThinkingPart
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    async with open_table(make_engine, "thinking") as table:
        provider = AnthropicProvider(anthropic_client=table.anthropic)
        agent: Any = Agent(AnthropicModel("policy", provider=provider), model_settings={"max_tokens": 300})

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            script(table.engine, f"{THOUGHT}It is 133.")
            return a + b

        history: list[Any] = []
        for _ in range(2):
            script(table.engine, f"{THOUGHT}{CALL}")
            if stream:
                async with agent.run_stream("46+87?", message_history=history) as result:
                    output = await result.get_output()
            else:
                result = await agent.run("46+87?", message_history=history)
                output = result.output
            history = result.all_messages()
            assert output == "It is 133."
        thoughts = [part for message in history for part in message.parts if isinstance(part, ThinkingPart)]
        calls = await table.recorded()
    assert [part.content for part in thoughts] == ["I need the tool."] * 4
    assert all(part.signature for part in thoughts)
    assert_one_row(calls, *["continued"] * 3)
