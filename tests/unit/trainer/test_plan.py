"""Plans of runs: merged resources, the trained model among them, and the pattern of trained agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.prompts import PromptTemplate
from raylight.agent.resources import LLM, ProxyLLM
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import GRPO
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig, RunnerConfig, StoreConfig
from raylight.errors import AgentSignatureError, ConfigError
from raylight.runner.actor import RunnerPayload
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.inputs import Inputs
from raylight.trainer.plan import (
    MODEL_NAME,
    PolicyPlan,
    RunPlan,
    merge_resources,
    must_have_endpoints,
    with_policy,
    with_sampling,
)
from raylight.trainer.policy_checks import idle_hardware, mismatch_limit, trained_agents_pattern
from raylight.trainer.trainer import Trainer

POLICY = LLM(endpoint="http://engine", model="policy", traced=True)
JUDGE = LLM(endpoint="http://judge/v1", model="judge")


def an_agent(**declared: Any) -> LitAgent:
    return rollout(**declared)(lambda task: 1.0) if declared else rollout(lambda task: 1.0)


# resources


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


# what is written down


def common(**more: Any) -> dict[str, Any]:
    return {
        "name": "run-1",
        "payload": RunnerPayload(an_agent(), secret="s3cr3t"),
        "runner": RunnerConfig(),
        "store": StoreConfig(),
        "store_path": "/s/store.db",
        "resources": {"b": JUDGE, "a": 1},
        **more,
    }


def test_a_plan_is_written_as_yaml_without_secrets() -> None:
    resolved = RunPlan(**common()).resolved()
    text = yaml.safe_dump(resolved)
    assert yaml.safe_load(text) == resolved
    assert "s3cr3t" not in text
    assert (resolved["resources"], resolved["store"]["lease_seconds"]) == (["a", "b"], 60.0)
    assert RunPlan(**common(store=StoreClient(StoreService()))).resolved()["store"] == "given in code"


def test_the_plan_of_a_policy_is_written_whole() -> None:
    algorithm = GRPO(model="m", rollout={"retry_condition": {"timeout", "failed"}})
    plan = PolicyPlan(
        **common(),
        model_path="/models/m",
        algorithm=algorithm,
        engine=EngineConfig(),
        learner=LearnerConfig(),
        checkpoint=CheckpointConfig(),
        output_dir="",
        state_url="state",
        seed=4,
        total_steps=7,
        trained_agents="plan.*",
    )
    resolved = plan.resolved()
    assert yaml.safe_load(yaml.safe_dump(resolved)) == resolved
    assert (resolved["seed"], resolved["total_steps"], resolved["trained_agents"]) == (4, 7, "plan.*")
    assert (resolved["algorithm"]["name"], resolved["algorithm"]["model"]) == ("GRPO", "/models/m")
    assert resolved["algorithm"]["rollout"]["retry_condition"] == ["failed", "timeout"]


# whose calls are trained


def trained(of_agent: str | None, adapter: Any) -> str | None:
    trainer = Trainer(algorithm=GRPO(model="m"), adapter=adapter)
    return trained_agents_pattern(
        trainer, Inputs(rollout(trained_agents=of_agent)(lambda task: 1.0), None, None)
    )


def test_the_pattern_comes_from_the_agent_or_the_adapter() -> None:
    assert trained(None, None) is None
    assert trained("plan", None) == "plan"
    assert trained(None, TracerTraceToTriplet(agent_match="code")) == "code"
    assert trained("code", TracerTraceToTriplet(agent_match="code")) == "code"


def test_two_patterns_that_differ_are_an_error() -> None:
    with pytest.raises(ConfigError, match="trained_agents='plan' and the adapter agent_match='code'"):
        trained("plan", TracerTraceToTriplet(agent_match="code"))


def test_an_adapter_without_a_pattern_would_not_be_read() -> None:
    with pytest.raises(ConfigError, match="GRPO trains on the tokens that the engine recorded"):
        trained("plan", TracerTraceToTriplet())


def test_a_pattern_is_one() -> None:
    with pytest.raises((ConfigError, AgentSignatureError), match="regular expression"):
        trained("(", None)
    with pytest.raises(ConfigError, match="regular expression"):
        trained(None, TracerTraceToTriplet(agent_match="("))


@pytest.mark.parametrize(
    ("engine", "learner", "experts", "given", "expected"),
    [
        ("float32", "fp32", None, 0.0, 1e-3),
        ("bfloat16", "fp32", None, 0.0, 0.3),
        ("float32", "bf16", 1, 0.0, 0.3),
        ("bfloat16", "bf16", 128, 0.0, 2.0),
        ("float32", "fp32", 128, 0.0, 1e-3),
        ("bfloat16", "bf16", 128, 0.01, 0.01),
    ],
)
def test_rounding_of_half_precision_and_of_routers_is_no_mismatch(
    engine: Any, learner: Any, experts: int | None, given: float, expected: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_experts": experts}}))
    algorithm = GRPO(model="m", max_logprob_mismatch=given)
    limit = mismatch_limit(algorithm, EngineConfig(dtype=engine), LearnerConfig(dtype=learner), str(tmp_path))
    assert limit == expected


@pytest.mark.parametrize(
    ("engine", "learner", "resources", "expected"),
    [
        ({}, {}, {"CPU": 2.0}, []),
        (
            {},
            {},
            {"CPU": 16.0},
            ["one thread, and the cluster has 16 cores: set learner={'num_threads': 16}"],
        ),
        ({}, {"num_threads": 8}, {"CPU": 16.0}, []),
        ({}, {"n": 8}, {"CPU": 16.0}, []),
        ({"num_gpus": 1}, {}, {"CPU": 2.0, "GPU": 8.0}, ["has 8 GPUs, and the learners compute on CPUs"]),
        ({"num_gpus": 1}, {"num_gpus": 1}, {"CPU": 2.0, "GPU": 2.0}, []),
        ({"num_gpus": 1}, {"num_gpus": 1, "n": 4}, {"CPU": 2.0, "GPU": 8.0}, ["3 of 8 GPUs"]),
        (
            {"num_gpus": 1, "replicas": 2, "args": {"tensor_parallel_size": 2}},
            {"num_gpus": 1, "n": 4},
            {"CPU": 2.0, "GPU": 8.0},
            [],
        ),
        ({"num_gpus": 0.4}, {"num_gpus": 0.6}, {"GPU": 1.0}, []),
    ],
)
def test_idle_hardware_is_noted(engine: Any, learner: Any, resources: Any, expected: list[str]) -> None:
    notes = idle_hardware(EngineConfig(**engine), LearnerConfig(**learner), resources)
    assert len(notes) == len(expected)
    assert all(text in note for text, note in zip(expected, notes, strict=True))


def test_other_sampling_parameters_are_for_the_trained_model_alone() -> None:
    trained = LLM(model=MODEL_NAME, traced=True, sampling_parameters={"temperature": 0.7, "max_tokens": 8})
    judge, table = LLM(endpoint="http://j/v1", model="j"), {"a": 1}
    changed = with_sampling({"llm": trained, "judge": judge, "table": table}, {"temperature": 0.0})
    assert changed["llm"].sampling_parameters == {"temperature": 0.0, "max_tokens": 8}
    assert (changed["judge"], changed["table"]) == (judge, table)
    with pytest.raises(ConfigError, match="temperature"):
        GRPO(model="m", val_sampling_parameters={"temperature": -1})
