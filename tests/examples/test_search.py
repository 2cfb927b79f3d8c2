"""Search example: the ranking, the reward of an answer, and three steps."""

from pathlib import Path
from typing import Any

import pytest
from example_modules import example_module, train_three_steps
from math_helpers import ScriptedModel

import raylight as rl


def test_the_ranking_is_that_of_bm25() -> None:
    corpus = example_module("search", "corpus")
    index = corpus.BM25(["Ann eats bread", "Ann lives in Rome", "Bob eats fish and bread and fish", "Bob"])
    assert index.search("Ann eats") == ["Ann eats bread"]
    assert index.search("fish BREAD", 9) == ["Bob eats fish and bread and fish", "Ann eats bread"]
    assert index.search("bob", 9) == ["Bob", "Bob eats fish and bread and fish"]  # the shorter first
    assert index.search("Carl?") == index.search("") == []
    facts = corpus.make_facts()
    assert len({fact.text for fact in facts}) == len(facts) == 800
    index = corpus.BM25([fact.text for fact in facts])
    assert all(index.search(f"{fact.name} {fact.verb}") == [fact.text] for fact in facts)


def call(arguments: str, name: str = "search") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


@pytest.mark.framework("agents")
@pytest.mark.parametrize(
    ("arguments", "tool", "answer", "reward", "found"),
    [
        ('{"query": "NAME VERB"}', "search", "VALUE", 1, "NAME VERB VALUE"),
        ('{"query": "who is NAME, who VERB?"}', "search", " VALUE.", 1, "NAME VERB VALUE"),
        ('{"query": "NAME VERB"}', "search", "It is VALUE", 0, "NAME VERB VALUE"),
        ('{"query": "qqq"}', "search", "zzz", 0, "nothing"),
        ("{}", "search", "zzz", 0, "rror"),
        ('{"query": "NAME"}', "find", "VALUE", 0, None),  # a tool that does not exist
    ],
)
async def test_a_right_answer_counts(
    arguments: str, tool: str, answer: str, reward: float, found: str | None
) -> None:
    fact = example_module("search", "corpus").make_facts()[6]

    def filled(text: str) -> str:
        return text.replace("NAME", fact.name).replace("VERB", fact.verb).replace("VALUE", fact.value)

    def script(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            return {"content": filled(answer)}
        return call(filled(arguments), tool)

    with ScriptedModel(script) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        task = {"question": fact.question, "answer": fact.value}
        assert await example_module("search", "agent").look_up(task, llm) == reward
    assert len(model.requests) == (1 if found is None else 2)
    if found is not None:
        assert filled(found) in model.requests[-1]["messages"][-1]["content"]


@pytest.mark.slow
@pytest.mark.framework("agents")
@pytest.mark.timeout(1800)
def test_three_steps_train_on_searches(tmp_path: Path) -> None:
    train_three_steps("search", tmp_path)
