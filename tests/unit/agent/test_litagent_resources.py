"""Resources of agents: matched by name, checked before a run, pickled; keys of attempts."""

import functools
import importlib
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ray import cloudpickle
from unit_helpers import make_rollout

from raylight.agent.attempt_keys import KeyUse, attempt_key, attempt_path, key_use
from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM
from raylight.errors import AgentSignatureError, ConfigError

ROLLOUT = make_rollout("ro-7", task="t")
RESOURCES = {"llm": LLM(model="policy"), "table": {"a": 1}}


@rollout
def agent_of_a_module(task: str, llm: LLM) -> float:
    return len(task) * 1.0


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda table, rollout, llm, resources, task: [rollout, resources, task], [ROLLOUT, RESOURCES, "t"]),
        (lambda table, llm, task: (table, llm.model), ({"a": 1}, "policy")),
        (lambda question, llm: (question, llm.model), ("t", "policy")),
        (lambda task, *, llm: llm.model, "policy"),
        (lambda task, llm=None, tool="hammer": (llm and llm.model, tool), ("policy", "hammer")),
    ],
    ids=["all", "any order", "a task of another name", "keyword only", "defaults"],
)
def test_parameters_are_filled_by_name(function: Any, given: Any) -> None:
    agent = rollout(function)
    agent.check({"llm", "table"})
    assert agent.rollout("t", RESOURCES, ROLLOUT) == given


def test_a_parameter_that_nothing_fills_is_named_before_the_run() -> None:
    def my_agent(task: str, llm: LLM, judge: LLM, tool: Any) -> None: ...

    with pytest.raises(AgentSignatureError, match=r"my_agent needs 'judge', 'tool'.*llm.*rollout"):
        rollout(my_agent).check({"llm"})
    rollout(my_agent).check({"llm", "judge", "tool"})


def test_a_partial_function_lacks_a_parameter_with_the_same_error() -> None:
    def my_agent(task: str, judge: LLM, size: int) -> None: ...

    with pytest.raises(AgentSignatureError, match="judge"):
        rollout(functools.partial(my_agent, size=3)).check({"llm"})


@pytest.mark.parametrize(
    "function",
    [
        lambda *args: 1,
        lambda task, *rest: 1,
        lambda task, **more: 1,
        lambda: 1,
        eval("lambda task, /: 1"),
    ],
    ids=["args", "rest", "kwargs", "none", "positional"],
)
def test_parameters_that_cannot_be_filled_by_name_are_refused(function: Any) -> None:
    with pytest.raises(AgentSignatureError, match="must take the task first"):
        rollout(function)


@pytest.mark.parametrize("thing", [3, "agent", None])
def test_only_something_callable_is_decorated(thing: Any) -> None:
    with pytest.raises(AgentSignatureError, match=type(thing).__name__):
        rollout(thing)


def test_a_decorated_function_is_still_that_function() -> None:
    assert agent_of_a_module("four", None) == 4.0
    assert agent_of_a_module.__name__ == "agent_of_a_module"


async def test_a_coroutine_function_makes_an_asynchronous_agent() -> None:
    @rollout
    async def agent(task: str, llm: LLM) -> str:
        return task + llm.model

    assert agent.is_async
    assert not agent_of_a_module.is_async
    assert await agent.rollout_async("t", RESOURCES, ROLLOUT) == "tpolicy"


async def test_a_subclass_without_either_method_is_refused() -> None:
    class Neither(LitAgent):
        pass

    with pytest.raises(AgentSignatureError, match="Neither must define"):
        Neither().check(set())
    with pytest.raises(NotImplementedError, match="Neither"):
        Neither().rollout(1, {}, ROLLOUT)
    with pytest.raises(NotImplementedError, match="Neither"):
        await Neither().rollout_async(1, {}, ROLLOUT)


async def test_a_local_function_travels_with_what_it_closes_over() -> None:
    bonus = 10

    @rollout
    async def agent(task: int, llm: LLM, tool: str = "hammer") -> float:
        return task + bonus

    copy = cloudpickle.loads(cloudpickle.dumps(agent))
    copy.check({"llm"})
    assert copy.is_async
    assert copy.__name__ == "agent"
    assert await copy.rollout_async(5, RESOURCES, ROLLOUT) == 15


def test_an_agent_whose_globals_cannot_be_pickled_is_found_in_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent_with_a_lock.py").write_text(
        "import threading\nimport raylight as rl\nLOCK = threading.Lock()\n\n"
        "@rl.rollout\ndef agent(task):\n    with LOCK:\n        return again(task)\n\n"
        "def again(task):\n    return float(task) if task < 9 else agent(task - 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    agent = importlib.import_module("agent_with_a_lock").agent
    agent.trained_agents = "solver"
    data = cloudpickle.dumps(agent)
    del sys.modules["agent_with_a_lock"]
    copy = cloudpickle.loads(data)
    assert copy.rollout(2, {}, ROLLOUT) == 2.0
    assert copy.trained_agents == "solver"
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):  # a function that no module has
        cloudpickle.dumps(rollout(lambda task: lock))


def test_a_function_of_a_module_travels() -> None:
    copy = cloudpickle.loads(cloudpickle.dumps(agent_of_a_module))
    assert copy.rollout("four", RESOURCES, ROLLOUT) == 4.0


# keys and models

IDS = st.text("abcdefgh0123456789-/%. é", min_size=1, max_size=12)


@example(secret="s", mine=("a/b", "c"), other=("a", "b/c"))
@example(secret="s", mine=("a/attempt/b", "c"), other=("a", "b/attempt/c"))
@example(secret="s", mine=("a%2Fb", "c"), other=("a/b", "c"))
@given(secret=st.text(min_size=1), mine=st.tuples(IDS, IDS), other=st.tuples(IDS, IDS))
def test_a_key_opens_its_own_attempt_only(secret: str, mine: tuple[str, str], other: tuple[str, str]) -> None:
    key = attempt_key(secret, *mine)
    assert key_use(key, secret, *mine) == "model"
    assert (key_use(key, secret, *other) is not None) == (mine == other)
    for use in get_args(KeyUse):
        assert key_use(attempt_key(secret, *mine, use), secret, *mine) == use
    assert not key_use(key, secret + "x", *mine)


@pytest.mark.parametrize(
    ("name", "segment"), [(".", "%2E"), ("..", "%2E%2E"), ("a.b", "a.b"), ("a/b", "a%2Fb"), ("é", "%C3%A9")]
)
def test_an_id_is_one_segment_that_no_client_takes_for_a_way_up(name: str, segment: str) -> None:
    assert attempt_path(name, "at-1") == f"/rollout/{segment}/attempt/at-1"


@pytest.mark.parametrize("key", ["", "unused", "rl-", "schlüssel", "secret"])
def test_what_is_no_key_opens_nothing(key: str) -> None:
    assert not key_use(key, "secret", "ro-1", "at-1")


def test_the_key_does_not_show_the_secret() -> None:
    assert "secret" not in attempt_key("secret", "ro-1", "at-1")


def test_a_model_refuses_an_unknown_field() -> None:
    with pytest.raises(ConfigError):
        LLM(endpont="http://e")
