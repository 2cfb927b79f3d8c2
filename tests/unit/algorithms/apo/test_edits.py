"""Parsing of a model's answer, and the requests to the models."""

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.edits import RejectedEdit, extract_prompt, parse_rewrite
from raylight.algorithms.apo.prompts import CRITIQUES, EDITS, critique_messages, edit_messages
from raylight.algorithms.apo.trials import MAX_TRANSCRIPT_CHARACTERS, Evaluation, Trial, describe_trials


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ("Sum {a}.", "Sum {a}."),
        ("Here it is:\n<prompt>\nSum {a}.\n</prompt>\nGood luck!", "Sum {a}."),
        ("First <prompt>draft</prompt>, then <prompt>Sum {a}.</prompt>", "Sum {a}."),
        ("```\nSum {a}.\n```", "Sum {a}."),
        ("<prompt>```text\nSum\n{a}.\n```</prompt>", "Sum\n{a}."),
        ("<prompt>left open {a}", "left open {a}"),
        ("It goes after <prompt>: <prompt>Sum {a}.</prompt>", "Sum {a}."),
        ("<think>a <prompt> then</think>\n<prompt>Sum {a}.</prompt>", "Sum {a}."),
    ],
)
def test_the_prompt_in_an_answer(answer: str, prompt: str) -> None:
    assert extract_prompt(answer) == prompt


@pytest.mark.parametrize(
    ("engine", "parent", "answer", "kind"),
    [
        ("f-string", "{a} {b}", "only {a}", "placeholders"),
        ("f-string", "{a}", "{a} and {b}", "placeholders"),
        ("f-string", "{a}", 'answer as {"x": {a}}', "malformed"),
        ("f-string", "{a}", "{a.__class__}", "malformed"),
        ("f-string", "{a}", "{a!z}", "malformed"),
        ("f-string", "{a}", "Solve {a: the question}", "malformed"),
        ("f-string", "{a}", "{a:>99999999999}", "malformed"),
        ("f-string", "{a:.2f}", "{a:.2f} and {a:d}", "malformed"),
        ("f-string", "{a}", "<prompt>\n</prompt>", "empty"),
        ("jinja", "{{ a }}", "{% if a %}", "malformed"),
        ("jinja", "{{ a }}", "none", "placeholders"),
    ],
)
def test_rewrites_that_agents_could_not_use(engine: Any, parent: str, answer: str, kind: str) -> None:
    with pytest.raises(RejectedEdit) as caught:
        parse_rewrite(PromptTemplate(template=parent, engine=engine), answer)
    assert caught.value.kind == kind
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.kind, again.text) == (str(caught.value), kind, caught.value.text)


def test_a_prompt_may_have_the_tags_itself() -> None:
    parent = PromptTemplate(template="Shorten <prompt>{a}</prompt>")
    text = "Read this, then shorten it: <prompt>{a}</prompt> No comments."
    for answer in (f"<prompt>{text}</prompt>", f"<think>in <prompt> tags</think><prompt>\n{text}\n</prompt>"):
        assert parse_rewrite(parent, answer).template == text
    plain = PromptTemplate(template="Shorten {a}")
    assert parse_rewrite(plain, "<prompt><prompt>Cut {a}</prompt></prompt>").template == "Cut {a}"


@pytest.mark.parametrize(
    ("parent", "text"),
    [
        ("Wrap it in <prompt> tags: {a}", "Wrap it all in <prompt> tags: {a}!"),
        ("End {a} with </prompt>.", "Always end with </prompt>: {a}"),
        ("Put <prompt> before {a}.", "Put it between <prompt> and </prompt>: {a}"),
    ],
)
def test_a_prompt_may_have_single_tags(parent: str, text: str) -> None:
    for answer in (f"<prompt>{text}</prompt>", f"Here it is:\n<prompt>\n{text}\n</prompt>\nGood luck!"):
        assert parse_rewrite(PromptTemplate(template=parent), answer).template == text
    unclosed = "Answer in <prompt> tags: {a}"
    for answer in (unclosed, f"<prompt>{unclosed}"):
        assert parse_rewrite(PromptTemplate(template=parent), answer).template == unclosed


