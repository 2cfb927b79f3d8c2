"""Starter models: demonstrations in, a model that transformers loads out; wrong input is named."""

import json
import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.starter_models.__main__ import main
from examples.starter_models.make import (
    LEAST_HELD_OUT,
    MEASURED_TOKENS,
    enough_rows,
    make_starter,
    recipe_model,
    split_held_out,
)
from examples.starter_models.tasks.registry import FAMILIES, find_family
from raylight.errors import ConfigError, DatasetError
from raylight.experience.batches.demonstrations import DemonstrationRow


@pytest.fixture(autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def echoes(seed: int, words: int = 40) -> Iterator[Any]:
    """Yield a letter, asked for and answered; there are few of them, so that a model learns them soon."""
    generator = random.Random(seed)
    for _ in range(words):
        letter = generator.choice("ab")
        yield [{"role": "user", "content": letter}, {"role": "assistant", "content": letter}]


@pytest.mark.slow
def test_a_few_steps_make_a_model_that_answers(tmp_path: Path) -> None:
    lines: list[str] = []
    made = make_starter(echoes, tmp_path / "model", accuracy=1.0, steps=60, report=lines.append)
    assert (made.accuracy > 0.9, made.sampled_accuracy > 0.5, made.steps) == (True, True, 60)
    assert json.loads((tmp_path / "model" / "starter.json").read_text())["task"] == "echoes"
    assert lines[0].startswith("echoes: 40 demonstrations")
    assert "step 50/60" in lines[1]
    assert "s left" in lines[1]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.path)
    model = AutoModelForCausalLM.from_pretrained(made.path)
    assert model.num_parameters() == made.parameters
    prompt = [{"role": "user", "content": "b"}]
    tokens = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(tokens["input_ids"], max_new_tokens=3, do_sample=False)[0]
    assert tokenizer.decode(answer[tokens["input_ids"].shape[1] :]) == "b<|im_end|>"


def test_one_seed_makes_one_model(tmp_path: Path) -> None:
    import torch

    def weights(name: str, seed: int) -> bytes:
        torch.manual_seed(len(name))  # the caller's random state has no influence
        make_starter(echoes, tmp_path / name, steps=2, seed=seed, report=None)
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert weights("first", 0) == weights("again", 0) != weights("other", 1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_a_recipe_keeps_its_model_on_request(two_threads: None, tmp_path: Path) -> None:
    import torch

    made = Path(recipe_model(echoes, tmp_path / "model", steps=1, report=None)) / "model.safetensors"
    first = made.stat().st_ino
    recipe_model(nothing, tmp_path / "model", keep=True)
    assert made.stat().st_ino == first
    recipe_model(echoes, tmp_path / "model", steps=1, report=None)
    assert made.stat().st_ino != first
    assert torch.get_num_threads() == 2


def test_every_token_of_a_model_is_one_of_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = recipe_model(echoes, tmp_path / "model", steps=1, report=None)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight.shape[0] == len(AutoTokenizer.from_pretrained(folder))


@pytest.mark.slow
def test_the_careless_teacher_brings_the_accuracy_down(tmp_path: Path) -> None:
    lines: list[str] = []
    made = make_starter(echoes, tmp_path / "model", accuracy=0.7, steps=60, report=lines.append)
    assert 0.4 < made.accuracy <= 0.7
    assert any(line.startswith("careless step") for line in lines)


def test_an_accuracy_that_is_missed_is_a_warning_with_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "raylight"):
        made = make_starter("add", tmp_path / "model", steps=1, report=None)
    assert made.accuracy < 0.1
    assert made.demonstrations < 2000  # of 16,384: one step needs no more
    assert f"reached an accuracy of {made.accuracy:.3f} in 1 steps, and 0.500 was aimed at" in caplog.text


