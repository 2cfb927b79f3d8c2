"""A user's mistake raises one typed error with a remedy, and leaves the cluster unchanged."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import Cluster
from run_output import metric_rows

import raylight as rl
from raylight import errors
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder

TRAIN, VAL = additions(0)


def fit(
    agent: Any,
    tmp_path: Path,
    *,
    train: Any = TRAIN,
    val: Any = None,
    algorithm: dict | None = None,
    **trainer: Any,
) -> dict:
    """Train the quickstart's model for two steps of 32 rollouts."""
    settings = {"model": STARTER_MODEL, "n_steps": 2, "tasks_per_step": 4, "lr": 2e-4, **(algorithm or {})}
    made = rl.Trainer(
        algorithm=rl.GRPO(**settings), n_runners=2, output_dir=tmp_path, progress=False, **trainer
    )
    return made.fit(agent, train, val_dataset=val)


def agents() -> dict[str, Callable[..., Any]]:
    """Return agents that give nothing to learn.

    They are local functions and therefore pickled by value: runners cannot import this test.
    """

    def raises_always(task: dict, llm: Any) -> float:
        raise ValueError("my tool broke")

    def returns_a_string(task: dict, llm: Any) -> Any:
        return "good"

    def returns_none(task: dict, llm: Any) -> None:
        return None

    def never_calls(task: dict, llm: Any) -> float:
        return 1.0

    return {agent.__name__: agent for agent in (raises_always, returns_a_string, returns_none, never_calls)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "raises_always",
            errors.RolloutsFailedError,
            "all 32 rollouts failed, 32 of them with ValueError: my tool broke",
        ),
        ("returns_a_string", errors.RewardError, "of type str; give a float"),
        ("returns_none", errors.RolloutsFailedError, "the agent returns None; return a float"),
        ("never_calls", errors.EmptyTraceError, "the agent must use llm.endpoint"),
    ],
)
def test_an_agent_that_gives_nothing_to_learn(
    name: str, error: type[Exception], message: str, cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        fit(rl.rollout(agents()[name]), tmp_path)
    cluster.assert_clean()


def importable_only_here(task: dict, llm: Any) -> float:
    return 1.0


@pytest.mark.slow
def test_an_agent_whose_module_the_runners_cannot_import(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(
        errors.RunnerLostError, match=r"No module named 'test_bad_input'.* must be importable"
    ):
        fit(importable_only_here, tmp_path)
    cluster.assert_clean()


@pytest.mark.slow
def test_failures_on_some_tasks_are_counted_and_not_trained(cluster: Cluster, tmp_path: Path) -> None:
    @rl.rollout
    async def sometimes(task: dict, llm: rl.LLM) -> float:
        from raylight.quickstart.agent import adder

        if task["a"] % 2:
            raise KeyError("unlucky")
        return await adder(task, llm)

    tasks = [{"a": 10 + i, "b": 20} for i in range(4)]
    summary = fit(sometimes, tmp_path, train=tasks)
    assert summary["rollouts"] == 64
    assert summary["rollouts_failed"] == 32
    assert summary["failures"] == {"KeyError: 'unlucky'": 32}
    rows = metric_rows(tmp_path)
    assert [(row["train/failed"], row["train/trained"]) for row in rows] == [(16, 16), (16, 16)]
    cluster.assert_clean()


def test_more_learners_than_the_cluster_can_place(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(
        errors.PlacementError, match=r"cannot place 64 x 0.5 CPU .* within 1 s .*; it has 2 CPU"
    ):
        fit(adder, tmp_path, learner={"n": 64, "placement_timeout_s": 1})
    cluster.assert_clean()


@pytest.mark.slow
def test_more_runners_than_the_cluster_can_place(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(errors.PlacementError, match=r"of 2 runners cannot be placed: each needs 1.5 CPU"):
        fit(adder, tmp_path, runner={"num_cpus": 1.5, "placement_timeout_s": 10})
    cluster.assert_clean()


@pytest.mark.slow
def test_a_port_that_is_taken(cluster: Cluster, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(errors.PortInUseError, match="is taken"):
            fit(adder, tmp_path, port=taken.getsockname()[1])
    cluster.assert_clean()


@pytest.mark.slow("unit/trainer/components/test_parity.py shows the error, test_more_learners the clean end")
def test_a_broken_model_folder(cluster: Cluster, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (broken / name).write_text("{}")
    with pytest.raises(errors.EngineStartError, match=r"config\.json has no vocab_size"):
        fit(adder, tmp_path / "run", algorithm={"model": str(broken)})
    cluster.assert_clean()


@pytest.mark.slow("unit/runner/test_actor.py shows the error, test_more_learners the clean end")
def test_an_agent_that_cannot_be_pickled(cluster: Cluster, tmp_path: Path) -> None:
    import threading

    lock = threading.Lock()

    @rl.rollout
    def locked(task: dict, llm: rl.LLM) -> float:
        with lock:
            return 1.0

    with pytest.raises(errors.ConfigError, match="cannot be sent to the runners"):
        fit(locked, tmp_path)
    cluster.assert_clean()


@pytest.mark.slow
def test_sampling_that_the_learner_cannot_reproduce(cluster: Cluster, tmp_path: Path) -> None:
    @rl.rollout
    async def biased(task: dict, llm: rl.LLM) -> float:
        from openai import AsyncOpenAI

        from raylight.quickstart.additions import is_right, question

        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            reply = await client.chat.completions.create(
                model=llm.model,
                messages=[{"role": "user", "content": question(task)}],
                logit_bias={"5": 1},
                max_tokens=8,
            )
        return float(is_right(task, reply.choices[0].message.content or "") or task["a"] % 3 == 0)

    with pytest.raises(
        errors.OffPolicySamplingError, match=r"an agent sampled .* with logit_bias=.*5.*1.* \(call"
    ):
        fit(biased, tmp_path, algorithm={"tasks_per_step": 16})
    cluster.assert_clean()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda path: fit(adder, path, train=[]), errors.DatasetError, "train_dataset is empty"),
        (lambda path: fit(adder, path, train=None), errors.DatasetError, "train_dataset is missing"),
        (
            lambda path: fit(adder, path, algorithm={"model": "/no/such"}),
            errors.ModelNotFoundError,
            "no model folder /no/such",
        ),
        (
            lambda path: fit(adder, path, algorithm={"model": "no/such"}),
            errors.ModelNotFoundError,
            "hf download no/such",
        ),
        (
            lambda path: fit(adder, path, algorithm={"lrr": 1}),
            errors.ConfigError,
            "no setting 'lrr'; it has: lr",
        ),
        (lambda path: fit(adder, path, engine={"port": 0}), errors.ConfigError, "EngineConfig.port"),
        (lambda path: fit("agent", path), errors.ConfigError, "is not a dotted name"),
        (lambda path: fit(5, path), errors.ConfigError, "decorated with @rollout"),
        (
            lambda path: fit(lambda task, tools: 1.0, path),
            errors.AgentSignatureError,
            "'tools', but there is no such resource",
        ),
    ],
)
def test_mistakes_found_before_anything_starts(
    call: Callable[[Path], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    import ray

    with pytest.raises(error, match=message):
        call(tmp_path)
    assert not ray.is_initialized()
