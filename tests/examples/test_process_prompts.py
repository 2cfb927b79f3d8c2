"""Rules of the prompt optimiser, without a run: rejected prompts, the best prompt, failing writers."""

import pytest
from openai import AsyncOpenAI
from process_helpers import MODEL, ScriptedModel, serving

import raylight as rl
from examples.process_agent.algorithms import Candidate, DesignBaseline, PromptOptimiser, refusal, unfenced
from raylight.store.service import StoreService

pytestmark = pytest.mark.framework("thermo")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Make {max_calls} calls.", None),
        ("Make some calls.", "its placeholders are []"),
        ("Make {max_calls} calls for {task}.", "['max_calls', 'task']"),
        ("Make {max_calls calls.", "malformed"),
        ('Answer {"run_id": 1} in {max_calls}.', "placeholder"),
        ("old {max_calls}", "it was tried before"),
    ],
)
def test_a_prompt_without_its_placeholders_is_rejected(text: str, why: str | None) -> None:
    found = refusal(text, {"max_calls"}, [Candidate(0, None, "old {max_calls}", 0.5)])
    assert found is None if why is None else why in str(found)


def test_a_fence_around_a_prompt_is_removed() -> None:
    assert unfenced("```text\nDo it.\nWell.\n```") == "Do it.\nWell.\n"
    assert unfenced(" Do ``` it. \n") == "Do ``` it.\n"


def test_of_equal_prompts_the_oldest_is_the_best() -> None:
    algorithm = PromptOptimiser(AsyncOpenAI(api_key="unused"), MODEL)
    algorithm.history = [
        Candidate(0, None, "a", 0.5),
        Candidate(1, 0, "b", None, "refused"),
        Candidate(2, 0, "c", 0.5),
    ]
    assert algorithm.best.number == 0
    algorithm.history.append(Candidate(3, 0, "d", 0.51))
    assert algorithm.best.number == 3


async def test_a_writer_that_refuses_is_named() -> None:
    with serving(ScriptedModel({}).route) as url:
        async with AsyncOpenAI(base_url=url, api_key="wrong") as client:
            with pytest.raises(rl.RaylightError, match=r"'scripted' that writes prompts failed: .*bad key"):
                await PromptOptimiser(client, MODEL)._write(Candidate(0, None, "p {max_calls}"), [])


async def test_missing_settings_are_reported_before_anything_runs() -> None:
    store = rl.StoreClient(StoreService())
    for algorithm in (DesignBaseline(), PromptOptimiser(AsyncOpenAI(api_key="unused"), MODEL)):
        algorithm.set_store(store)
        with pytest.raises(rl.RaylightError, match="give a train_dataset"):
            await algorithm.run([], [])
    with pytest.raises(rl.RaylightError, match="give a PromptTemplate as the resource 'system_prompt'"):
        await algorithm.run([{"id": "a"}])


def test_only_the_baseline_is_fast() -> None:
    """`Trainer.dev` accepts fast algorithms only."""
    assert issubclass(DesignBaseline, rl.FastAlgorithm)
    assert not issubclass(PromptOptimiser, rl.FastAlgorithm)