def test_a_file_of_messages(tmp_path: Path) -> None:
    file = tmp_path / "messages.jsonl"
    file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in echoes(0)))
    output = str(tmp_path / "model")
    main(["--messages", str(file), "--output", output, "--steps", "1"])
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_settings_of_the_task_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lessons.py").write_text(
        "def lesson(word, seed):\n"
        "    yield [{'role': 'user', 'content': 'say'}, {'role': 'assistant', 'content': f'{word} {seed}'}]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--task", "lessons:lesson", "--set", "word=hello", "--seed", "3", "--steps", "1"]
    main([*arguments, "--output", "model"])
    assert json.loads((tmp_path / "model" / "starter.json").read_text())["demonstrations"] == 1


def nothing() -> Iterator[Any]:
    yield from ()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"task": "ad"},
            ConfigError,
            "there is no task 'ad'; the tasks are add, calculator, reasoning_gym:NAME",
        ),
        ({"task": "reasoning_gym"}, ConfigError, "write 'reasoning_gym:NAME'"),
        ({"task": "add:two"}, ConfigError, "write 'add'"),
        ({"task": "no_such_module:function"}, ConfigError, "cannot import no_such_module"),
        ({"task": echoes, "options": {"sentences": 1}}, ConfigError, "takes no 'sentences'"),
        ({"task": "add", "size": "huge"}, ConfigError, "the sizes are: tiny, small, medium, large"),
        ({"task": "add", "accuracy": 0}, ConfigError, "accuracy=0 is not above 0"),
        ({"task": "add", "steps": 0}, ConfigError, "steps=0 is not at least 1"),
        ({}, ConfigError, "give a task, or messages; the tasks are add, calculator"),
        ({"task": "add", "messages": "x.jsonl"}, ConfigError, "either a task or messages"),
        ({"messages": "missing.jsonl"}, DatasetError, "there is no file"),
        ({"task": nothing}, DatasetError, "nothing has no demonstrations"),
        ({"task": lambda: 3}, DatasetError, "has to yield demonstrations"),
        ({"messages": [[{"role": "user", "content": "a"}]]}, DatasetError, "no answer of the assistant"),
        ({"task": echoes, "output": "."}, ConfigError, "exists and is not a starter model"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], error: type, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(error) as failed:
        make_starter(**arguments, report=None)
    assert words in str(failed.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_demonstration_that_is_too_long_is_named(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "1" * 9000}, {"role": "assistant", "content": "a"}]
    with pytest.raises(DatasetError, match=r"demonstration 1 of messages has 90.. tokens"):
        make_starter(messages=[long], output=tmp_path / "model", report=None)


def test_a_wrong_task_ends_the_command_and_names_all(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: there is no task") as ended:
        main(["--task", "ad", "--output", str(tmp_path / "model")])
    for name in FAMILIES:
        assert name in str(ended.value)


def test_equal_demonstrations_are_on_one_side() -> None:
    keys = [number % 100 for number in range(250)]
    trained, held_out = split_held_out(keys)
    assert len(held_out) == 25
    assert not {keys[i] for i in held_out} & {keys[i] for i in trained}
    assert len(trained) == 250 - sum(keys[i] < 25 for i in range(250))


def test_long_rows_measure_with_fewer() -> None:
    def rows(length: int) -> list[DemonstrationRow]:
        return [DemonstrationRow([0] * length, [(1, 2)])] * 100

    assert [len(enough_rows(rows(length))) for length in (10, MEASURED_TOKENS // 40, 5000)] == [
        100,
        40,
        LEAST_HELD_OUT,
    ]


def test_few_demonstrations_measure_themselves() -> None:
    assert split_held_out([1, 1, 2, 3]) == ([0, 1, 2, 3], [0, 2, 3])


@pytest.mark.parametrize("task", ["add", "calculator"])
def test_the_quickstarts_validation_tasks_are_held_out(task: str) -> None:
    from raylight.quickstart.additions import validation_tasks

    family, _ = find_family(task, {})
    first = [next(iter(value["messages"]))["content"] for value in family.demonstrate(seed=5)][:128]
    for text, pair in zip(first, validation_tasks(), strict=True):
        assert re.findall(r"\d+", text) == [str(pair["a"]), str(pair["b"])]
