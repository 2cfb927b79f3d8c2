"""Code example: hidden tests in a sandbox, a second turn after a syntax error, and three steps."""

import itertools
from pathlib import Path

import pytest
from example_modules import example_module, train_three_steps
from math_helpers import ScriptedModel

import raylight as rl

TASK = {
    "header": "solve(k, b)",
    "goal": "their sum",
    "tests": [{"arguments": [7, 2], "expected": 9}, {"arguments": [-3, 4], "expected": 1}],
}


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def solve(k, b): return k + b", 1),
        ("```python\nimport math\ndef solve(k, b):\n    return k + b\n```", 1),
        ("def solve(k, b): return abs(k) + b", 0),
        ("def solve(k, b): return 9", 0),
        ("def solve(k, b): return x", 0),
        ("import os\nos._exit(0)", 0),
        ("raise SystemExit", 0),
    ],
)
async def test_hidden_tests_decide(code: str, reward: float) -> None:
    agent = example_module("code", "agent")
    with ScriptedModel(lambda messages, tools: {"content": code}) as model:
        assert await agent.write_function(TASK, rl.LLM(endpoint=model.url, model="scripted")) == reward
    assert len(model.requests) == 1


async def test_a_syntax_error_is_sent_back() -> None:
    agent, answers = example_module("code", "agent"), itertools.cycle(["def solve(k, b) return", "?"])
    with ScriptedModel(lambda messages, tools: {"content": next(answers)}) as model:
        assert await agent.write_function(TASK, rl.LLM(endpoint=model.url, model="scripted")) == 0
    assert [message["role"] for message in model.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert model.requests[1]["messages"][2]["content"].startswith("SyntaxError: ")


def test_the_demonstrated_functions_have_the_expected_results() -> None:
    functions = example_module("code", "functions")
    for task, (_, answer) in zip(functions.make_tasks(100, 0), functions.demonstrations(0), strict=False):
        names: dict = {}
        exec(answer["content"], names)
        assert [names["solve"](*t["arguments"]) for t in task["tests"]] == [
            t["expected"] for t in task["tests"]
        ]


@pytest.mark.slow
def test_code_of_a_real_model_needs_bubblewrap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = example_module("code", "train")
    monkeypatch.setattr(train, "HAS_BUBBLEWRAP", False)
    with pytest.raises(SystemExit):
        train.main(["--model", "any"])
    assert "the code of a model needs bubblewrap" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_train_on_hidden_tests(tmp_path: Path) -> None:
    train_three_steps("code", tmp_path)
