"""Games in text with a scripted model: the conversation, the end of an episode, and bad tasks."""

import random
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_client import ScriptedClient, bad_request

import raylight as rl
from raylight.environments.gymnasium import parse_action
from raylight.environments.text_game import UnfinishedGameError, game_agent, task_seed
from raylight.environments.textarena import TextArenaGame
from raylight.errors import ConfigError, DatasetError

LLM = rl.LLM(endpoint="http://model/v1", model="m")


class Guess:
    """The seed is guessed; each wrong guess costs 0.1."""

    closed = 0

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.number, self.reward = task_seed(task), 1.0
        return [{"role": "user", "content": "Guess."}]

    def step(self, answer: str) -> str | None:
        if answer == str(self.number):
            return None
        self.reward -= 0.125
        return f"not {answer}"

    def get_reward(self) -> float:
        return self.reward

    def close(self) -> None:
        Guess.closed += 1


def agent(**options: Any) -> Any:
    return game_agent("guess", Guess, **{"max_turns": 4, "sampling": None, "trained_agents": None, **options})


async def play(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> tuple[Any, ScriptedClient]:
    client = ScriptedClient(*answers)
    monkeypatch.setattr(rl.LLM, "client", lambda llm: client)
    return await agent(sampling={"max_tokens": 5})({"seed": 3}, LLM), client


async def test_answers_are_moves_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Guess.closed = 0
    rewards, client = await play(monkeypatch, {"content": "1"}, {"content": None}, {"content": "3"})
    assert rewards == {"primary": 0.75}
    assert client.requests[-1]["messages"] == [
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "not 1"},
        {"role": "assistant"},
        {"role": "user", "content": "not "},
    ]
    assert client.requests[0]["max_tokens"] == 5
    assert "tools" not in client.requests[0]
    assert Guess.closed == 1


async def test_an_episode_ends_with_its_turns_or_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, client = await play(monkeypatch, *[{"content": "1"}] * 4)
    assert rewards == {"primary": 0.5}
    assert len(client.requests) == 4
    overflow = bad_request("context_length_exceeded")
    rewards, _ = await play(monkeypatch, {"content": "1"}, overflow)
    assert rewards == {"primary": 0.875}
    with pytest.raises(type(overflow)):
        await play(monkeypatch, overflow)


class Endless(Guess):
    def get_reward(self) -> float:
        raise UnfinishedGameError


@pytest.mark.parametrize(
    ("config", "reward"),
    [
        ({}, 0.0),
        ({"truncated_reward": -1.0}, -1.0),
        ({"truncated": "mask"}, None),
        ({"truncated": "fail"}, ...),
    ],
)
async def test_an_unfinished_game_is_a_truncated_rollout(
    config: dict[str, Any], reward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl.LLM, "client", lambda llm: ScriptedClient({"content": "1"}))
    endless = game_agent("endless", Endless, max_turns=1, sampling=None, trained_agents=None)
    playing = endless({"seed": 3}, LLM, SimpleNamespace(config=rl.RolloutConfig(**config)))
    if reward is not ...:
        assert await playing == reward
        return
    with pytest.raises(UnfinishedGameError):
        await playing


@pytest.mark.parametrize("task", [3, {}, {"seed": "1"}, {"seed": -1}, {"seed": True}])
async def test_a_task_without_a_seed_is_a_typed_error(task: Any) -> None:
    with pytest.raises(DatasetError):
        await agent()(task, LLM)


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"sampling": {"top_p": 2}}])
def test_settings_out_of_range_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        agent(**options)


def test_seeds() -> None:
    assert rl.environments.seeds(2, start=5) == [{"seed": 5}, {"seed": 6}]
    with pytest.raises(ConfigError):
        rl.environments.seeds(0)


@pytest.mark.parametrize(
    ("make", "extra"),
    [
        (lambda: rl.environments.gymnasium_agent("FrozenLake-v1"), "gymnasium"),
        (lambda: rl.environments.textarena_agent("GuessTheNumber-v0"), "textarena"),
        (lambda: rl.environments.ReasoningGym("chain_sum"), "reasoning_gym"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    make: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("gymnasium", "textarena", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'raylight\[{extra}\]'"):
        make()


class Dice:
    """A game of TextArena with random moves: both are the process's random numbers, seeded in `reset`."""

    def reset(self, num_players: int, seed: int) -> None:
        random.seed(seed)
        self.rolled = random.random()

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.rolled = random.random()
        return False, {}

    def get_observation(self) -> tuple[int, str]:
        return 0, str(self.rolled)


def test_the_moves_of_a_game_of_textarena_follow_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda id: Dice()))
    state, alone = random.getstate(), random.Random(3)
    games = [TextArenaGame("Dice-v0", {}) for _ in range(2)]
    rolls = [[game.reset({"seed": 3})[0]["content"] for game in games]]
    rolls += [[game.step("roll") for game in games] for _ in range(3)]
    assert rolls == [[str(alone.random())] * 2 for _ in range(4)]
    assert random.getstate() == state


LAKE = SimpleNamespace(spec=SimpleNamespace(id="FrozenLake-v1"), action_space=SimpleNamespace(n=4))
NUMBERED = SimpleNamespace(spec=None, action_space=SimpleNamespace(n=2))


@pytest.mark.parametrize(
    ("env", "text", "action"),
    [
        (LAKE, " Right\n", 2),
        (LAKE, "3", 3),
        (LAKE, "4", None),
        (LAKE, "9" * 5000, None),
        (LAKE, "I cannot go left, so I go down.", 1),
        (LAKE, "upwards", None),
        (LAKE, "", None),
        (NUMBERED, "1", 1),
        (NUMBERED, "²", None),
    ],
)
def test_actions_by_name_or_number(env: Any, text: str, action: int | None) -> None:
    assert parse_action(env, text) == action
