"""Resources of runs: merged, and with the trained model among them."""

from typing import Any

import pytest

from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.prompts import PromptTemplate
from raylight.agent.resources import LLM, ProxyLLM
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import GRPO
from raylight.config import MODEL_NAME
from raylight.errors import ConfigError
from raylight.trainer.spec.run_resources import (
    merge_resources,
    must_have_endpoints,
    with_policy,
    with_sampling,
)

POLICY = LLM(endpoint="http://engine", model="policy", traced=True)
JUDGE = LLM(endpoint="http://judge/v1", model="judge")


def an_agent(**declared: Any) -> LitAgent:
    return rollout(**declared)(lambda task: 1.0) if declared else rollout(lambda task: 1.0)


def test_what_the_trainer_is_given_goes_over_what_the_agent_declares() -> None:
    agent = an_agent(model=LLM(name="declared"), prompt=PromptTemplate(template="hi"))
    given = {"model": JUDGE, "table": [1]}
    assert merge_resources(agent, given) == {
        "model": JUDGE,
        "prompt": PromptTemplate(template="hi"),
        "table": [1],
    }
    assert merge_resources(agent, {}) == agent.declared_resources
    assert merge_resources(an_agent(), {}) == {}
    assert given == {"model": JUDGE, "table": [1]}


@pytest.mark.parametrize("name", ["task", "rollout", "resources"])
def test_names_that_raylight_gives_itself_are_taken(name: str) -> None:
    with pytest.raises(ConfigError, match=f"resources cannot be named {name}"):
        merge_resources(an_agent(), {name: 1})


def test_the_policy_is_added_as_llm_where_nothing_else_is_open() -> None:
    assert with_policy({}, POLICY) == {"llm": POLICY, "main_llm": POLICY}
    fixed = {"judge": JUDGE, "tokenizer": LLM(name="t", tokenizer_only=True)}
    assert with_policy(fixed, POLICY) == {**fixed, "llm": POLICY, "main_llm": POLICY}


def test_agents_of_agent_lightning_find_it_as_main_llm_unless_something_else_is_called_so() -> None:
    rollout(lambda task, main_llm: 1.0).check(with_policy({}, POLICY))
    assert with_policy({"main_llm": JUDGE}, POLICY) == {"main_llm": JUDGE, "llm": POLICY}
    assert with_policy({"main_llm": LLM(name="m")}, POLICY) == {"main_llm": POLICY}


def test_every_open_model_is_the_policy_and_keeps_what_the_user_said_of_it() -> None:
    given = {
        "planner": LLM(name="m", agent_id="planner", sampling_parameters={"temperature": 0.5}),
        "judge": JUDGE,
        "coder": LLM(),
        "proxied": ProxyLLM(),
    }
    filled = with_policy(given, POLICY)
    assert filled["planner"] == POLICY.model_copy(
        update={"agent_id": "planner", "sampling_parameters": {"temperature": 0.5}}
    )
    assert filled["coder"] == filled["proxied"] == POLICY
    assert (filled["judge"], "llm" in filled) == (JUDGE, False)
    scoped = filled["planner"].for_attempt("ro-1", "at-1", "s")
    assert scoped.endpoint == "http://engine/rollout/ro-1/attempt/at-1/agent/planner/v1"
    assert given["coder"] == LLM()


def test_a_fixed_model_cannot_have_the_policys_name() -> None:
    with pytest.raises(ConfigError, match="the resource `llm` has an endpoint, and no resource is left"):
        with_policy({"llm": JUDGE}, POLICY)
    assert with_policy({"llm": JUDGE, "model": LLM(name="m")}, POLICY) == {"llm": JUDGE, "model": POLICY}


def test_models_that_nothing_serves_are_named() -> None:
    must_have_endpoints(
        {"judge": JUDGE, "tokenizer": LLM(tokenizer_only=True), "table": 1}.items(), Baseline()
    )
    with pytest.raises(ConfigError, match=r"^a, b: Baseline serves no model"):
        must_have_endpoints({"a": LLM(), "judge": JUDGE, "b": ProxyLLM(model="m")}.items(), Baseline())


def test_other_sampling_parameters_are_for_the_trained_model_alone() -> None:
    trained = LLM(model=MODEL_NAME, traced=True, sampling_parameters={"temperature": 0.7, "max_tokens": 8})
    judge, table = LLM(endpoint="http://j/v1", model="j"), {"a": 1}
    changed = with_sampling(
        {"llm": trained, "judge": judge, "table": table}, {"temperature": 0.0}, {"policy": "policy"}
    )
    assert changed["llm"].sampling_parameters == {"temperature": 0.0, "max_tokens": 8}
    assert (changed["judge"], changed["table"]) == (judge, table)
    with pytest.raises(ConfigError, match="temperature"):
        GRPO(model="m", val_sampling_parameters={"temperature": -1})


def test_of_several_models_each_resource_gets_the_one_that_it_names() -> None:
    models = ("planner", "coder")
    declared = {
        "planner": LLM(),
        "second": LLM(name="coder", sampling_parameters={"top_p": 0.5}),
        "judge": JUDGE,
    }
    filled = with_policy(declared, POLICY, models)
    assert filled["planner"] == POLICY.model_copy(update={"model": "planner"})
    assert filled["second"] == POLICY.model_copy(
        update={"model": "coder", "sampling_parameters": {"top_p": 0.5}}
    )
    assert filled["judge"] == JUDGE
    assert "llm" not in filled
    added = with_policy({}, POLICY, models)
    assert {name: llm.model for name, llm in added.items()} == {
        "main_llm": "planner",
        "llm": "planner",
        "planner": "planner",
        "coder": "coder",
    }
    with pytest.raises(ConfigError, match=r"the resource `m` names none of the run's models.*planner, coder"):
        with_policy({"m": LLM()}, POLICY, models)


def test_a_run_with_opponents_needs_an_agent_that_can_call_them() -> None:
    models = ("policy", "opponent")
    filled = with_policy({"llm": LLM(), "opponent": LLM()}, POLICY, models)
    assert (filled["llm"].model, filled["opponent"].model) == ("policy", "opponent")
    assert with_policy({}, POLICY, models)["opponent"].model == "opponent"
    for declared in ({"llm": LLM(), "enemy": LLM()}, {"opponent": JUDGE}):
        with pytest.raises(ConfigError, match="opponents: none of the agent's models is the `opponent`"):
            with_policy(declared, POLICY, models)
    assert with_policy({"enemy": LLM(name="opponent")}, POLICY, models)["enemy"].model == "opponent"


def test_pinned_versions_take_the_place_of_several_models() -> None:
    filled = with_policy({}, POLICY, ("planner", "coder"))
    changed = with_sampling(filled, {"top_k": 3}, {"planner": "planner@step-2", "coder": "coder@step-2"})
    assert changed["coder"].model == "coder@step-2"
    assert changed["llm"].model == "planner@step-2"
    assert changed["llm"].sampling_parameters == {"top_k": 3}
