"""Options of the command line that all commands share."""

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from command_runner import CliRunner

import raylight as rl
from raylight import cli
from raylight.cli.commands import _adapters
from raylight.config import EngineConfig
from raylight.errors import ConfigError
from raylight.quickstart import STARTER_MODEL

FILES_ONLY = {"ui", "plan", "trace", "export", "export-traces", "grafana", "examples"}
"""Commands that read files and use no cluster."""
HARDWARE_SETTINGS = ("dtype", "max_model_len", "num_cpus", "num_gpus")
"""Settings of engines whose defaults follow the cluster."""


class Constructed(Exception):
    """Raised in place of a trainer's work."""


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that trainers, servers and doctor were given."""
    given: list[Any] = []

    def take(*args: Any, address: str | None = None, **settings: Any) -> None:
        given.append(address)
        raise Constructed

    monkeypatch.setattr(rl, "Trainer", take)
    monkeypatch.setattr("raylight.trainer.runs.serve_model.serve_model", take)
    monkeypatch.setattr(
        "raylight.trainer.ray_session.scale_run.scale_run",
        lambda run, sizes, address, timeout: take(address=address),
    )
    monkeypatch.setattr(
        "raylight.doctor.report.examine", lambda model, address, as_json: take(address=address)
    )
    return given


def test_every_command_that_uses_a_cluster_takes_an_address() -> None:
    for command in cli.app.registered_commands:
        name = command.name or command.callback.__name__
        assert ("address" in inspect.signature(command.callback).parameters) == (name not in FILES_ONLY), name


@pytest.mark.parametrize("address", ["local", "10.0.0.7:6379", None])
def test_the_address_arrives(tmp_path: Path, addresses: list[Any], address: str | None) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("{}\n")
    run_file = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
    model = ["--model", str(STARTER_MODEL)]
    agent = "raylight.quickstart.agent:adder"
    commands = [
        ["quickstart"],
        ["train", str(run_file)],
        ["eval", agent, *model, "--data", str(tasks)],
        ["serve", *model],
        ["runner", agent, "--run", "r"],
        ["scale", "r", "--runners", "2"],
        ["doctor"],
    ]
    for command in commands:
        result = CliRunner().invoke(cli.app, [*command, *(["--address", address] if address else [])])
        assert isinstance(result.exception, Constructed), (command, result.output, result.exception)
    assert addresses == [address] * len(commands)


@pytest.mark.parametrize("command", ["serve", "tinker"])
@pytest.mark.parametrize(
    ("options", "expected"), [("", {}), ("--num-gpus 0 --dtype float16", {"dtype": "float16", "num_gpus": 0})]
)
def test_a_server_has_the_engine_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, command: str, options: str, expected: Any
) -> None:
    """Settings that are not given follow the cluster."""
    engines: list[EngineConfig] = []
    take = lambda model, engine, *args, **settings: engines.append(engine)  # noqa: E731
    monkeypatch.setattr("raylight.trainer.runs.serve_model.serve_model", take)
    monkeypatch.setattr("raylight.tinker.serve.serve_tinker", take)
    result = CliRunner().invoke(cli.app, [command, "--model", "m", *options.split()])
    assert result.exit_code == 0, result.exception
    given = engines[0].model_dump(exclude_unset=True)
    assert {name: given[name] for name in HARDWARE_SETTINGS if name in given} == expected


def test_an_interrupted_run_ends_with_the_code_of_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*args: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rl.Trainer, "fit", fit)
    result = CliRunner().invoke(cli.app, ["quickstart", "--output-dir", str(tmp_path)])
    assert result.exit_code == 130
    assert result.output == ""


def test_scale_needs_a_number() -> None:
    result = CliRunner().invoke(cli.app, ["scale", "night"])
    assert isinstance(result.exception, rl.RaylightError)
    assert "give --runners N, --replicas N, or both" in str(result.exception)


@pytest.mark.parametrize("arguments", [["--compare"], ["--model", "m"], ["--data", "tasks.jsonl"]])
def test_an_evaluation_of_nothing_is_an_error(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["eval", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "eval needs a benchmark or an agent" in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [["examples", "real_model"], ["export", "run"], ["export-traces", "run", "--output"]],
)
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli.app, [*arguments, str(tmp_path / "file" / "folder" / "out")])
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written: Not a directory" in str(result.exception)


def test_a_pipe_shows_each_line_at_once(addresses: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server prints its address, and keeps running."""
    reading, writing = os.pipe()
    with open(reading) as pipe, open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "argv", ["raylight", "serve", "--model", "m"])
        with pytest.raises(Constructed):
            cli.main()
        print("served")
        os.set_blocking(reading, False)
        assert pipe.readline() == "served\n"


def test_an_adapter_is_a_folder_or_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    assert _adapters([]) is None
    for folder in ("lr=1", "runs/lr=0.1/checkpoint/adapter", "adapter"):
        assert _adapters([folder]) == folder
    assert _adapters(["a=lr=1", "b=other"]) == {"a": "lr=1", "b": "other"}
    with pytest.raises(ConfigError, match="give each of several adapters a name"):
        _adapters(["a=lr=1", "lr=1"])
