"""Transcripts of rollouts, and reading of a run's store."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_runner import CliRunner
from unit_helpers import make_finished, make_generation, make_key, make_rollout

import raylight as rl
from raylight import semconv
from raylight.cli import app
from raylight.errors import ConfigError, UnknownIdError
from raylight.experience.trajectories.transcript import transcript_json
from raylight.types import TRAINABLE_AGENTS, Failure, FinishedRollout, HistoryNote, Span, TraceStatus

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two\nlines"}]
TOOL_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
}


def span(number: int, name: str, attributes: dict[str, Any], **fields: Any) -> Span:
    return Span.from_attributes(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=number,
        name=name,
        attributes=attributes,
        start_time=1.0,
        end_time=1.5,
        **fields,
    )


def call(number: int, asked: list[Any], answered: Any, agent: str | None, call_id: str = "") -> Span:
    attributes = {
        semconv.DIALECT: "chat",
        semconv.INPUT_MESSAGES: json.dumps(asked),
        semconv.OUTPUT_MESSAGES: json.dumps([answered]),
        semconv.CALL_ID: call_id,
        semconv.PROMPT_SOURCE: "rendered",
        semconv.RESPONSE_ID: f"chatcmpl-{number}",
    }
    return span(number, semconv.CHAT_SPAN, attributes | ({semconv.AGENT_NAME: agent} if agent else {}))


def two_calls() -> FinishedRollout:
    again = [*ASKED, TOOL_CALL, {"role": "tool", "content": "3"}]
    operation = {
        semconv.OPERATION_NAME: "add",
        f"{semconv.OPERATION_INPUT}.a": 1,
        semconv.OPERATION_OUTPUT: 3,
        "long": "x" * 1000,
    }
    spans = [
        call(1, ASKED, TOOL_CALL, "solver", "c1"),
        span(2, semconv.OPERATION, operation),
        call(3, [{"role": "user", "content": "hello"}], {"role": "assistant", "content": "bye"}, "other"),
        call(4, again, {"role": "assistant", "content": "3"}, "solver", "c2"),
        span(
            5, "custom", {"list": json.dumps([{"key": "x" * 200}])}, status=TraceStatus(status_code="ERROR")
        ),
        span(6, semconv.ANNOTATION, semconv.reward_attributes({"primary": 0.5, "style": 1.0})),
    ]
    generations = [
        make_generation([1, 2], [3], key=make_key("ro-1", call_id="c1")),
        replace(
            make_generation([1, 9], [2, 3], key=make_key("ro-1", call_id="c2")),
            history=HistoryNote("answer_edited", "the text was edited", 2, 0, "x", "y"),
        ),
    ]
    rollout = make_rollout(
        task={"question": "1+2"}, status="succeeded", mode="train", metadata={TRAINABLE_AGENTS: ["solver"]}
    )
    return FinishedRollout(rollout, 0.5, generations, spans, {"primary": 0.5, "style": 1.0})


def test_a_rollout_is_told_in_its_order() -> None:
    assert rl.transcript(two_calls()).splitlines() == [
        "=== ro-1 (train): succeeded",
        'task: {"question": "1+2"}',
        "",
        "--- #1 openai.chat.completion of solver (0.500 s, 2 + 1 tokens, stop)",
        "    call 1, row 1",
        "    [system] Be brief.",
        "    [user] two",
        "    lines",
        "    >>> [assistant]",
        '          calls add({"a": 1})',
        "",
        "--- #2 add (0.500 s)",
        "    input.a: 1",
        "    output: 3",
        "",
        "--- #3 openai.chat.completion of other (0.500 s, tokens unknown, not trained)",
        "    [user] hello",
        "    >>> [assistant] bye",
        "",
        "--- #4 openai.chat.completion of solver (0.500 s, 2 + 2 tokens, stop)",
        "    call 2, row 2: drift_answer_edited (after call 1, tokens differ from token 1 on)",
        "      the text was edited",
        "      message 2, character 0: was 'x', sent 'y'",
        "      prompt (rendered): 1 from the prompt of call 1, 1 new",
        "    (3 messages as before)",
        "    [tool] 3",
        "    >>> [assistant] 3",
        "",
        "--- #5 custom (0.500 s, ERROR)",
        "    list: [",
        "      {",
        f'        "key": "{"x" * 200}"',
        "      }",
        "    ]",
        "",
        "--- #6 agentlightning.annotation (0.500 s)",
        "    primary: 0.5",
        "    style: 1",
        "",
        "reward: primary 0.5, style 1",
    ]


def test_calls_of_several_models_are_told_in_order() -> None:
    """Each model has a recorder, so that spans reach the store in any order."""
    told = two_calls()
    spans = [
        span.model_copy(update={"start_time": float(number), "end_time": number + 0.5})
        for number, span in enumerate(told.spans)
    ]
    late = dataclasses.replace(told, spans=[spans[0], *spans[2:4], spans[1], *spans[4:]])
    titles = [line for line in rl.transcript(late).splitlines() if line.startswith("---")]
    assert [title.split()[1] for title in titles] == ["#1", "#2", "#3", "#4", "#5", "#6"]


def test_dropped_spans_and_lost_rewards_are_told() -> None:
    finished = two_calls()
    finished.rollout.attempt.metadata = {"spans_dropped": 900, "rewards_lost": 1}
    text = rl.transcript(finished)
    assert "\nspans dropped: 900\n" in text
    assert "\nrewards lost: 1\n" in text
    assert transcript_json(finished)["losses"] == {"spans_dropped": 900, "rewards_lost": 1}


def test_json_has_the_calls_with_their_lineage() -> None:
    made = transcript_json(two_calls())
    assert json.loads(json.dumps(made)) == made
    assert {key: made[key] for key in ("rollout", "status", "rows", "rewards", "failure")} == {
        "rollout": "ro-1",
        "status": "succeeded",
        "rows": 2,
        "rewards": {"primary": 0.5, "style": 1.0},
        "failure": None,
    }
    first, second = made["calls"]
    assert (first["kind"], first["segments"]) == ("start", [{"origin": "new", "call": None, "tokens": 2}])
    assert second["place"] == "message 2, character 0: was 'x', sent 'y'"
    assert (second["call"], second["prompt_source"], second["output_tokens"]) == ("c2", "rendered", 2)
    assert second["messages"][:2] == ASKED
    assert "prompt_ids" not in second
    assert transcript_json(two_calls(), full=True)["calls"][1]["prompt_ids"] == [1, 9]
    made = transcript_json(FinishedRollout(make_rollout(task={1, 2}), None, []))
    assert made["task"] == "{1, 2}"


def test_full_shows_every_attribute_whole() -> None:
    shown = rl.transcript(two_calls(), full=True)
    assert "x" * 1000 in shown
    assert f"    {semconv.RESPONSE_ID}: chatcmpl-4" in shown


def test_a_conversation_that_another_replaces_is_shown_whole() -> None:
    finished = two_calls()
    finished.spans[3] = call(4, ASKED[1:], {"role": "assistant", "content": "3"}, "solver", "c2")
    assert rl.transcript(finished).count("[user] two") == 2


def test_a_conversation_of_the_same_shape_with_other_words_is_shown_whole() -> None:
    finished = two_calls()
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "another"}, TOOL_CALL]
    finished.spans[3] = call(
        4, [*other, {"role": "tool", "content": "3"}], {"role": "assistant", "content": "3"}, "solver", "c2"
    )
    shown = rl.transcript(finished)
    assert "[user] another" in shown
    assert "as before" not in shown


def test_a_failure_is_told_with_its_trace() -> None:
    finished = make_finished(
        failure=Failure(kind="agent", error="ValueError: bad", trace="Traceback\n  line 3\n")
    )
    assert rl.transcript(finished).splitlines()[-5:] == [
        "agent failed: ValueError: bad",
        "Traceback",
        "  line 3",
        "",
        "reward: none",
    ]


async def fill(folder: Path) -> list[str]:
    """A store with a rollout that succeeded and one that was cancelled."""
    service = rl.StoreService(folder / "store.db")
    try:
        store = rl.StoreClient(service)
        first = await store.start_rollout({"n": 1}, mode="train")
        await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="succeeded")
        second = await store.enqueue_rollout({"n": 2})
        await store.update_rollout(second.rollout_id, status="cancelled")
        return [first.rollout_id, second.rollout_id]
    finally:
        await service.close()


async def test_a_runs_folder_is_read_and_printed(tmp_path: Path) -> None:
    first, second = await fill(tmp_path)
    for path in (tmp_path, tmp_path / "store.db"):
        assert [item.rollout.rollout_id for item in rl.read_rollouts(path)] == [first, second]
    assert [item.rollout.rollout_id for item in rl.read_rollouts(tmp_path, last=1)] == [second]
    assert [item.rollout.rollout_id for item in rl.read_rollouts(tmp_path, last=9)] == [first, second]
    assert rl.read_rollouts(tmp_path, last=0) == []
    assert [item.rollout.rollout_id for item in rl.read_rollouts(tmp_path, failed=True)] == [second]
    assert rl.read_rollouts(tmp_path, rollout_ids=[first], failed=True, last=1) == []
    by_id = rl.read_rollouts(tmp_path, rollout_ids=[second, first], last=1)
    assert [item.rollout.rollout_id for item in by_id] == [second]
    assert rl.read_rollouts(tmp_path, rollout_ids=[]) == []
    assert [item.rollout.input for item in rl.read_rollouts(tmp_path, rollout_ids=[first])] == [{"n": 1}]
    with pytest.raises(UnknownIdError, match="no rollout ro-missing"):
        rl.read_rollouts(tmp_path, rollout_ids=["ro-missing"])
    with pytest.raises(ConfigError, match=r"there is no store at .*; give a run directory"):
        rl.read_rollouts(tmp_path / "nothing")

    def shown(*arguments: str) -> str:
        return CliRunner().invoke(app, ["trace", str(tmp_path), *arguments]).output

    assert f"=== {second}" in shown()
    assert first not in shown()
    assert f"=== {first} (train): succeeded" in shown("--rollout", first)
    assert shown("--last", "2").count("===") == 2
    assert "no rollout matches" in shown("--rollout", first, "--failed")
    lines = shown("--last", "2", "--json").splitlines()
    assert [json.loads(line)["rollout"] for line in lines] == [first, second]
    assert shown("--rollout", first, "--failed", "--json") == ""
