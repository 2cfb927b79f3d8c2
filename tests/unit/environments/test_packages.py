"""Agents over the packages gymnasium, textarena and reasoning-gym themselves."""

import asyncio
import json
import random
import re
from typing import Any

import pytest
from scripted_client import ScriptedClient

import raylight as rl
from raylight.environments.textarena import TextArenaGame
from raylight.errors import ConfigError, DatasetError

pytestmark = pytest.mark.slow("needs packages of the extra environments")
LLM = rl.LLM(endpoint="http://model/v1", model="m")


async def play(
    monkeypatch: pytest.MonkeyPatch, agent: Any, task: Any, *answers: str
) -> tuple[float, list[list[dict[str, Any]]]]:
    """Return the reward, and the messages of each request."""
    client = ScriptedClient(*({"content": answer} for answer in answers))
    monkeypatch.setattr(rl.LLM, "client", lambda llm: client)
    rewards = await agent(task, LLM)
    return rewards["primary"], [request["messages"] for request in client.requests]


async def test_a_frozen_lake_is_crossed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    agent = rl.environments.gymnasium_agent("FrozenLake-v1", is_slippery=False)
    path = ["down", "1", "I go right.", "fly", "down", "right", "right"]
    reward, requests = await play(monkeypatch, agent, {"seed": 0}, *path)
    assert reward == 1.0
    assert requests[0] == [
        {
            "role": "system",
            "content": "Play FrozenLake-v1. Answer each observation with one action: left, down, right, up.",
        },
        {"role": "user", "content": "[S]FFF\nFHFH\nFFFH\nHFFG"},
    ]
    assert requests[1][-1]["content"] == "SFFF\n[F]HFH\nFFFH\nHFFG"
    assert requests[4][-1]["content"].startswith("'fly' is not an action. Answer with one action: left, down")
    reward, requests = await play(monkeypatch, agent, {"seed": 0}, "right", "down")
    assert (reward, len(requests)) == (0.0, 2)


async def test_taxi_cliff_and_blackjack(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    taxi = rl.environments.gymnasium_agent("Taxi-v4", max_turns=2)
    reward, requests = await play(monkeypatch, taxi, {"seed": 1}, "dropoff", "south")
    assert reward == -11
    picture = requests[0][-1]["content"]
    assert all(mark in picture for mark in ("[", "(", "<", "+---------+"))
    again = (await play(monkeypatch, taxi, {"seed": 1}, "south", "south"))[1]
    other = [(await play(monkeypatch, taxi, {"seed": seed}, "south", "south"))[1][0] for seed in range(2, 6)]
    assert again[0] == requests[0]
    assert requests[0] not in other
    cliff = rl.environments.gymnasium_agent("CliffWalking-v1", max_turns=1)
    reward, requests = await play(monkeypatch, cliff, {"seed": 0}, "right")
    assert reward == -100
    worded = rl.environments.gymnasium_agent("CliffWalking-v1", render_mode=None, max_turns=2)
    reward, requests = await play(monkeypatch, worded, {"seed": 0}, "up", "right")
    assert (reward, [request[-1]["content"] for request in requests]) == (
        -2,
        ["Row 3, column 0.", "Row 2, column 0."],
    )
    lake = rl.environments.gymnasium_agent("FrozenLake-v1", is_slippery=False, render_mode=None, max_turns=2)
    _, requests = await play(monkeypatch, lake, {"seed": 0}, "right", "right")
    assert requests[1][-1]["content"] == "Row 0, column 1."
    taxi = rl.environments.gymnasium_agent("Taxi-v4", render_mode=None, max_turns=1)
    _, requests = await play(monkeypatch, taxi, {"seed": 1}, "south")
    shown = re.fullmatch(
        r"Taxi: row \d, column \d\. Passenger: \w+\. Destination: \w+\.", requests[0][-1]["content"]
    )
    assert shown is not None
    jack = rl.environments.gymnasium_agent("Blackjack-v1")
    reward, requests = await play(monkeypatch, jack, {"seed": 0}, "stick")
    assert reward in (-1, 0, 1)
    assert requests[0][-1]["content"].startswith("Your sum: ")


@pytest.mark.parametrize(
    ("id", "settings", "message"),
    [
        ("FrozenPond-v1", {}, "'FrozenPond-v1' cannot be made"),
        ("FrozenLake-v1", {"slippery": 1}, "cannot be made"),
        ("Taxi-v1", {}, "cannot be made"),
        ("Pendulum-v1", {}, r"actions of Pendulum-v1 are Box.*Discrete"),
    ],
)
def test_an_environment_that_cannot_be_played_is_a_typed_error(
    id: str, settings: dict[str, Any], message: str
) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=message):
        rl.environments.gymnasium_agent(id, **settings)


