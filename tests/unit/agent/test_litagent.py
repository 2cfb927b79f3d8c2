"""Agent classes: the method for each mode, and the checks before a run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_rollout

from raylight.agent.litagent import LitAgent
from raylight.errors import AgentSignatureError

METHODS = ["rollout", "training_rollout", "validation_rollout"]
METHODS += [f"{name}_async" for name in METHODS]


def make_agent(*names: str) -> LitAgent:
    """An agent whose methods return their own names."""

    def sync(name: str) -> Any:
        return lambda self, task, resources, rollout: name

    def asynchronous(name: str) -> Any:
        async def method(self: Any, task: Any, resources: Any, rollout: Any) -> str:
            return name

        return method

    made = {name: asynchronous(name) if name.endswith("_async") else sync(name) for name in names}
    return agent_with(**made)


def agent_with(**methods: Any) -> LitAgent:
    return type("Agent", (LitAgent,), methods)()


async def run(agent: LitAgent, mode: str | None) -> Any:
    rollout = make_rollout(mode=mode)
    if agent.is_async_for(rollout.mode):
        return await agent.call_async(1, {}, rollout)
    return agent.call(1, {}, rollout)


@pytest.mark.parametrize(
    ("names", "train", "validation"),
    [
        (["rollout"], "rollout", "rollout"),
        (["rollout_async"], "rollout_async", "rollout_async"),
        (["rollout", "rollout_async"], "rollout_async", "rollout_async"),
        (["training_rollout", "validation_rollout"], "training_rollout", "validation_rollout"),
        (["training_rollout", "validation_rollout_async"], "training_rollout", "validation_rollout_async"),
        (["rollout", "validation_rollout"], "rollout", "validation_rollout"),
        (["rollout_async", "training_rollout"], "training_rollout", "rollout_async"),
        (["rollout", "training_rollout_async"], "training_rollout_async", "rollout"),
        (METHODS, "training_rollout_async", "validation_rollout_async"),
    ],
)
async def test_the_mode_chooses_the_method(names: list[str], train: str, validation: str) -> None:
    agent = make_agent(*names)
    agent.check(set())
    agent.check({}, modes=["train", "val"])
    assert await run(agent, "train") == train
    for mode in ("val", "test", None):
        assert await run(agent, mode) == validation


@given(st.sets(st.sampled_from(METHODS), min_size=1), st.sampled_from(["train", "val", "test", None]))
def test_the_chosen_method_is_one_that_the_agent_has_for_the_mode(names: set[str], mode: str | None) -> None:
    agent = make_agent(*names)
    other = "validation_" if mode == "train" else "training_"
    fitting = [name for name in names if not name.startswith(other)]
    if not fitting:
        with pytest.raises(AgentSignatureError, match="must define rollout or rollout_async"):
            agent.is_async_for(mode)
        with pytest.raises(AgentSignatureError):
            agent.check([], modes=[mode or "val"])
        agent.check([])  # it can do something
    else:
        specific = [name for name in fitting if not name.startswith("rollout")] or fitting
        assert agent.is_async_for(mode) == any(name.endswith("_async") for name in specific)


async def test_the_methods_of_the_base_delegate() -> None:
    class Agent(LitAgent[dict[str, Any]]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return task

        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            return -task

        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            return super().training_rollout(task + 1, resources, rollout)

    agent, rollout = Agent(), make_rollout()
    assert agent.training_rollout(1, {}, rollout) == 2
    assert agent.validation_rollout(1, {}, rollout) == 1
    assert await agent.training_rollout_async(1, {}, rollout) == -1
    assert await agent.validation_rollout_async(1, {}, rollout) == -1


def test_an_inherited_method_counts() -> None:
    class Child(type(make_agent("rollout_async"))):  # type: ignore[misc]
        pass

    assert Child().is_async_for("train")


def test_a_subclass_need_not_call_init() -> None:
    class Agent(LitAgent):
        def __init__(self, tool: str) -> None:
            self.tool = tool

        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    agent = Agent("hammer")
    agent.check(set())
    assert (agent.trained_agents, agent.declared_resources) == (None, {})
    assert agent.call(1, {}, make_rollout()) == 1.0


def test_trained_agents_is_a_pattern() -> None:
    class Agent(LitAgent):
        trained_agents = "("

        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    with pytest.raises(AgentSignatureError, match="not a regular expression"):
        Agent(trained_agents="[")
    assert Agent(trained_agents="a|b").trained_agents == "a|b"
    bad = Agent.__new__(Agent)
    with pytest.raises(AgentSignatureError, match="not a regular expression"):
        bad.check(set())


def test_methods_of_the_wrong_kind_are_named_before_the_run_or_when_called() -> None:
    class Coroutine(LitAgent):
        async def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:  # type: ignore[override]
            return 1.0

    class Yielding(LitAgent):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            yield 1.0

    with pytest.raises(AgentSignatureError, match=r"Coroutine.training_rollout is asynchronous; rename it"):
        Coroutine().check(set())
    with pytest.raises(AgentSignatureError, match="training_rollout_async"):
        Coroutine().call(1, {}, make_rollout(mode="train"))
    with pytest.raises(AgentSignatureError, match="yields"):
        Yielding().check(set())


class Reordered(LitAgent):
    def rollout(self, task: Any, rollout: Any, resources: Any) -> Any:  # type: ignore[override]
        return task, resources, rollout.rollout_id


class ByKeyword(LitAgent):
    def rollout(self, task: Any, *, resources: Any, rollout: Any) -> Any:
        return task, resources, rollout.rollout_id


class Own(LitAgent):
    def rollout(self, example: Any, /, rollout: Any, **given: Any) -> Any:  # type: ignore[override]
        return example, given["resources"], rollout.rollout_id


class ByKeywordAsync(LitAgent):
    async def rollout_async(self, task: Any, *, rollout: Any, resources: Any) -> Any:
        return task, resources, rollout.rollout_id


@pytest.mark.parametrize("kind", [Reordered, ByKeyword, Own, ByKeywordAsync])
async def test_resources_and_rollout_are_given_by_keyword(kind: type[LitAgent]) -> None:
    agent, rollout = kind(), make_rollout("ro-7")
    agent.check({})
    expected = (1, {"a": 2}, "ro-7")
    if agent.is_async:
        assert await agent.call_async(1, {"a": 2}, rollout) == expected
        assert await agent.training_rollout_async(1, {"a": 2}, rollout) == expected
        assert await agent.validation_rollout_async(1, {"a": 2}, rollout) == expected
    else:
        assert agent.call(1, {"a": 2}, rollout) == expected
        assert agent.training_rollout(1, {"a": 2}, rollout) == expected
        assert agent.validation_rollout(1, {"a": 2}, rollout) == expected


def test_a_method_that_cannot_be_called_so_is_named_before_the_run() -> None:
    agent = agent_with(rollout=lambda self, task, model: 1.0)
    with pytest.raises(
        AgentSignatureError, match=r"Agent.rollout has the parameters \(task, model\).*by keyw"
    ):
        agent.check({})


async def test_an_asynchronous_method_that_is_none_is_named() -> None:
    agent = agent_with(rollout_async=lambda self, task, resources, rollout: 1.0)
    with pytest.raises(AgentSignatureError, match=r"Agent.rollout_async is not asynchronous; rename it"):
        await agent.call_async(1, {}, make_rollout())
