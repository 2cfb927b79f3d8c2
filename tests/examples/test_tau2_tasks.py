"""Tasks as rows, the train and test halves, the data of tau2's airline, and train.py's checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tau2_helpers import TASKS

from examples.tau2_agent import airline, tiny_model
from examples.tau2_agent.domain import find_domain
from examples.tau2_agent.settings import CONFIG, verl_config
from examples.tau2_agent.tasks import as_row, load_rows, read_row
from raylight import VERL
from raylight.errors import ConfigError, DatasetError

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "tau2_agent" / "train.py"


def test_rows_are_text_and_keep_everything() -> None:
    for task in TASKS.values():
        row = as_row("helpdesk", task)
        assert all(isinstance(value, str) for value in row.values())
        assert read_row(json.loads(json.dumps(row))) == ("helpdesk", task)
    with pytest.raises(DatasetError, match="must be a row"):
        read_row({"question": "?"})
    with pytest.raises(ConfigError, match="choose one of helpdesk, airline"):
        find_domain("casino")


def test_the_halves_are_always_the_same() -> None:
    train, val = load_rows("helpdesk")
    assert (len(train), len(val)) == (13, 13)
    assert {row["id"] for row in train + val} == TASKS.keys()
    assert [row["id"] for row in train[:4]] == ["desk-17", "desk-13", "desk-10", "desk-26"]
    code = (
        "from examples.tau2_agent.tasks import load_rows; print([r['id'] for r in load_rows('helpdesk')[0]])"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout.strip() == str([row["id"] for row in train])


@pytest.mark.parametrize(
    "layout", ["tau2/domains/airline", "data/tau2/domains/airline", "domains/airline", "airline", "."]
)
def test_the_airlines_data_is_found_in_every_layout(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / layout
    folder.mkdir(parents=True, exist_ok=True)
    for name in airline.FILES:
        (folder / name).write_text("[]")
    monkeypatch.setenv("TAU2_DATA_DIR", str(tmp_path))
    assert airline.find_data().resolve() == folder.resolve()


def test_missing_data_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAU2_DATA_DIR", raising=False)
    with pytest.raises(ConfigError, match="TAU2_DATA_DIR is not set; set it to the `data` folder"):
        find_domain("airline").tasks()
    monkeypatch.setenv("TAU2_DATA_DIR", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"db.json, policy.md, tasks.json were not found below .*in tau2/domains/airline"
    ):
        find_domain("airline").tasks()


def test_another_package_called_tau2_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PyPI, another package has this name."""
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("")
    (tmp_path / "loguru.py").write_text("logger = None")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tau2", "loguru")]:
        monkeypatch.delitem(sys.modules, name)
    airline.tau2.cache_clear()
    with pytest.raises(
        ConfigError, match=r"tau2.data_model.message cannot be loaded .*`pip install -e path/to/tau2-bench`"
    ):
        airline.tau2()
    for name in ("tau2", "loguru"):
        sys.modules.pop(name, None)


def test_tau2s_own_solutions_solve_its_tasks() -> None:
    """Solve tau2's 50 tasks with its own solutions. It needs tau2 and its data, and takes a minute."""
    from examples.tau2_agent.domain import ToolError, Transcript

    airline.tau2.cache_clear()
    try:
        tasks = find_domain("airline").tasks()
    except ConfigError as error:
        pytest.skip(str(error))
    for task in tasks:
        case = find_domain("airline").open(task)
        for action in task["evaluation_criteria"]["actions"] or []:
            case.call(action["name"], action["arguments"])
        said = "; ".join(task["evaluation_criteria"]["communicate_info"] or []) or "Done."
        told = Transcript([{"role": "assistant", "content": said}], ending="user")
        assert case.grade(told) == {"reward": 1.0, "database": 1.0, "facts": 1.0}, task["id"]
    with pytest.raises(ToolError, match="no_such_tool"):
        case.call("no_such_tool", {})


def test_the_configuration_has_the_documented_values() -> None:
    algorithm = VERL(verl_config("a/model"))
    assert (algorithm.tasks_per_step, algorithm.group_size, algorithm.lr) == (8, 8, 1e-6)
    assert (algorithm.loss.clip_ratio_low, algorithm.loss.clip_ratio_high) == (0.2, 0.3)
    assert (algorithm.val_every, algorithm.n_epochs, algorithm.val_before_train) == (4, 8, True)
    small = VERL(verl_config("a/model", steps=2, small=True))
    assert (small.tasks_per_step, small.group_size, small.n_steps) == (2, 2, 2)
    assert "path" not in CONFIG["actor_rollout_ref"]["model"]  # neither has changed the shared configuration


def test_the_tiny_model_accepts_tools(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model.build(tmp_path / "model"))
    call = {"id": "1", "type": "function", "function": {"name": "find_user", "arguments": {"email": "x"}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    case = find_domain("helpdesk").open(TASKS["desk-01"])
    text = tokenizer.apply_chat_template(
        messages, tools=case.tools, tokenize=False, add_generation_prompt=True
    )
    assert '<tool_call>\n{"name": "find_user", "arguments": {"email": "x"}}\n</tool_call><|im_end|>' in text
    assert text.count('"type": "function"') == 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--endpoint", "http://x/v1", "--debug"], "--endpoint has no --model"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (["--model", "m", "--endpoint", "http://x/v1"], "cannot be trained; add --debug"),
                (["--model", "m", "--task", "desk-01"], "nothing reads --task without --debug"),
                (["--model", "m", "--user-endpoint", "http://x/v1"], "add --user model"),
                (["--model", "m", "--user", "model", "--user-model", "n"], "give --user-endpoint URL too"),
                (["--model", "m", "--env", "airline"], "add --user model"),
                (["--model", "m", "--env", "airline", "--user", "model"], "TAU2_DATA_DIR is not set"),
                (
                    ["--model", "m", "--user", "model", "--user-endpoint", "http://127.0.0.1:9/v1"],
                    "cannot be listed",
                ),
                (["--model", "m", "--debug", "--task", "desk-99"], "there is no task 'desk-99'"),
            ]
        ),
    ],
)
def test_train_rejects_bad_arguments(arguments: list[str], told: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TAU2_DATA_DIR"}
    command = [sys.executable, str(TRAIN), "--output-dir", str(tmp_path / "run"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: ")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