async def test_a_number_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textarena")
    state = random.getstate()
    agent = rl.environments.textarena_agent("GuessTheNumber-v0", max_turns=12)
    _, requests = await play(monkeypatch, agent, {"seed": 4}, *["10", "[21]", "the number is [15]"] * 4)
    assert random.getstate() == state, "the seeds of games leave the process's random numbers alone"
    prompt, answer, hint = requests[1]
    assert "You have to guess the number between 1 and 20" in prompt["content"]
    assert answer == {"role": "assistant", "content": "10"}
    assert hint["content"] in ("The target number is lower.", "The target number is higher.")
    assert "invalid move" in requests[2][-1]["content"]
    number = await number_of(monkeypatch, agent, 4)
    assert number == await number_of(monkeypatch, agent, 4)
    assert (await play(monkeypatch, agent, {"seed": 4}, str(number)))[0] == 1.0
    assert len({await number_of(monkeypatch, agent, seed) for seed in range(6)}) > 1


def test_moves_follow_the_seed_of_the_game() -> None:
    pytest.importorskip("textarena")

    def play_2048(seed: int) -> list[str | None]:
        game = TextArenaGame("2048-v0", {})
        game.reset({"seed": seed})
        return [game.step(move) for move in ("Left", "Up", "Right", "Down")]

    assert play_2048(3) == play_2048(3) != play_2048(4)


async def number_of(monkeypatch: pytest.MonkeyPatch, agent: Any, seed: int) -> int:
    """Return the number of a game: the guess with which it ends."""
    client = ScriptedClient()
    monkeypatch.setattr(rl.LLM, "client", lambda llm: client)
    for number in range(1, 21):
        client.answers = [{"content": str(number)}, {"content": "-"}, {"content": "-"}]
        if (await agent({"seed": seed}, LLM))["primary"] == 1.0:
            return number
    raise AssertionError("no number was right")


async def test_games_at_once_do_not_share_their_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textarena")
    agent = rl.environments.textarena_agent("FrozenLake-v0-random", max_turns=1)
    client = ScriptedClient(*[{"content": "up"}] * 64)
    monkeypatch.setattr(rl.LLM, "client", lambda llm: client)
    await asyncio.gather(*(agent({"seed": index % 4}, LLM) for index in range(64)))
    boards = {request["messages"][0]["content"] for request in client.requests}
    assert len(boards) <= 4


@pytest.mark.parametrize("id", ["Chess-v0", "Nothing-v0"])
def test_a_game_that_cannot_be_played_is_a_typed_error(id: str) -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match=f"'{id}' of TextArena cannot be played by one player"):
        rl.environments.textarena_agent(id)


async def test_a_puzzle_is_scored_by_its_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    puzzles = rl.environments.ReasoningGym("chain_sum", size=5, seed=1, min_terms=2, max_terms=2)
    agent = rl.environments.reasoning_gym_agent()
    assert len(puzzles) == len(list(puzzles)) == 5
    task = json.loads(json.dumps(puzzles[0]))
    assert task["question"] == "State the final answer to the following arithmetic problem: 4 - 1 ="
    assert "answer" not in task
    reward, requests = await play(monkeypatch, agent, task, " 3\n")
    assert reward == 1.0
    assert requests == [[{"role": "user", "content": task["question"]}]]
    assert (await play(monkeypatch, agent, task, "4"))[0] < 0.1
    thought = rl.environments.reasoning_gym_agent(system="Think.")
    reward, requests = await play(
        monkeypatch, thought, task, "so <answer>4</answer> no <answer> 3 </answer>."
    )
    assert reward == 1.0
    assert requests[0][0] == {"role": "system", "content": "Think."}


async def test_an_answer_that_a_dataset_cannot_read_scores_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    (task,) = rl.environments.ReasoningGym("prime_factorization", size=1)
    assert (await play(monkeypatch, rl.environments.reasoning_gym_agent(), task, "nonsense }{"))[0] == 0.0


async def test_datasets_that_cannot_be_made_and_tasks_of_others_are_typed_errors() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="'chains' of reasoning-gym cannot be made"):
        rl.environments.ReasoningGym("chains")
    with pytest.raises(ConfigError, match=r"'chain_sum' of reasoning-gym with \{'max_term': 2\}"):
        rl.environments.ReasoningGym("chain_sum", max_term=2)
    with pytest.raises(ConfigError, match="not JSON"):
        rl.environments.ReasoningGym("chain_sum", max_terms={1})
    with pytest.raises(DatasetError, match="lacks config, index, name, seed, size"):
        await rl.environments.reasoning_gym_agent()({"question": "1+1"}, LLM)
    with pytest.raises(IndexError):
        rl.environments.ReasoningGym("chain_sum", size=2)[2]
