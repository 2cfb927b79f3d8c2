"""Errors that a Trainer raises before a run starts: arguments that nothing reads, runs that cannot work."""

from pathlib import Path
from typing import Any

import pytest
from unit_helpers import ReachedRay

from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, ProxyLLM
from raylight.algorithms.base import FastAlgorithm
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import GRPO
from raylight.errors import AgentSignatureError, ConfigError, DatasetError, ModelNotFoundError
from raylight.rewards.terms import RelativeLength, agent_reward
from raylight.tasks.stream import Stream
from raylight.traces.messages import TraceToMessages
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("planned_runs")


def plain(task: int) -> float:
    return 1.0


class Fast(FastAlgorithm):
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None: ...


def reaches_ray(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ReachedRay):
        trainer.fit(*args, **kwargs)


# what nothing reads


@pytest.mark.parametrize(
    ("unread", "named"),
    [
        ({"engine": {"replicas": 2}}, "engine"),
        ({"learner": {"n": 2}}, "learner"),
        ({"n_learners": 2}, "n_learners"),
        ({"port": 9000}, "port"),
        ({"seed": 3}, "seed"),
        ({"seed": 0}, "seed"),
        ({"port": 9000, "n_learners": 2}, "n_learners, port"),
        ({"group_reward": agent_reward()}, "group_reward"),
    ],
)
def test_an_algorithm_with_its_own_loop_reads_no_settings_of_a_policy(
    unread: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"nothing reads {named}: Fast serves no model"):
        Trainer(algorithm=Fast(), **unread).fit(plain, [1])


def test_a_policy_reads_them(hollow_model: str, planned_runs: list[Any]) -> None:
    trainer = Trainer(
        algorithm=GRPO(model=hollow_model), engine={"replicas": 2}, n_learners=2, port=9000, seed=3
    )
    reaches_ray(trainer, rollout(lambda task, llm: 1.0), [1] * 16)
    settings = planned_runs[0].settings
    serving, training = settings.serving, settings.training
    assert (serving.engine.replicas, serving.engine.port, training.learner.n) == (2, 9000, 2)
    assert (settings.seed, training.total_steps) == (3, 1)
    assert (serving.engine.kind, serving.model_path) == ("transformers", hollow_model)
    assert Trainer(algorithm=GRPO(model=hollow_model)).seed == 0


def test_a_policy_reads_a_group_reward(hollow_model: str, planned_runs: list[Any]) -> None:
    trainer = Trainer(
        algorithm=GRPO(model=hollow_model), group_reward="raylight.rewards.terms:RelativeLength"
    )
    reaches_ray(trainer, rollout(lambda task, llm: 1.0), [1] * 16)
    assert isinstance(planned_runs[0].settings.group_reward, RelativeLength)

    def own(group: list[Any]) -> list[float]:
        return [0.0] * len(group)

    assert Trainer(algorithm=GRPO(model=hollow_model), group_reward=own).group_reward is own
    for wrong in (3, {"type": "raylight.types:Attempt"}):
        with pytest.raises(ConfigError):
            Trainer(algorithm=GRPO(model=hollow_model), group_reward=wrong)


def test_a_dataset_without_an_end_needs_a_number_of_steps(hollow_model: str, planned_runs: list[Any]) -> None:
    agent, stream = rollout(lambda task, llm: 1.0), Stream([1, 2, 3])
    with pytest.raises(ConfigError, match=r"length of Stream, the train_dataset, is not known.*set n_steps"):
        Trainer(algorithm=GRPO(model=hollow_model)).fit(agent, stream)
    reaches_ray(Trainer(algorithm=GRPO(model=hollow_model, n_steps=3)), agent, stream)
    training = planned_runs[0].settings.training
    assert training.total_steps == 3


