"""Evaluation runs without a cluster: inputs, written files, and the absence of learners."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_settings import KnownFacts
from unit_helpers import ReachedRay, make_finished, make_generation

from raylight.agent.decorators import rollout
from raylight.agent.resources import LLM
from raylight.algorithms.policy import GRPO
from raylight.errors import AgentSignatureError, ConfigError, DatasetError, ModelNotFoundError
from raylight.semconv import OUTPUT_MESSAGES
from raylight.trainer.components.endpoints import fill_resources
from raylight.trainer.output.displays.tables import print_scores
from raylight.trainer.output.sampled_rollouts import sampled_rollout
from raylight.trainer.output.scores import measure
from raylight.trainer.runs.eval_run import (
    EvalSettings,
    describe_evaluation,
    eval_line,
    find_adapter,
    ignored_sampling,
    rewards_by_name,
)
from raylight.trainer.spec.task_files import read_tasks
from raylight.trainer.trainer import Trainer
from raylight.types import Failure, FinishedRollout, Span
from raylight.weights.peft_files import read_adapter

BROKEN = Failure(kind="agent", error="ValueError: no tool")


@rollout
def plain(task: int, llm: LLM) -> float:
    return 1.0


# it cannot train


def test_an_evaluation_has_no_learners(hollow_model: str, planned_runs: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ReachedRay):
        Trainer(output_dir=tmp_path / "out").evaluate(plain, [1], model=hollow_model)
    (run,) = planned_runs
    assert not hasattr(run.settings, "training")
    assert not hasattr(run.components(print, True), "learners")


# what it is given


def test_a_plan_has_what_was_given(hollow_model: str, planned_runs: list[Any], tmp_path: Path) -> None:
    trainer = Trainer(
        algorithm=GRPO(model=hollow_model),
        engine={"replicas": 2},
        n_runners=3,
        seed=5,
        output_dir=tmp_path / "out",
    )
    with pytest.raises(ReachedRay):
        trainer.evaluate(
            plain, [1, 2], samples=4, sampling={"temperature": 0.5}, rollout={"timeout_seconds": 7}
        )
    (run,) = planned_runs
    settings = run.settings
    serving = settings.serving
    assert (serving.model_path, serving.engine.replicas, serving.engine.kind) == (
        hollow_model,
        2,
        "transformers",
    )
    assert (settings.runner.n, settings.seed, settings.rollout.timeout_seconds) == (3, 5, 7)
    assert serving.sampling_overrides == {"temperature": 0.5}
    config = json.loads(json.dumps(run.resolved()))
    assert (config["sampling"], config["samples"], config["tasks"]) == ({"temperature": 0.5}, 4, 2)
    assert (config["seed"], config["model"]) == (5, hollow_model)
    assert settings.store_path == str(tmp_path / "out" / "eval.db")


def test_other_files_of_the_folder_are_left_alone(
    hollow_model: str, planned_runs: list[Any], tmp_path: Path
) -> None:
    """It may be the run directory of the very model that is scored."""
    run = tmp_path / "run"
    for name in (
        "checkpoint/weights",
        "best/best.json",
        "config.yaml",
        "metrics.jsonl",
        "store.db",
        "eval.json",
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("kept")
    with pytest.raises(ReachedRay):
        Trainer(output_dir=run).evaluate(plain, [1], model=hollow_model)
    there = {path.relative_to(run).as_posix(): path.read_text() for path in run.rglob("*") if path.is_file()}
    assert there.pop("eval.jsonl") == ""
    assert set(there) == {"checkpoint/weights", "best/best.json", "config.yaml", "metrics.jsonl", "store.db"}
    assert set(there.values()) == {"kept"}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"model": None}, ConfigError, "no model to score"),
        ({"model": "/no/such"}, ModelNotFoundError, "/no/such"),
        ({"lora_adapter": "/no/such"}, ModelNotFoundError, "no adapter folder /no/such"),
        ({"dataset": []}, DatasetError, "empty"),
        ({"dataset": None}, DatasetError, "missing"),
        ({"agent": lambda: 1.0}, AgentSignatureError, "task"),
        ({"agent": "nowhere:agent"}, ConfigError, "nowhere"),
        ({"agent": rollout(lambda task, tools: 1.0)}, AgentSignatureError, "tools"),
        ({"samples": 0}, ConfigError, "samples"),
        ({"no_such": 1}, ConfigError, "no_such"),
    ],
)
def test_what_does_not_fit_is_said_before_ray(
    given: dict[str, Any],
    error: type[Exception],
    says: str,
    hollow_model: str,
    planned_runs: list[Any],
    tmp_path: Path,
) -> None:
    settings = {"agent": plain, "dataset": [1], "model": hollow_model} | given
    with pytest.raises(error, match=says):
        Trainer(output_dir=tmp_path / "out").evaluate(**settings)
    assert planned_runs == []


def test_an_upstream_model_is_scored_too_but_takes_neither_adapter_nor_budget(
    planned_runs: list[Any], tmp_path: Path
) -> None:
    trainer = Trainer(engine={"url": "http://127.0.0.1:1/v1"}, output_dir=tmp_path)
    with pytest.raises(ReachedRay):
        trainer.evaluate(plain, [1], model="gpt-9")
    serving = planned_runs[0].settings.serving
    assert (serving.model_path, serving.engine.upstream_model) == ("", "gpt-9")
    assert planned_runs[0].resolved()["model"] == "gpt-9"
    with pytest.raises(ConfigError, match="no adapter"):
        trainer.evaluate(plain, [1], model="gpt-9", lora_adapter=str(tmp_path))
    with pytest.raises(ConfigError, match="do not limit the calls of an upstream model"):
        trainer.evaluate(plain, [1], model="gpt-9", rollout={"max_turns": 3})


def test_every_served_model_gets_the_sampling_that_was_asked_for(
    hollow_model: str, planned_runs: list[Any], tmp_path: Path
) -> None:
    slots = {
        "solver": LLM(sampling_parameters={"top_p": 0.9, "temperature": 1.0}),
        "judge": LLM(endpoint="http://else", model="j"),
    }
    agent = rollout(lambda task, solver: 1.0)
    with pytest.raises(ReachedRay):
        Trainer(output_dir=tmp_path / "out", resources=slots).evaluate(
            agent, [1], model=hollow_model, sampling={"temperature": 0.0}
        )
    settings, llm = planned_runs[0].settings, LLM(endpoint="http://here", model="policy", traced=True)
    offered = fill_resources(settings.resources, llm, settings.serving)
    assert offered["solver"].sampling_parameters == {"top_p": 0.9, "temperature": 0.0}
    assert (offered["solver"].endpoint, offered["judge"].sampling_parameters) == ("http://here", {})


def test_an_adapter_is_read_as_peft_saved_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    with pytest.raises(ModelNotFoundError, match=r"adapter_model\.safetensors is missing"):
        find_adapter(str(tmp_path))
    save_file(
        {"a.lora_A.weight": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "adapter_model.safetensors"
    )
    adapter = read_adapter(find_adapter(str(tmp_path)))
    assert adapter.config == {"r": 2}
    assert adapter.weights["a.lora_A.weight"].shape == (2, 3)


@pytest.mark.parametrize(
    ("config", "own", "rank"),
    [
        ({"r": 128}, {}, 128),
        ({"r": 8, "rank_pattern": {"q_proj": 96, "k_proj": 4}}, {}, 96),
        ({}, {}, 16),
        ({"r": 128}, {"max_lora_rank": 320}, 320),
        ({"r": 600}, {}, None),
    ],
)
def test_vllm_gets_room_for_the_highest_rank_of_the_adapters(
    config: dict[str, Any],
    own: dict[str, Any],
    rank: int | None,
    hollow_model: str,
    planned_runs: list[Any],
    tmp_path: Path,
) -> None:
    folders = {"planner": tmp_path / "planner", "coder": tmp_path / "coder"}
    for folder, content in zip(folders.values(), (config, {"r": 16}), strict=True):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(content))
        (folder / "adapter_model.safetensors").touch()
    agent, adapters = rollout(lambda task, planner, coder: 1.0), {n: str(f) for n, f in folders.items()}
    with pytest.raises(ReachedRay):
        Trainer(output_dir=tmp_path / "out").evaluate(agent, [1], model=hollow_model, lora_adapter=adapters)
    (run,) = planned_runs
    run.for_cluster(KnownFacts(0))
    assert (run.settings.serving.engine.max_adapters, run.settings.serving.engine.args) == (2, {})
    serving = run.settings.serving
    engine = serving.engine.model_copy(update={"kind": "vllm", "args": own})
    run.settings = replace(run.settings, serving=replace(serving, engine=engine))
    if rank is None:
        with pytest.raises(ConfigError, match="up to rank 512, not 600: set engine="):
            run.for_cluster(KnownFacts(0))
    else:
        run.for_cluster(KnownFacts(0))
        assert run.settings.serving.engine.args == {"max_lora_rank": rank}


# tasks from files


def test_tasks_are_read_from_files(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    tasks = [{"a": 1, "b": "x"}, {"a": 2, "b": "é"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, tasks)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(tasks))
    parquet.write_table(pyarrow.Table.from_pylist(tasks), tmp_path / "a.parquet")
    for kind in ("jsonl", "json", "parquet"):
        assert read_tasks(tmp_path / f"a.{kind}") == tasks
        assert read_tasks(tmp_path / f"a.{kind}", limit=1) == tasks[:1]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"a": 1}\n{oops\n', "line 2"),
        ("a.jsonl", b"\n\n", "has no tasks"),
        ("a.json", b'{"a": 1}', "has a JSON dict"),
        ("a.json", b"[", r"a\.json"),
        ("a.csv", b"a\n1", r"is not a \.jsonl"),
        ("a.parquet", b"junk", "is not a valid Parquet"),
        ("a.jsonl", b"\xff\xfe\n", "cannot be read"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not valid JSON"),
        ("a.json", b"[" * 100_000, r"a\.json is not valid JSON"),
    ],
)
def test_a_file_that_holds_no_tasks_is_an_error(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=says):
        read_tasks(tmp_path / name)


def test_a_name_that_no_file_can_have_is_an_error(tmp_path: Path) -> None:
    for name in (f"{'n' * 300}.jsonl", "a\0.jsonl", "a.jsonl/b.jsonl"):
        with pytest.raises(DatasetError, match="there is no file"):
            read_tasks(tmp_path / name)


def test_a_column_is_not_lost_in_silence(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table([[1], [2], [3]], names=["a", "b", "a"]), path)
    with pytest.raises(DatasetError, match="several columns of the name 'a'"):
        read_tasks(path)
    twice = pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(pyarrow.table([twice], names=["inner"]), path)
    with pytest.raises(DatasetError, match="valid Parquet file of tasks"):
        read_tasks(path)


def test_a_date_that_python_does_not_have_is_an_error(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    far = pyarrow.array([3_093_527_980_800_000], pyarrow.timestamp("ms"))
    parquet.write_table(pyarrow.table([far], names=["when"]), path)
    with pytest.raises(DatasetError, match="valid Parquet file of tasks"):
        read_tasks(path)


# what it writes


def said(text: Any, reward: float = 1.0, temperature: float = 1.0) -> FinishedRollout:
    """A rollout with one call that answered `text`."""
    made = make_finished(reward)
    span = Span.from_attributes(
        name="chat", attributes={OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": text}])}
    )
    call = make_generation([1], [2, 3], temperature=temperature)
    return FinishedRollout(made.rollout, reward, [call], [span], {"right": reward, "short": 0.5})


def test_a_line_has_what_a_reader_wants_to_know() -> None:
    line = eval_line(said("4"), 7, 1)
    wanted = {
        "task_index": 7,
        "sample": 1,
        "status": "succeeded",
        "reward": 1.0,
        "calls": 1,
        "tokens": 2,
        "text": "4",
        "error": None,
        "failure": None,
    }
    assert wanted.items() <= line.items()
    assert line["rewards"] == {"right": 1.0, "short": 0.5}
    assert (
        eval_line(said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), 0, 0)["text"] == "ab"
    )
    assert eval_line(said(None), 0, 0)["text"] is None
    made = said("4")
    task = {("a", 1): float("nan"), "b": (b"\x00", Path("x"))}
    rollout = made.rollout.model_copy(update={"input": task})
    line = eval_line(replace(made, rollout=rollout), 0, 0)
    assert json.loads(json.dumps(line, allow_nan=False))["task"] == {
        "('a', 1)": None,
        "b": [repr(b"\x00"), repr(Path("x"))],
    }
    assert sampled_rollout(replace(made, rollout=rollout)).task.startswith("{\"('a', 1)\": null")
    failed = eval_line(make_finished(failure=BROKEN, calls=0), 0, 0)
    wanted = {
        "status": "failed",
        "error": BROKEN.error,
        "failure": "agent",
        "reward": None,
        "text": None,
    }
    assert wanted.items() <= failed.items()


def test_sampling_that_the_agent_did_not_pass_on_is_told() -> None:
    finished = [said("a", temperature=1.0), said("b", temperature=0.0)]
    note = ignored_sampling(finished, {"temperature": 0.0})
    assert note is not None
    assert "1 of 2 calls were sampled at temperature 1, not 0" in note
    assert ignored_sampling(finished[1:], {"temperature": 0.0}) is None
    assert ignored_sampling(finished, {"max_tokens": 3}) is None


def test_the_table_names_rewards_errors_and_pass_at_k(
    capsys: pytest.CaptureFixture[str], hollow_model: str, planned_runs: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(ReachedRay):
        Trainer(output_dir=tmp_path / "out").evaluate(plain, [1, 2], model=hollow_model, samples=2)
    finished = [said("4", reward) for reward in (1.0, 0.0, 1.0, 1.0)] + [make_finished(failure=BROKEN)]
    scores = measure(finished, 2, None, 1.0)
    figures = describe_evaluation(planned_runs[0], scores, finished, 2.0, None)
    assert json.loads(json.dumps(figures)) == figures
    scores.others["reward"] = scores.others["short"]
    named = describe_evaluation(planned_runs[0], scores, finished, 2.0, None)["rewards"]
    assert named == figures["rewards"] | {"reward/reward": figures["rewards"]["short"]}
    (tmp_path / "eval.jsonl").touch()
    print_scores(figures, str(tmp_path))
    text = capsys.readouterr().out
    for part in ("right", "0.6000", "short", "pass@1: ", "best of 2: ", "1 failed", f"{tmp_path}/eval.jsonl"):
        assert part in text
    assert figures["failures"] == {BROKEN.error: 1}
    assert rewards_by_name(finished) == {"right": [1.0, 0.0, 1.0, 1.0], "short": [0.5] * 4}


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="sample"):
        EvalSettings(model="m", sample=3)
