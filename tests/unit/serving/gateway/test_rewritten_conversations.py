"""Agents that rewrite their history, through the whole gateway with the transformers engine and a store."""

import json

import pytest
from conversation_table import Messages, assert_one_row, open_table
from template_helpers import ADD, call_of, result, says, user
from transformers_helpers import MakeEngine

from raylight.config import EngineConfig
from raylight.experience.trajectories.call_relations import report_relations
from raylight.experience.trajectories.trajectory import build_trajectories

STOP = "</code>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":1.0,  "b":2}}\n</tool_call>'


async def test_a_conversation_is_stored_once(make_engine: MakeEngine) -> None:
    async with open_table(make_engine, "chatml") as table:
        messages: Messages = []
        for turn in range(6):
            messages.append(user(f"question {turn} " + "x" * 60))
            answer = await table.ask(messages, f"answer {turn} " + "y" * 40)
            messages.append({"role": "assistant", "content": answer.content})
        calls = await table.recorded()
        assert_one_row(calls, *["continued"] * 5)
        tokens = len(calls[-1].token_ids) + sum(len(call.output_ids) for call in calls)  # and log-probs
        assert sum(len(call.token_ids) for call in calls) > 2 * tokens
        of_calls, of_spans = table.stored_bytes()
        assert of_calls < 4 * tokens + 6 * 300
        assert of_spans < 2 * len(json.dumps(messages)) + 6 * 900


async def test_a_stop_word_that_the_agent_appends(make_engine: MakeEngine) -> None:
    async with open_table(make_engine, "chatml") as table:
        messages = [user("add")]
        for text in (f"x = 1\n{STOP}", f"print(x) {STOP}\n", "done"):
            answer = await table.ask(messages, text, stop=[STOP])
            assert STOP not in answer.content
            messages += [says(f"{answer.content}{STOP}\nCalling tools:\n[...]"), user("Observation: 1")]
        calls = await table.recorded()
        shown = table.engine.tokenizer.decode(calls[2].prompt_ids.tolist())
    assert_one_row(calls, "suffix", "suffix")
    assert f"x = 1\n{STOP}\nCalling tools:\n[...]<|im_end|>" in shown
    assert shown.count(STOP) == 2


async def test_other_white_space_and_merged_messages(make_engine: MakeEngine) -> None:
    async with open_table(make_engine, "chatml") as table:
        first = await table.ask([user("U1")], "if x:\n    y  ")
        spaced = [user("U1"), says(first.content.replace("\n    ", " ")), user("U2")]
        second = await table.ask(spaced, "Well.")
        merged = [*spaced, says(f"{second.content}\nNow I look."), user("U3")]
        await table.ask(merged, "Yes.")
        calls = await table.recorded()
        shown = table.engine.tokenizer.decode(calls[2].prompt_ids.tolist())
    assert_one_row(calls, "white_space", "white_space")
    assert "if x:\n    y  <|im_end|>" in shown
    assert "Well.<|im_end|>\n<|im_start|>assistant\nNow I look.<|im_end|>" in shown


async def test_calls_that_come_back_as_text_or_rewritten(make_engine: MakeEngine) -> None:
    async with open_table(make_engine, "tools") as table:
        answer = await table.ask([user("U1")], CALL, tools=[ADD])
        (call,) = answer.tool_calls
        arguments = json.dumps(dict(reversed(json.loads(call.function.arguments).items())), indent=1)
        rewritten = [user("U1"), says(None, call_of("add", arguments, "other id")), result("3", "other id")]
        await table.ask(rewritten, "It is 3.", tools=[ADD])
        as_text = [{"name": "add", "arguments": {"b": 2, "a": 1}}]
        flat = [user("U1"), says(f"Calling tools:\n{as_text}"), user("Observation:\n3")]
        await table.ask(flat, "It is three.", tools=[ADD])
        calls = await table.recorded()
        shown = table.engine.tokenizer.decode(calls[2].prompt_ids.tolist())
    made = build_trajectories(calls)
    assert made.relations == ["start", "extension", "fork"], "both continue the first call"
    assert [call.history.kind for call in calls if call.history] == ["new", "continued", "calls_as_text"]
    assert calls[2].prompt_ids.tolist()[: len(calls[0].prompt_ids)] == calls[0].prompt_ids.tolist()
    assert f"{CALL}<|im_end|>\n<|im_start|>user\nObservation:\n3<|im_end|>" in shown


@pytest.mark.parametrize("tolerant", [True, False])
async def test_a_drift_is_recorded_with_its_place(make_engine: MakeEngine, tolerant: bool) -> None:
    async with open_table(make_engine, "chatml", config=EngineConfig(tolerate_rewrites=tolerant)) as table:
        await table.ask([user("U1")], "It is  3.")
        await table.ask([user("U1"), says("It is 3."), user("U2")], "Yes.")
        await table.ask([user("U1"), says("It is 4."), user("U2")], "No.")
        calls = await table.recorded()
    report = report_relations([build_trajectories(calls)])
    first = {"extensions": 1, "extensions_white_space": 1, "drifts": 1} if tolerant else {"drifts": 2}
    assert report.counts == {**first, "drifts_answer_edited": first["drifts"]}
    drift = report.drifts["answer_edited"]
    if tolerant:
        assert drift.place == "message 1, character 6: was ' 3.', sent '4.'"
        assert (report.rows_per_rollout, report.max_rows) == (2.0, 2)
    else:
        assert drift.reason == "the white space of an earlier answer was edited"
