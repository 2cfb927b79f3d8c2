"""Tasks in Harbor's format: what is read, what is refused, and the rows of a folder of them."""

import logging
from pathlib import Path

import pytest

from raylight.errors import DatasetError, UnsupportedTaskError
from raylight.harbor.task_folder import read_task, resolve_variables, strip_canary
from raylight.harbor.tasks import HarborTasks


def make_task(folder: Path, toml: str = "", *, instruction: str = "Fix it.", tests: str = "true") -> Path:
    """Write a task."""
    for name, text in {
        "instruction.md": instruction,
        "task.toml": toml,
        "environment/Dockerfile": "FROM scratch\nWORKDIR /app\n",
        "tests/test.sh": tests,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_task_has_its_limits_images_and_variables(tmp_path: Path) -> None:
    toml = """
schema_version = "1.4"
artifacts = ["/app/result.txt", {source = "/logs/agent"}]
[task]
name = "org/fix"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 30.5
env = {TOKEN = "${TOKEN}"}
[environment]
docker_image = "python:3.12"
workdir = "/srv"
memory_mb = 2048
storage = "10G"
network_mode = "no-network"
build_timeout_sec = 60.0
env = {MODE = "test"}
"""
    task = read_task(
        make_task(tmp_path / "fix", toml, instruction="<!-- canary 1 -->\n# CANARY x\n\nFix it.\n")
    )
    assert (task.name, task.instruction, task.metadata) == ("org/fix", "Fix it.\n", {"difficulty": "easy"})
    assert (task.agent_timeout_s, task.tests_timeout_s, task.tests_env) == (120, 30.5, {"TOKEN": "${TOKEN}"})
    environment = task.environment
    assert (environment.image, environment.workdir, environment.dockerfile) == ("python:3.12", "/srv", None)
    assert (environment.memory_mb, environment.storage_mb, environment.network) == (2048, 10240, False)
    assert (environment.env, environment.build_timeout_s) == ({"MODE": "test"}, 60)
    assert (task.artifacts, task.tests_environment) == (("/app/result.txt", "/logs/agent"), None)


def test_a_short_task_has_the_defaults_of_the_format(tmp_path: Path) -> None:
    task = read_task(make_task(tmp_path / "short"))
    assert (task.name, task.agent_timeout_s, task.tests_timeout_s) == ("short", None, 600)
    assert task.environment.dockerfile == task.folder / "environment" / "Dockerfile"
    assert task.environment.network


def test_separate_tests_have_an_environment_of_their_own(tmp_path: Path) -> None:
    own = '[verifier.environment]\ndocker_image = "judge:1"\n'
    task = read_task(make_task(tmp_path / "own", own))
    assert task.tests_environment.image == "judge:1"
    copied = read_task(make_task(tmp_path / "copied", '[verifier]\nenvironment_mode = "separate"'))
    assert copied.tests_environment == copied.environment
    built = make_task(tmp_path / "built", '[verifier]\nenvironment_mode = "separate"')
    (built / "tests" / "Dockerfile").write_text("FROM scratch")
    environment = read_task(built).tests_environment
    assert environment.dockerfile == built.resolve() / "tests" / "Dockerfile"


def test_an_image_of_the_tests_has_them(tmp_path: Path) -> None:
    toml = (
        '[environment]\ndocker_image = "agent:1"\nmemory_mb = 9\n[verifier.environment]\nworkdir = "/judge"\n'
    )
    own = read_task(make_task(tmp_path / "own", toml))
    assert (own.tests_environment.image, own.tests_environment.workdir) == ("agent:1", "/judge")
    assert own.tests_folders == (own.folder / "tests",)
    built = make_task(
        tmp_path / "built", '[environment]\ndocker_image = "a"\n[verifier]\nenvironment_mode = "separate"'
    )
    (built / "tests" / "Dockerfile").write_text("FROM scratch")
    task = read_task(built)
    assert (task.tests_environment.image, task.tests_folders) == (None, ())
    bare = make_task(tmp_path / "bare", '[verifier.environment]\ndocker_image = "judge:1"')
    (bare / "tests" / "test.sh").unlink()
    assert read_task(bare).tests_folders == ()


STEPS = """
[agent]
timeout_sec = 100
[verifier]
env = {A = "task", B = "task"}
[[steps]]
name = "first"
min_reward = 0.5
[steps.verifier]
env = {B = "step"}
[[steps]]
name = "second"
min_reward = {style = 1}
[steps.agent]
timeout_sec = 5
"""


def make_steps(folder: Path, toml: str = STEPS) -> Path:
    """Write a task of two steps; the second step has separate tests."""
    make_task(folder, toml)
    (folder / "instruction.md").unlink()
    for name in ("first", "second"):
        (folder / "steps" / name / "tests").mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text(f"Do the {name}.")
    (folder / "steps" / "first" / "workdir").mkdir()
    return folder


def test_a_task_of_several_steps(tmp_path: Path) -> None:
    task = read_task(make_steps(tmp_path / "task"))
    first, second = task.steps
    assert (task.name, task.instruction, task.reward_strategy) == ("task", "Do the first.", "mean")
    assert (first.name, first.files, first.min_rewards) == (
        "first",
        task.folder / "steps" / "first" / "workdir",
        {"reward": 0.5},
    )
    assert (second.files, second.min_rewards, second.agent_timeout_s) == (None, {"style": 1}, 5)
    assert (first.tests_env, first.agent_timeout_s) == ({"A": "task", "B": "step"}, 100)
    assert second.tests_folders == (task.folder / "tests", task.folder / "steps" / "second" / "tests")
    final = read_task(make_steps(tmp_path / "final", 'multi_step_reward_strategy = "final"\n' + STEPS))
    assert final.reward_strategy == "final"


@pytest.mark.parametrize(
    ("toml", "error", "message"),
    [
        ("steps = 3", DatasetError, r"\[\[steps\]\] table"),
        ('[[steps]]\nname = "third"', DatasetError, "no folder of the step 'third'"),
        ('[[steps]]\nname = "../task"', DatasetError, "no folder of the step"),
        ('multi_step_reward_strategy = "best"\n' + STEPS, DatasetError, "mean or final"),
        ('[[steps]]\nname = "first"\nmin_reward = "high"', DatasetError, "min_reward of a step is 'high'"),
        ('[[steps]]\nname = "first"\nmin_reward = {a = true}', DatasetError, "min_reward of a step is"),
        (STEPS + '[steps.healthcheck]\ncommand = "true"', UnsupportedTaskError, "health check of a step"),
        (
            STEPS + '[steps.verifier]\nenvironment_mode = "separate"',
            UnsupportedTaskError,
            "steps whose tests have a separate environment",
        ),
    ],
)
def test_damaged_steps_are_errors(tmp_path: Path, toml: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_task(make_steps(tmp_path / "task", toml))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[environment]\ngpus = 1", "GPUs"),
        ('[agent]\nnetwork_mode = "no-network"', "another network than the agent's"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.org"]', "allowlist"),
        ('[environment]\nos = "windows"', "windows"),
        ('[agent]\nuser = "nobody"', "nobody"),
        ('[environment.healthcheck]\ncommand = "true"', "health check"),
        ('[[verifier.collect]]\ncommand = "true"', "collect"),
        ('[[artifacts]]\nsource = "/x"\nservice = "db"', "another container"),
    ],
)
def test_a_task_that_needs_more_is_refused(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(UnsupportedTaskError, match=message):
        read_task(make_task(tmp_path / "task", toml))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[agent", "not TOML"),
        ("agent = 1", "make it a table"),
        ("[agent]\ntimeout_sec = -1", "seconds above 0"),
        ("[environment]\nmemory_mb = true", "megabytes above 0"),
        ('[environment]\nmemory = "lots"', "a size such as 512M"),
        ("[environment]\nenv = {A = 1}", "a table of texts"),
        ("[environment]\ndocker_image = 3", "name of an image"),
        ('[environment]\nnetwork_mode = "maybe"', "public or no-network"),
        ('[verifier]\nenvironment_mode = "elsewhere"', "shared or separate"),
        ('artifacts = ["/app/../etc"]', "without '..'"),
    ],
)
def test_a_damaged_setting_is_an_error(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_task(make_task(tmp_path / "task", toml))


@pytest.mark.parametrize("missing", ["instruction.md", "task.toml", "tests/test.sh"])
def test_a_missing_file_is_an_error(tmp_path: Path, missing: str) -> None:
    folder = make_task(tmp_path / "task")
    (folder / missing).unlink()
    with pytest.raises(DatasetError, match=missing):
        read_task(folder)


def test_a_task_without_an_environment_is_an_error(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "task")
    (folder / "environment" / "Dockerfile").unlink()
    (folder / "environment").rmdir()
    with pytest.raises(DatasetError, match="neither environment/ nor"):
        read_task(folder)


def test_an_instruction_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "task")
    (folder / "instruction.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="cannot be read"):
        read_task(folder)


def test_only_leading_canaries_are_removed() -> None:
    assert strip_canary("Do it.\n# canary") == "Do it.\n# canary"
    assert strip_canary("") == ""


def test_variables_come_from_the_machine_or_their_default() -> None:
    variables = {"A": "${A}", "B": "${NOT_SET:-b}", "C": "plain ${A}"}
    assert resolve_variables(variables, {"A": "1"}) == {"A": "1", "B": "b", "C": "plain ${A}"}
    with pytest.raises(DatasetError, match="A needs A, which is not set"):
        resolve_variables({"A": "${A}"}, {})


def test_a_folder_of_tasks_is_a_dataset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_task(tmp_path / "b", instruction="Do b.")
    make_task(tmp_path / "group" / "a", instruction="Do a.")
    (tmp_path / "notes").mkdir()
    tasks = HarborTasks(tmp_path)
    assert [row["name"] for row in tasks] == ["b", "a"]
    assert tasks[0] == {
        "harbor_task": str((tmp_path / "b").resolve()),
        "name": "b",
        "prompt": "Do b.",
        "run_steps": "error",
    }
    assert len(tasks[0:2]) == len(tasks) == 2
    assert [row["name"] for row in HarborTasks(tmp_path, include="a*")] == ["a"]
    assert [row["name"] for row in HarborTasks(tmp_path, exclude=["a"])] == ["b"]
    assert [row["name"] for row in HarborTasks(tmp_path / "b")] == ["b"]
    make_task(tmp_path / "gpu", "[environment]\ngpus = 1")
    with pytest.raises(UnsupportedTaskError, match="skip_unsupported"):
        HarborTasks(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert len(HarborTasks(tmp_path, skip_unsupported=True)) == 2
    assert "needs GPUs" in caplog.text


def test_a_folder_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has no task"):
        HarborTasks(tmp_path)
    with pytest.raises(DatasetError, match="is not there"):
        HarborTasks(tmp_path / "missing")
    make_task(tmp_path / "a")
    with pytest.raises(DatasetError, match="fits 'z"):
        HarborTasks(tmp_path, include="z*")
    with pytest.raises(DatasetError, match="error, skip or run"):
        HarborTasks(tmp_path, run_steps="maybe")  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="list of patterns"):
        HarborTasks(tmp_path, exclude="a")  # type: ignore[arg-type]
