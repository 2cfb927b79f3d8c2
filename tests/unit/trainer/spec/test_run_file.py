"""Run files: schema, errors with the nearest names, and the config.yaml of a run as a run file."""

import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from command_runner import CliRunner

import raylight as rl
from raylight.cli import app
from raylight.components import IN_CODE, dotted_name
from raylight.errors import ConfigError, DatasetError
from raylight.experience.trajectories.row_rules import algorithm_settings
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.trainer.spec.run_file import load_run_file, planned_trainer
from raylight.trainer.spec.task_files import read_tasks

EXAMPLE = Path(__file__).parents[4] / "examples" / "quickstart.yaml"
MINIMAL = {
    "agent": "raylight.quickstart.agent:adder",
    "data": {"train": "raylight.quickstart.additions:training_tasks"},
    "algorithm": {"name": "GRPO", "model": STARTER_MODEL, "n_steps": 2},
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(content: Any, name: str = "run.yaml") -> Path:
        file = tmp_path / name
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return file

    return write


def test_the_example_builds_a_trainer_and_reads_its_data() -> None:
    run_file = load_run_file(EXAMPLE, ["algorithm.lr=1e-5", "engine.args.max-waiting=3", "seed=4"])
    trainer = rl.Trainer(**run_file.trainer_arguments())
    assert isinstance(trainer.algorithm, rl.GRPO)
    assert (trainer.algorithm.lr, trainer.runner.n, trainer.seed) == (1e-5, 2, 4)
    assert trainer.engine.args == {"max_waiting": 3}
    assert trainer.agent == "raylight.quickstart.agent:adder"
    train, val = run_file.read_data()
    assert (train, val) == additions(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agnet": "x"}, "RunFile has no setting 'agnet'; it has: agent"),
        ({"engine": {"replica": 2}}, "EngineConfig has no setting 'replica'; it has: replicas"),
        ({"learner": {"lora": {"rnk": 2}}}, "LoraConfig has no setting 'rnk'; it has: rank"),
        ({"data": {"trian": "x"}}, "DataFiles has no setting 'trian'; it has: train"),
        ({"algorithm": {"name": "GRPO", "model": "m", "lrr": 1}}, "GRPO takes no 'lrr'; it has: lr"),
        ({"algorithm": {"name": "GRP"}}, "algorithm.name: there is no 'GRP'; the nearest are: GRPO"),
        ({"algorithm": {"lr": 1}}, r"algorithm\.name is missing"),
        ({"loggers": ["jsnl"]}, "no logger 'jsnl'; the nearest are: jsonl"),
        ({"data": {}}, r"data\.train is missing"),
        ({"data": {"train": "/no/such.jsonl"}}, r"there is no file /no/such\.jsonl"),
        ({"data": {"train": "raylight.quickstart:STARTER_MODEL"}}, "has no tasks; name a list"),
        (
            {"resources": {"judge": {"resource_type": "lm"}}},
            r"resources\.judge\.resource_type is 'lm'; choose",
        ),
        ({"agent": "__main__:adder"}, "agent was defined in __main__.*give agent"),
        ({"agent": IN_CODE}, "agent was given in code"),
        ({"data": {"train": "x", "val": IN_CODE}}, r"data\.val was given in code .* give a file"),
        ({"hooks": [IN_CODE]}, r"hooks\[0\] was given in code"),
        ({"store": IN_CODE}, "store was given in code"),
        ({"engine": {"api_key": "**********"}}, r"engine\.api_key is a secret.*RAYLIGHT_UPSTREAM_KEY"),
        ({"resources": {"judge": {"api_key": "**********"}}}, r"resources\.judge\.api_key is a secret"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_names(change: dict, message: str, write: Any) -> None:
    def check(file: Path) -> None:
        run_file = load_run_file(file)
        rl.Trainer(**run_file.trainer_arguments())
        run_file.read_data()

    with pytest.raises(rl.RaylightError, match=message):
        check(write(MINIMAL | change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm.lr", "not of the form NAME=VALUE"),
        ("algorthm.lr=1", "there is no section 'algorthm'; the nearest are: algorithm"),
        ("seed.a=1", "seed is 3 and has no settings"),
        ("seed=[1", "the value is not YAML"),
        ("engine.args={tp:4}", "write a space after the colon, and quote the whole: .*'engine.args={tp: 4}'"),
    ],
)
def test_a_wrong_assignment_is_an_error(text: str, message: str, write: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_file(write(MINIMAL | {"seed": 3}), [text])


@pytest.mark.parametrize("content", ["", "- 1", "a: [", "\x00"])
def test_a_file_without_settings_is_an_error(content: str, write: Any) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_run_file(write(content))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run_file("/no/such/file.yaml")


def config_of(trainer: rl.Trainer, agent: Any, train: Any, val: Any, folder: Path) -> dict[str, Any]:
    """Return the content of the config.yaml that a run would write."""
    assert trainer.algorithm is not None
    run = trainer._plan(trainer.algorithm, agent, train, val)
    run.settings = replace(run.settings, name="run-1", folder=str(folder))
    return yaml.safe_load(yaml.safe_dump(run.config(trainer._given)))


def test_the_config_of_a_run_is_a_run_file_of_the_same_run(tmp_path: Path, write: Any) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"a": 1, "b": 2}\n')
    trainer = rl.Trainer(
        algorithm=rl.PPO(model=STARTER_MODEL, n_steps=2, critic={"lr": 1e-3}),
        engine={"replicas": 2},
        learner={"lora": {"rank": 4}, "n": 2},
        runner={"external": False, "n": 3},
        store={"lease_s": 9.0},
        hooks="raylight.agent.hooks:LoggingHook",
        loggers=["jsonl"],
        initial_resources={"judge": rl.LLM(endpoint="http://j/v1", model="j"), "limit": 3},
        seed=5,
        output_dir=tmp_path,
    )
    written = config_of(trainer, adder, read_tasks(tasks), None, tmp_path)
    assert written["agent"] == "raylight.quickstart.agent:adder"
    assert written["data"] == {"train": str(tasks), "val": None}
    assert written["run"]["total_steps"] == 2
    again = load_run_file(write(written))
    facts = written.pop("run")
    assert facts["name"] == "run-1"
    assert again.resolved() == written
    second = rl.Trainer(**again.trainer_arguments())
    repeated = config_of(second, again.agent, *again.read_data(), tmp_path)
    assert repeated.pop("run")["total_steps"] == 2
    assert repeated == written


@pytest.mark.parametrize(
    "algorithm",
    [
        *(
            getattr(rl.algorithms, name)(model=STARTER_MODEL)
            for name in ("GRPO", "DAPO", "RLOO", "GSPO", "ReMax", "DrGRPO", "ReinforcePlusPlus", "KLCov")
        ),
        rl.Baseline(),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_every_algorithm_can_be_written_and_read(algorithm: Any, tmp_path: Path, write: Any) -> None:
    resources = (
        {"llm": rl.LLM(endpoint="http://x/v1", model="m")} if isinstance(algorithm, rl.Baseline) else None
    )
    trainer = rl.Trainer(algorithm=algorithm, initial_resources=resources)
    written = config_of(trainer, "raylight.quickstart.agent:adder", read_tasks_of(tmp_path), None, tmp_path)
    again = rl.Trainer(**load_run_file(write(written)).trainer_arguments())
    assert type(again.algorithm) is type(algorithm)
    if isinstance(algorithm, rl.algorithms.PolicyAlgorithm):
        assert again.algorithm.model_dump(exclude={"max_logprob_mismatch"}) == algorithm.model_dump(
            exclude={"max_logprob_mismatch"}
        )


def test_a_verl_run_on_several_ranks_can_be_written_and_read(tmp_path: Path, write: Any) -> None:
    config = {
        "actor_rollout_ref.model.path": STARTER_MODEL,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 4,
        "data.train_batch_size": 16,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "data.seed": 3,
        "trainer.n_gpus_per_node": 2,
        "trainer.default_local_dir": str(tmp_path),
    }
    agent, tasks = "raylight.quickstart.agent:adder", read_tasks_of(tmp_path)
    trainer = rl.Trainer(algorithm=rl.VERL(config, strict=False), engine={"max_body_bytes": 9_000_000})
    written = config_of(trainer, agent, tasks, None, tmp_path)
    shown = algorithm_settings(written)
    assert (shown["name"], shown["group_size"], shown["tasks_per_step"]) == ("VERL", 4, 16)
    assert Path(str(shown["model"])).is_dir()
    again = rl.Trainer(**load_run_file(write(written)).trainer_arguments())
    assert again.run_settings == trainer.run_settings
    assert (again.run_settings.engine.replicas, again.seed, again.learner.n) == (2, 3, 2)
    assert config_of(again, agent, tasks, None, tmp_path) == written


def read_tasks_of(folder: Path) -> Any:
    file = folder / "few.jsonl"
    file.write_text('{"a": 1, "b": 2}\n' * 16)
    return read_tasks(file)


def test_secrets_and_values_given_in_code_are_not_written(tmp_path: Path) -> None:
    trainer = rl.Trainer(
        algorithm=rl.Baseline(served_model="m"),
        engine={"kind": "upstream", "url": "http://u/v1", "api_key": "sk-engine"},
        initial_resources={
            "judge": rl.LLM(endpoint="http://j/v1", model="j", api_key="sk-judge"),
            "x": object(),
        },
        hooks=[rl.LoggingHook()],
    )
    written = config_of(trainer, adder, [{"a": 1, "b": 2}], read_tasks_of(tmp_path)[:3], tmp_path)
    assert "sk-" not in yaml.safe_dump(written)
    assert written["engine"]["api_key"] == written["resources"]["judge"]["api_key"] == "**********"
    assert written["data"] == {"train": IN_CODE, "val": IN_CODE}
    assert written["resources"]["x"] == IN_CODE
    assert written["hooks"] == [IN_CODE]


def test_the_key_of_an_upstream_comes_from_the_environment(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLIGHT_UPSTREAM_KEY", "sk-env")
    engine = {"kind": "upstream", "url": "http://u/v1", "api_key": "**********"}
    key = load_run_file(write(MINIMAL | {"engine": engine})).engine.api_key  # type: ignore[union-attr]
    assert key.get_secret_value() == "sk-env"  # type: ignore[union-attr]


def test_the_dotted_name_of_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dotted_name(adder) == "raylight.quickstart.agent:adder"
    assert dotted_name(rl.GRPO) == "raylight.algorithms.policy:GRPO"
    assert dotted_name(object()) == IN_CODE
    main = ModuleType("__main__")
    main.__spec__ = None
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.solver = rl.rollout(lambda task: 0.0)  # type: ignore[attr-defined]
    main.solver.__module__ = "__main__"
    assert dotted_name(main.solver) == "__main__:solver"


@pytest.fixture
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any) -> None:
        raise AssertionError("the run must not start")

    monkeypatch.setattr(rl.Trainer, "fit", started)


@pytest.mark.usefixtures("starts_nothing")
def test_an_agent_and_options_make_a_run_file(write: Any) -> None:
    tasks = write('{"a": 1, "b": 2}\n', "tasks.jsonl")
    options = {
        "--model": STARTER_MODEL,
        "--data": str(tasks),
        "--val": "raylight.quickstart.additions:validation_tasks",
        "--algorithm": "RLOO",
        "--steps": "2",
        "--engine": "transformers",
        "--n-runners": "3",
        "--seed": "4",
        "--output-dir": "outputs/x",
        "--set": "algorithm.lr=1e-4",
        "--address": "local",
    }
    command = ["train", MINIMAL["agent"], *itertools.chain(*options.items()), "--ui", "--print-config"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    content = yaml.safe_load(printed.stdout)
    algorithm = {name: content["algorithm"][name] for name in ("name", "model", "n_steps", "lr")}
    assert algorithm == {"name": "RLOO", "model": STARTER_MODEL, "n_steps": 2, "lr": 1e-4}
    assert content["agent"] == MINIMAL["agent"]
    assert content["data"] == {"train": str(tasks), "val": options["--val"]}
    assert (content["engine"]["kind"], content["runner"]["n"], content["seed"]) == ("transformers", 3, 4)
    assert (content["output_dir"], content["address"], content["ui"]) == ("outputs/x", "local", True)
    assert load_run_file(write(content, "again.yaml")).resolved() == content


@pytest.mark.usefixtures("starts_nothing")
def test_options_override_a_file_and_assignments_both(write: Any) -> None:
    options = ["--steps", "3", "--n-runners", "3", "--set", "runner.n=4", "--print-config"]
    printed = CliRunner().invoke(app, ["train", str(write(MINIMAL | {"runner": {"n": 2}})), *options])
    assert printed.exit_code == 0, printed.output
    content = yaml.safe_load(printed.stdout)
    assert (content["algorithm"]["n_steps"], content["runner"]["n"]) == (3, 4)


def test_the_file_of_an_agent_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_run_file("agents/solver.py:solve").agent == f"{tmp_path}/agents/solver.py:solve"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a:b"], "algorithm.model is missing: GRPO trains a model; give its folder as .* or as --model"),
        (["a:b", "--model", "m"], "data.train is missing: there are no tasks; .* or as --data"),
        (["a:b", "--model", "m", "--data", "no.jsonl"], "there is no file .*/no.jsonl"),
        (["a:b", "--model", "m", "--algorithm", "GRP"], "there is no 'GRP'; the nearest are: GRPO"),
        (["no_file"], "no_file cannot be read: .*; give the path of a YAML file, or an agent, as package"),
        (["agents.py"], "agents.py is a Python file; add the agent's name, as in agents.py:agent"),
    ],
)
def test_what_a_command_lacks_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["train", *arguments])
    assert isinstance(result.exception, ConfigError | DatasetError)
    assert re.search(message, str(result.exception)), result.exception


@pytest.mark.usefixtures("starts_nothing")
def test_print_config_prints_a_run_file_and_starts_nothing(write: Any) -> None:
    printed = CliRunner().invoke(app, ["train", str(write(MINIMAL)), "--print-config", "--set", "seed=7"])
    assert printed.exit_code == 0, printed.output
    content = yaml.safe_load(printed.stdout)
    assert content["seed"] == 7
    assert content["algorithm"]["group_size"] == 8
    assert load_run_file(write(content, "again.yaml")).resolved() == content


@pytest.mark.usefixtures("starts_nothing")
@pytest.mark.parametrize(
    ("section", "value", "plans"),
    [
        ("tracer", {"type": "os:system", "command": "touch called"}, True),
        ("adapter", "hostile:CALLED", True),
        ("hooks", ["hostile:CALLED"], True),
        ("loggers", [{"type": "os:system", "command": "touch called"}], True),
        ("agent", {"type": "os:system", "command": "touch called"}, True),
        ("group_reward", "hostile:CALLED", True),
        ("data", {"train": "hostile:CALLED"}, True),
        ("algorithm", {"name": "os:system", "command": "touch called"}, False),
        ("algorithm", {"name": "hostile:CALLED", "model": STARTER_MODEL}, False),
        ("engine", {"kind": "hostile:CALLED"}, False),
    ],
)
def test_only_printing_and_planning_call_nothing_that_a_file_names(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, value: Any, plans: bool
) -> None:
    (tmp_path / "hostile.py").write_text("import pathlib\npathlib.Path('called').touch()\n")
    monkeypatch.chdir(tmp_path)
    file = str(write(MINIMAL | {section: value}))
    printed = CliRunner().invoke(app, ["train", file, "--print-config"])
    assert printed.exit_code == 0, printed.output
    assert yaml.safe_load(printed.stdout)["algorithm"]
    planned = CliRunner().invoke(app, ["plan", file])
    if plans:
        assert planned.exception is None, planned.exception
    else:
        assert isinstance(planned.exception, ConfigError)
        assert "does not import" in str(planned.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostile.py", "run.yaml"]
    assert "hostile" not in sys.modules


def test_the_prompt_of_a_teacher_is_printed_as_written(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile.py").write_text("import pathlib\npathlib.Path('called').touch()\n")
    monkeypatch.chdir(tmp_path)
    teacher = {"model": STARTER_MODEL, "prompt": "hostile:prompt"}
    algorithm = {"name": "OPD", "model": STARTER_MODEL, "teacher": teacher}
    file = str(write(MINIMAL | {"algorithm": algorithm}))
    printed = CliRunner().invoke(app, ["train", file, "--print-config"])
    assert printed.exit_code == 0, printed.exception
    shown = yaml.safe_load(printed.stdout)["algorithm"]
    assert (shown["teacher"]["prompt"], "lr" in shown) == ("hostile:prompt", True)
    planned = CliRunner().invoke(app, ["plan", file])
    assert planned.exit_code == 0, planned.exception
    assert "hostile" not in sys.modules


def test_a_plan_has_the_reward_models_of_raylight(write: Any) -> None:
    reward = {"type": "raylight.rewards:reward_model", "model": STARTER_MODEL}
    notes: list[str] = []
    trainer = planned_trainer(load_run_file(write(MINIMAL | {"group_reward": reward})), notes.append)
    assert (trainer.group_reward is not None, notes) == (True, [])
