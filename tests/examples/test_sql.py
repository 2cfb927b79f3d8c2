"""SQL example: the execution match, queries that fail, and three steps."""

import json
from pathlib import Path
from typing import Any

import pytest
from example_modules import example_module, train_three_steps
from math_helpers import ScriptedModel

import raylight as rl

pytestmark = pytest.mark.framework("langgraph", "langchain_openai")
TASK = {"question": "?", "query": "SELECT MAX(price) FROM goods WHERE kind = 'b'", "seed": 3}
OTHER_WORDS = "SELECT price FROM goods WHERE kind='b' ORDER BY price DESC LIMIT 1"

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "query", "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


def query(sql: str) -> dict[str, Any]:
    return call(json.dumps({"sql": sql}))


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([query(TASK["query"])], 1),
        ([query(OTHER_WORDS)], 1),
        ([query("SELECT MIN(price) FROM goods")], 0),
        ([query("SELECT cost FROM goods"), query(OTHER_WORDS)], 1),  # the second answer reads the error
        ([query("nonsense")] * 3, 0),
        ([query("DELETE FROM goods"), {"content": "I give up."}], 0),
        ([query("ATTACH 'file.db' AS other"), query(OTHER_WORDS)], 1),
        ([query(ENDLESS), query(OTHER_WORDS)], 1),
        ([{"content": "90"}], 0),
        ([call("[1]")], 0),
        ([call("{}"), query(OTHER_WORDS)], 1),
        ([call("{}")] * 4, 0),
        ([query("SELECT hex(zeroblob(20000000))"), query(OTHER_WORDS)], 1),
    ],
)
async def test_the_last_result_counts(answers: list[dict[str, Any]], reward: float) -> None:
    left = iter(answers)
    with ScriptedModel(lambda messages, tools: next(left)) as model:
        llm = rl.LLM(endpoint=model.url, model="scripted")
        assert await example_module("sql", "agent").ask_database(TASK, llm) == reward
    assert next(left, None) is None
    if len(answers) > 1 and answers[0].get("tool_calls"):
        assert "rror" in model.requests[1]["messages"][-1]["content"]


def test_every_task_has_an_answer_and_its_own_database() -> None:
    database = example_module("sql", "database")
    tasks = database.make_tasks(50, 0)
    assert tasks == database.make_tasks(50, 0) != database.make_tasks(50, 1)
    answers = [database.run_query(database.make_database(task["seed"]), task["query"]) for task in tasks]
    assert sum(answer != [(None,)] for answer in answers) > 40
    assert len(set(map(str, answers))) > 25


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_train_on_queries(tmp_path: Path) -> None:
    train_three_steps("sql", tmp_path)
