"""Task families: their teachers are right, and wrong settings are named."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.starter_models.tasks.grid_worlds import best_actions, gymnasium
from examples.starter_models.tasks.guessing import GAMES, textarena
from examples.starter_models.tasks.puzzles import reasoning_gym
from examples.starter_models.tasks.registry import demonstrations, find_family
from examples.starter_models.tasks.repairs import FORMATS, harness, repair_tasks
from examples.starter_models.tokenizer import build_tokenizer
from raylight.environments.gymnasium import action_names, instructions, observation_text, parse_action
from raylight.errors import ConfigError, DatasetError
from raylight.experience.batches.demonstrations import Demonstration, demonstration_rows


@pytest.mark.parametrize("task", repair_tasks(0, 8), ids=lambda task: task["command"])
def test_the_command_repairs_the_module(tmp_path: Path, task: dict[str, Any]) -> None:
    for name, content in {**task["files"], **task["tests"]}.items():
        (tmp_path / name).write_text(content)

    def passes() -> bool:
        return (
            subprocess.run(
                [sys.executable, "-B", "check.py"], cwd=tmp_path, stderr=subprocess.DEVNULL
            ).returncode
            == 0
        )

    assert not passes()
    subprocess.run(["bash", "-c", task["command"]], cwd=tmp_path, check=True)
    assert passes()


@pytest.mark.parametrize("form", FORMATS)
def test_a_repair_in_the_form_of_a_harness(form: str) -> None:
    task, value = repair_tasks(3, 1)[0], next(harness(form, seed=3))
    assert task["prompt"] in value["messages"][1]["content"]
    assert "{" + "machine}" not in json.dumps(value)
    tokenizer = build_tokenizer([])
    (row,) = demonstration_rows(tokenizer, Demonstration.parse(value, "x"), "x")
    start, end = row.answers[0]
    assert task["command"] in tokenizer.decode(row.tokens[start:end])


def test_a_form_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "form.json"
    messages = [{"role": "user", "content": "Do: {prompt}"}, {"role": "assistant", "content": "$ {command}"}]
    file.write_text(json.dumps({"messages": messages}))
    value = next(harness("mine", seed=3, conversation=str(file)))
    assert value["messages"][1]["content"] == "$ " + repair_tasks(3, 1)[0]["command"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ('["{prompt}{command}"]', "has no messages"),
        ('{"messages": ["{prompt}"]}', "has no {command}"),
    ],
)
def test_a_wrong_form_is_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "form.json"
    file.write_text(content)
    with pytest.raises(DatasetError) as failed:
        next(harness("mine", seed=0, conversation=str(file)))
    assert words in str(failed.value)


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(ConfigError, match="the forms are bash;"):
        next(harness("vim", seed=0))


def test_the_best_actions_lead_to_the_goal() -> None:
    # a corridor of four states: 0 goes left, 1 goes right; the right end pays 1, and action 1 slips sometimes
    def outcome(state: int, step: int) -> tuple[float, int, float, bool]:
        following = max(0, state + step)
        return 1.0, following, float(following == 3), following == 3

    def slipping(state: int) -> list[tuple[float, int, float, bool]]:
        return [(0.8, *outcome(state, 1)[1:]), (0.2, *outcome(state, -1)[1:])]

    table = {state: {0: [outcome(state, -1)], 1: slipping(state)} for state in range(3)}
    table[3] = {action: [(1.0, 3, 0.0, True)] for action in range(2)}
    assert best_actions(table) == {0: 1, 1: 1, 2: 1, 3: 0}


def test_of_equal_actions_the_first_is_taken() -> None:
    table = {0: {action: [(1.0, 1, 1.0, True)] for action in range(3)}, 1: {0: [(1.0, 1, 0.0, True)]}}
    assert best_actions(table) == {0: 0, 1: 0}


def env(id: str, picture: str = "", actions: int = 4) -> Any:
    mode = "ansi" if picture else None
    space = SimpleNamespace(n=actions)
    shown = SimpleNamespace(
        spec=SimpleNamespace(id=id), action_space=space, render_mode=mode, render=lambda: picture
    )
    shown.unwrapped = shown
    return shown


@pytest.mark.parametrize(
    ("picture", "text"),
    [
        ("  (Down)\nSF\n\x1b[41mF\x1b[0mH\n", "SF\n[F]H"),
        ("|\x1b[35m\x1b[42mY\x1b[0m\x1b[0m: |\n\n", "|<{Y}>: |"),
        ("|\x1b[34;1mB\x1b[0m:\x1b[43m_\x1b[0m|\n  (Drop)\n", "|(B):[_]|"),
        ("\x1b[36mplain\x1b[0m", "plain"),
    ],
)
def test_colours_become_brackets(picture: str, text: str) -> None:
    assert observation_text(env("FrozenLake-v1", picture), 3) == text


def test_an_environment_without_a_picture_shows_its_value() -> None:
    assert observation_text(env("Other-v1", actions=2), (11, 10, 0)) == "(11, 10, 0)"
    text = "Your sum: 11. The dealer shows: 10. Usable ace: 0."
    assert observation_text(env("Blackjack-v1", actions=2), (11, 10, 0)) == text


def test_actions_have_words_or_numbers() -> None:
    lake, other = env("FrozenLake-v1"), env("my/Other-v3", actions=3)
    assert action_names(lake) == ("left", "down", "right", "up")
    assert action_names(other) == ("0", "1", "2")
    assert "left, down, right, up" in instructions(lake)
    assert [parse_action(lake, text) for text in ("right", " Up\n", "go", "")] == [2, 3, None, None]
    assert parse_action(other, "2") == 2


PACKAGES = pytest.mark.slow("packages that the tests do not require")


@PACKAGES
@pytest.mark.parametrize(
    ("id", "settings"), [("FrozenLake-v1", {"is_slippery": False}), ("CliffWalking-v1", {}), ("Taxi-v4", {})]
)
def test_the_teacher_reaches_the_goal(id: str, settings: dict[str, Any]) -> None:
    gym = pytest.importorskip("gymnasium")
    env = gym.make(id, **settings)
    best = best_actions(env.unwrapped.P)
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        for _ in range(30):
            observation, reward, ended, _, _ = env.step(best[int(observation)])
            if ended:
                break
        assert ended
        assert reward >= -1
    value = next(gymnasium(id, seed=0, **settings))
    Demonstration.parse(value, id)


@PACKAGES
def test_the_teacher_of_puzzles_is_right() -> None:
    gym = pytest.importorskip("reasoning_gym")
    values = itertools.islice(reasoning_gym("chain_sum", seed=0, max_terms=2), 20)
    score = gym.get_score_answer_fn("chain_sum")
    for value in values:
        _, answer = value["messages"]
        assert score(answer["content"], {"answer": answer["content"], "metadata": {}}) == 1


@PACKAGES
def test_the_teacher_finds_every_number_in_time() -> None:
    pytest.importorskip("textarena")
    games = [value["messages"] for value in textarena("GuessTheNumber-v0", seed=0)]
    assert len(games) == GAMES
    numbers = {messages[-1]["content"]: len(messages) // 2 for messages in games}
    assert {int(number) for number in numbers} == set(range(1, 21))
    assert max(numbers.values()) == 5


@PACKAGES
@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("gymnasium:NoSuchLake-v1", {}, "cannot be made"),
        ("gymnasium:FrozenLake-v1", {"slippery": True}, "cannot be made"),
        ("gymnasium:Blackjack-v1", {}, "no transition table"),
        ("reasoning_gym:no_such_puzzle", {}, "cannot be made"),
        ("reasoning_gym:chain_sum", {"terms": 2}, "cannot be made"),
        ("textarena:GuessTheNumber-v0", {"largest": 5}, "cannot be played by one player"),
        ("textarena:Hangman-v0", {}, "has no teacher"),
    ],
)
def test_unknown_environments_and_settings_are_named(task: str, options: dict[str, Any], words: str) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("textarena")
    pytest.importorskip("reasoning_gym")
    family, arguments = find_family(task, options)
    with pytest.raises(ConfigError, match=words):
        next(demonstrations(family, arguments, 0, task))
