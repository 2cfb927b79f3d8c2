"""Resources of agents: matched by name, checked before a run, pickled; keys of attempts."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

import pytest
from hypothesis import given
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


def test_parameters_are_filled_by_name_in_any_order() -> None:
    def agent(table: dict, rollout: Any, llm: LLM, resources: dict, task: str) -> list:
        return [table, rollout, llm, resources, task]

    got = rollout(agent).rollout("t", RESOURCES, ROLLOUT)
    assert got == [{"a": 1}, ROLLOUT, RESOURCES["llm"], RESOURCES, "t"]


def test_the_first_parameter_is_the_task_where_none_is_called_so() -> None:
    assert rollout(lambda question, llm: (question, llm.model)).rollout("t", RESOURCES, ROLLOUT) == (
        "t",
        "policy",
    )


def test_keyword_only_parameters_are_filled_too() -> None:
    assert rollout(lambda task, *, llm: llm.model).rollout("t", RESOURCES, ROLLOUT) == "policy"


def test_a_default_is_kept_when_nothing_fills_it_and_replaced_when_something_does() -> None:
    agent = rollout(lambda task, llm=None, tool="hammer": (llm and llm.model, tool))
    agent.check({"llm"})
    assert agent.rollout("t", RESOURCES, ROLLOUT) == ("policy", "hammer")


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


def test_a_subclass_is_asynchronous_if_it_defines_the_asynchronous_method() -> None:
    class Sync(LitAgent):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    class Async(LitAgent):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    assert not Sync().is_async
    assert Async().is_async
    Sync().check(set())
    Async().check(set())


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


@given(secret=st.text(min_size=1), mine=st.tuples(IDS, IDS), other=st.tuples(IDS, IDS))
def test_a_key_opens_its_own_attempt_only(secret: str, mine: tuple[str, str], other: tuple[str, str]) -> None:
    key = attempt_key(secret, *mine)
    assert key_use(key, secret, *mine) == "model"
    assert (key_use(key, secret, *other) is not None) == (mine == other)
    for use in get_args(KeyUse):
        assert key_use(attempt_key(secret, *mine, use), secret, *mine) == use
    assert not key_use(key, secret + "x", *mine)


def test_a_slash_in_an_id_does_not_make_another_attempts_key() -> None:
    assert attempt_key("s", "a/b", "c") != attempt_key("s", "a", "b/c")
    assert attempt_key("s", "a/attempt/b", "c") != attempt_key("s", "a", "b/attempt/c")
    assert attempt_key("s", "a%2Fb", "c") != attempt_key("s", "a/b", "c")


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


def test_a_traced_model_gets_the_url_and_key_of_the_attempt_and_stays_as_it_is_itself() -> None:
    llm = LLM(endpoint="http://e:8000/run", model="policy", traced=True)
    scoped = llm.for_attempt("ro-1", "at-2", "secret")
    assert scoped.get_base_url() == f"http://e:8000/run{attempt_path('ro-1', 'at-2')}/v1"
    assert scoped.api_key == attempt_key("secret", "ro-1", "at-2")
    assert scoped.model == "policy"
    assert (llm.endpoint, llm.api_key) == ("http://e:8000/run", "unused")


def test_an_untraced_model_is_returned_as_it_is() -> None:
    llm = LLM(endpoint="http://judge/v1", model="j", api_key="mine")
    assert llm.for_attempt("ro-1", "at-1", "secret") is llm


def test_a_model_refuses_an_unknown_field() -> None:
    with pytest.raises(ConfigError):
        LLM(endpont="http://e")


@given(IDS, IDS, st.text(min_size=1, max_size=20))
def test_an_agent_stands_in_the_address_percent_encoded(
    rollout_id: str, attempt_id: str, agent_id: str
) -> None:
    path = attempt_path(rollout_id, attempt_id, agent_id)
    assert unquote(path) == f"/rollout/{rollout_id}/attempt/{attempt_id}/agent/{agent_id}"
    assert path.count("/") == 6
    assert path.startswith(attempt_path(rollout_id, attempt_id))
