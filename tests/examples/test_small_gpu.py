"""The small_gpu example without a model: its problems, the extraction of numbers, and the rewards."""

import json
from pathlib import Path
from typing import Any

import pytest

import raylight as rl
from examples.small_gpu import benchmark, train
from examples.small_gpu.agent import PROMPTS, MathSolver, NumberReward, is_right, read_number
from examples.small_gpu.make_problems import DATA, make_problems
from examples.small_gpu.questions import benchmark_questions, training_questions
from raylight.agent.hooks import HookDispatcher
from raylight.trainer.cluster_fit.local_memory import estimate_memory
from raylight.trainer.trainer import Trainer
from raylight.types import Rollout, Span


def test_the_files_are_what_the_maker_makes_and_the_splits_are_apart() -> None:
    made = make_problems()
    for split, problems in made.items():
        assert [json.loads(line) for line in (DATA / f"{split}.jsonl").read_text().splitlines()] == problems
    questions = [problem["question"] for problems in made.values() for problem in problems]
    assert len(set(questions)) == len(questions) == 288
    assert {problem["id"].split("-")[0] for problem in made["train"]} == {
        problem["id"].split("-")[0] for problem in made["test"]
    }
    assert all(problem["answer"] >= 0 for problems in made.values() for problem in problems)


def test_the_problems_of_words_and_of_additions_have_the_same_shape() -> None:
    for data in ("words", "additions"):
        train, val = training_questions(data)
        assert benchmark_questions(data) == val
        assert not {task["question"] for task in train} & {task["question"] for task in val}
        for task in train[:3] + val[:3]:
            assert set(task) == {"id", "question", "answer"}
    assert training_questions("additions")[0][0]["question"].endswith("=")
    assert benchmark_questions("words", 5) == benchmark_questions("words")[:5]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": i}) + "\n" for i in range(20)))
    train, val = training_questions(str(path))
    assert (len(train), [task["answer"] for task in val]) == (18, [0, 10])
    assert len(benchmark_questions(str(path))) == 20
    path.write_text('{"question": "1?", "answer": "one"}\n')
    with pytest.raises(rl.RaylightError, match="question 1 must look like"):
        benchmark_questions(str(path))
    path.write_text('{"question": "1?", "answer": 1}\n')
    with pytest.raises(rl.RaylightError, match="at least 10"):
        training_questions(str(path))
    with pytest.raises(rl.RaylightError, match="there is no file"):
        benchmark_questions("/no/such.jsonl")


@pytest.mark.parametrize(
    ("text", "prompt", "number"),
    [
        ("3 + 4 = 7\n#### 7", "cot", 7.0),
        ("#### 1\nno:\n#### 1,200.50", "cot", 1200.5),
        ("so #### $-3.", "cot", -3.0),
        ("#### \N{MINUS SIGN}3", "cot", -3.0),
        ("#### 1,2", "cot", None),
        ("7", "cot", None),
        ("#### seven", "cot", None),
        ("#### 7 apples", "cot", None),
        ("#### 7\nand more", "cot", None),
        (" 46 ", "plain", 46.0),
        ("46 or 47", "plain", None),
        ("", "plain", None),
    ],
)
def test_a_number_is_read_where_it_should_stand(text: str, prompt: str, number: float | None) -> None:
    assert read_number(text, prompt) == number


def test_rounding_is_forgiven_and_nothing_else() -> None:
    assert is_right(33.3333, 100 / 3)
    assert not is_right(33.3, 100 / 3)
    assert not is_right(0.01, 0)


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ("10 - 4 = 6\n#### 6", {"reward": 1.0, "correct": 1.0}),
        ("10 - 4 = 5\n#### 5", {"reward": 0.1, "correct": 0.0}),
        ("It is 6.", {"reward": 0.0, "correct": 0.0}),
    ],
)
async def test_the_hook_rewards_the_last_message(text: str, rewards: dict[str, float]) -> None:
    from raylight.traces.context import AttemptTrace, tracing

    rollout = Rollout(rollout_id="ro-1", input={"answer": 6}, start_time=0.0, status="running")
    trace = AttemptTrace("ro-1", "at-1")
    with tracing(trace):
        rl.emit_message(text)
        known: dict[str, Any] = {"agent": None, "runner": None, "tracer": None, "rollout": rollout}
        await HookDispatcher(NumberReward("cot")).call("on_rollout_end", **known, spans=list(trace.spans))
    span: Span = rl.find_reward_spans(trace.spans)[-1]
    assert {reward.name: reward.value for reward in rl.traces.get_rewards_from_span(span)} == rewards


def test_the_agent_and_its_prompts() -> None:
    MathSolver().check({"llm": rl.LLM(model="m")}, ("train", "val"))
    for template in PROMPTS.values():
        assert template.format(question="2+2=").endswith("2+2=")


@pytest.mark.slow
def test_the_defaults_are_50_steps_within_4_gb() -> None:
    args = train.parse(["--model", "m"])
    assert (args.steps, args.data, args.prompt) == (50, "words", "cot")
    assert args.memory_gb < 4
    assert benchmark.parse(["--model", "m"]).prompt == args.prompt

    from transformers import Qwen2Config

    shape = Qwen2Config(  # Qwen2.5-0.5B, which the README uses
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    algorithm = train.algorithm(args).model_copy(update={"dtype": "bfloat16"})
    trainer = Trainer(algorithm=algorithm)
    needed = estimate_memory(shape, trainer.engine, trainer.learner)
    assert needed.weights == pytest.approx(0.99e9, rel=0.02)
    assert needed.peak < args.memory_gb * 1e9