def test_a_rewrite_keeps_the_engine() -> None:
    rewritten = parse_rewrite(
        PromptTemplate(template="{{ a }}", engine="jinja"), "{% if a > 1 %}{{ a }}{% endif %}"
    )
    assert rewritten.format(a=2) == "2"
    assert parse_rewrite(PromptTemplate(template="{a}"), 'as {{"x": {a}}}').format(a=2) == 'as {"x": 2}'
    formatted = PromptTemplate(template="{a:.2f} {b!r}")
    assert parse_rewrite(formatted, "{a:.2f}, or {a}: {b!r}").format(a=0.5, b="x") == "0.50, or 0.5: 'x'"


@settings(deadline=None)
@given(st.text(max_size=60), st.integers(0, 10**6))
def test_whatever_a_prompt_and_a_transcript_say_is_quoted_as_it_is(text: str, variant: int) -> None:
    template = PromptTemplate(template="{{% raw %}}", engine="f-string")
    asked = critique_messages(template, text, variant)[1]["content"]
    assert f"<attempts>\n{text}\n</attempts>" in asked
    assert template.template in asked
    assert f"<critique>\n{text}\n</critique>" in edit_messages(template, text, variant)[1]["content"]


def test_there_are_several_ways_to_ask() -> None:
    template = PromptTemplate(template="{q}")
    assert len({str(critique_messages(template, "x", i)) for i in range(10)}) == len(CRITIQUES) == 3
    assert len({str(edit_messages(template, "x", i)) for i in range(10)}) == len(EDITS) == 3


def test_the_editor_is_told_what_to_keep() -> None:
    asked = edit_messages(PromptTemplate(template="{b} {a}"), "be short", 0)[1]["content"]
    assert "{a}, {b}" in asked
    assert "doubled" in asked
    assert (
        "{a:.2f}, {b!r}. Add"
        in edit_messages(PromptTemplate(template="{b!r} {a:.2f}"), "be short", 0)[1]["content"]
    )
    jinja = edit_messages(PromptTemplate(template="{{ q }}", engine="jinja"), "x", 0)[1]["content"]
    assert "{{ q }}." in jinja
    assert "Jinja" in jinja
    assert "no placeholders" in edit_messages(PromptTemplate(template="plain"), "x", 0)[1]["content"]


def test_the_transcript_for_the_critic() -> None:
    first = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "calc"}]},
    ]
    second = [*first, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4"}]
    text = describe_trials(
        [
            Trial(
                {"a": 2},
                "succeeded",
                0.5,
                [{"messages": first, "tools": None}, {"messages": second, "tools": None}],
            ),
            Trial("x", "failed", None, notes=["- search: q='x'"], error="ValueError: odd"),
            Trial(
                "y",
                "succeeded",
                1.0,
                [{"messages": [{"role": "user", "content": "z" * 20_000}], "tools": None}],
            ),
        ]
    )
    assert text.count("[user] 2+2") == 1, "a conversation that goes on is shown once"
    assert "[assistant] (calls [{" in text
    assert "It is 4" in text
    assert "Reward: 0.5" in text
    assert "Reward: none" in text
    assert "Error: ValueError: odd\nTranscript:\n- search: q='x'" in text
    assert "characters left out" in text
    assert len(text) < MAX_TRANSCRIPT_CHARACTERS + 1000


def test_the_score_of_an_evaluation() -> None:
    outcomes = [("succeeded", 1.0), ("failed", 1.0), ("timed out", None), ("succeeded", None), ("lost", None)]
    evaluation = Evaluation([Trial(task, outcome, reward) for task, (outcome, reward) in enumerate(outcomes)])  # type: ignore[arg-type]
    assert evaluation.score(0.0) == 0.25
    assert evaluation.score(-2.0) == (1.0 - 2.0 * 3) / 4
    assert evaluation.failed_fraction == 3 / 4
    assert evaluation.problems() == "1 failed, 1 timed out, 1 lost, 1 without a reward"
    assert Evaluation([Trial(0, "succeeded", 1.0)]).problems() == ""