@pytest.mark.parametrize(
    ("unread", "named"),
    [
        ({"llm_proxy": ProxyLLM(endpoint="http://p")}, "nothing reads llm_proxy: .* model of GRPO"),
        ({"adapter": TraceToMessages()}, "nothing reads the adapter"),
        ({"adapter": TracerTraceToTriplet()}, "nothing reads the adapter"),
    ],
)
def test_a_policy_reads_no_proxy_and_of_an_adapter_the_agents_only(
    unread: dict[str, Any], named: str, hollow_model: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        Trainer(algorithm=GRPO(model=hollow_model), **unread).fit(rollout(lambda task, llm: 1.0), [1])


# what a run cannot do is said before it starts


@pytest.mark.parametrize(
    ("agent", "arguments", "error", "message"),
    [
        (lambda task, llm: 1.0, {"train_dataset": None}, DatasetError, "train_dataset is missing"),
        (lambda task, llm: 1.0, {"train_dataset": []}, DatasetError, "train_dataset is empty"),
        (
            lambda task, llm: 1.0,
            {"train_dataset": [1], "val_dataset": []},
            DatasetError,
            "val_dataset is empty",
        ),
        (lambda task, llm, judge: 1.0, {"train_dataset": [1]}, AgentSignatureError, "needs 'judge'"),
    ],
)
def test_a_policy_needs_tasks_and_an_agent_that_can_be_called(
    agent: Any, arguments: dict[str, Any], error: type[Exception], message: str, hollow_model: str
) -> None:
    with pytest.raises(error, match=message):
        Trainer(algorithm=GRPO(model=hollow_model)).fit(agent, **arguments)


def test_an_agent_needs_a_method_for_validation_only_where_there_is_any(hollow_model: str) -> None:
    class Trains(LitAgent):
        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    reaches_ray(Trainer(algorithm=GRPO(model=hollow_model)), Trains(), [1])
    with pytest.raises(AgentSignatureError, match="Trains must define rollout"):
        Trainer(algorithm=GRPO(model=hollow_model)).fit(Trains(), [1], [2])


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model folder"):
        Trainer(algorithm=GRPO(model=str(tmp_path / "nowhere"))).fit(rollout(lambda task, llm: 1.0), [1])


def test_a_rollout_must_fit_into_a_micro_batch(hollow_model: str) -> None:
    trainer = Trainer(
        algorithm=GRPO(model=hollow_model),
        engine={"max_model_len": 4096},
        learner={"max_tokens_per_micro_batch": 1024},
    )
    with pytest.raises(ConfigError, match=r"4096 tokens.*1024.*lower the first or raise the second"):
        trainer.fit(rollout(lambda task, llm: 1.0), [1])


def test_the_baseline_says_before_the_run_which_parameter_nothing_fills() -> None:
    with pytest.raises(AgentSignatureError, match="needs 'prompt_template'"):
        Trainer(algorithm=Baseline()).fit(lambda task, prompt_template: 1.0, [1])


def test_another_algorithm_may_add_a_resource_itself(caplog: pytest.LogCaptureFixture) -> None:
    reaches_ray(
        Trainer(algorithm=Fast(), resources={"table": 1}), lambda task, prompt_template, table: 1.0, [1]
    )
    assert (
        "needs 'prompt_template', but there is no such resource; available: resources, rollout, table, task"
        in caplog.text
    )
    caplog.clear()
    reaches_ray(Trainer(algorithm=Fast(), resources={"table": 1}), lambda task, table: 1.0, [1])
    assert caplog.text == ""


class Yielding(LitAgent):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        yield 1.0


class Misnamed(LitAgent):
    def rollout(self, task: Any, llm: Any) -> float:  # type: ignore[override]
        return 1.0


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (LitAgent(), "must define rollout"),
        (Yielding(), "yields"),
        (Misnamed(), "Misnamed.rollout has the parameters"),
    ],
)
@pytest.mark.parametrize("algorithm", [Fast(), Baseline()])
def test_every_algorithm_needs_an_agent_that_can_be_called(
    algorithm: Any, agent: LitAgent, message: str
) -> None:
    with pytest.raises(AgentSignatureError, match=message):
        Trainer(algorithm=algorithm).fit(agent, [1])


def test_an_algorithm_that_serves_nothing_needs_endpoints() -> None:
    with pytest.raises(ConfigError, match=r"model: Baseline serves no model.*LLM\(endpoint="):
        Trainer(algorithm=Baseline()).fit(rollout(model=LLM(name="m"))(lambda task, model: 1.0), [1])
    given = {"model": LLM(endpoint="http://m/v1", model="m")}
    reaches_ray(
        Trainer(algorithm=Baseline(), resources=given),
        rollout(model=LLM(name="m"))(lambda task, model: 1.0),
        [1],
    )
