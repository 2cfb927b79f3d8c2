"""GSM example: the verifier, the taught chains of thought, and three steps."""

from pathlib import Path

import pytest
from example_modules import example_module, train_three_steps
from math_helpers import ScriptedModel
from run_output import metric_rows

import raylight as rl

pytestmark = pytest.mark.framework("reasoning_gym")


@pytest.mark.parametrize("dataset", ["chain_sum", "gsm_symbolic"])
async def test_the_marked_answer_counts(dataset: str) -> None:
    from reasoning_gym import create_dataset

    agent = example_module("gsm", "agent")
    task = rl.environments.ReasoningGym(dataset, 1, seed=7)[0]
    right = create_dataset(dataset, size=1, seed=7)[0]["answer"]
    rewards = []
    for answer in (right, "123456"):
        with ScriptedModel(
            lambda messages, tools, answer=answer: {"content": f"1+1=2\n<answer>{answer}</answer>"}
        ) as model:
            rewards.append(await agent.solve(task, rl.LLM(endpoint=model.url, model="scripted")))
    assert rewards[0] == {"primary": 1.0}
    assert rewards[1]["primary"] < 0.1
    assert [message["content"] for message in model.requests[0]["messages"]] == [
        agent.SYSTEM,
        task["question"],
    ]


def test_the_taught_answers_are_right_and_validation_is_not_taught() -> None:
    from reasoning_gym.utils import extract_answer

    demonstrations = example_module("gsm", "demonstrations")
    assert demonstrations.chain_of_thought("3 + 4 - 9") == "3+4=7\n7-9=-2\n<answer>-2</answer>"
    _, val = example_module("gsm", "train").make_tasks("chain_sum", 100, 0)
    held_out = {task["question"] for task in val}
    taught = list(demonstrations.chains_of_thought(0, held_out))
    assert len(taught) > 3000
    for _, question, answer in taught[:200]:
        assert question["content"] not in held_out
        expression = question["content"].split(":")[1].removesuffix("=")
        assert int(extract_answer(answer["content"])) == eval(expression)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_train_on_sums(tmp_path: Path) -> None:
    train_three_steps("gsm", tmp_path)
    assert all("val/pass_at_k" in step for step in metric_rows(tmp_path / "out") if "val/reward" in step)
