"""The process agent's script with real Ray, the real simulator and a scripted model behind a proxy."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_helpers import KEY, MODEL, RULES, ScriptedModel, serving
from ray_cluster import RAY_PROCESSES, assert_no_new_ray_processes
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import raylight as rl
from examples.process_agent.design_reward import grade, tool_calls
from examples.process_agent.design_tasks import load_tasks
from examples.process_agent.designer import PROMPT
from raylight.quickstart import STARTER_MODEL

pytestmark = pytest.mark.framework("thermo")
ROOT = Path(__file__).parents[2]
TASKS = {task["text"]: task["id"] for split in ("train", "val", "test") for task in load_tasks(split)}  # type: ignore[arg-type]


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel(TASKS)


@pytest.fixture
def endpoint(model: ScriptedModel) -> Iterator[str]:
    with serving(model.route) as url:
        yield url


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    """Assert that no process of Ray and no simulator of a test outlives it."""
    with assert_no_new_ray_processes(names=(*RAY_PROCESSES, "flowsheets.service")):
        yield


def train(
    folder: Path, *args: str, key: str = KEY, model: str = MODEL, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "examples/process_agent/train.py",
        "--model",
        model,
        "--output-dir",
        str(folder),
        *args,
    ]
    around = {**os.environ, "RAY_ADDRESS": "local", "OPENAI_API_KEY": key, "PYTHONWARNINGS": "ignore"} | env
    if "SIMULATOR_URL" not in env:
        around.pop("SIMULATOR_URL", None)
    return subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=280)


async def stored(path: Path) -> list[tuple[rl.Rollout, list[rl.Span]]]:
    """Return the rollouts of a run with the spans of their latest attempts."""
    service = rl.StoreService(str(path), read_only=True)
    store = rl.StoreClient(service)
    rollouts = await store.query_rollouts()
    found = [(rollout, list(await store.query_spans(rollout.rollout_id, "latest"))) for rollout in rollouts]
    await service.close()
    return found


@pytest.mark.slow
def test_the_baseline_measures_every_split(model: ScriptedModel, endpoint: str, tmp_path: Path) -> None:
    done = train(tmp_path, "--endpoint", endpoint, "--use-validation", "--use-test")
    assert done.returncode == 0, done.stdout + done.stderr

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["scores"]["train"].keys() == {"easy", "medium", "hard", "all"}
    for scores in (report["scores"]["train"], report["scores"]["val"], report["test"]):
        for value in scores.values():  # within the budget, but neither complete nor correct
            assert value == pytest.approx(0.3, abs=0.02)
    log = (tmp_path / "training.log").read_text()
    for task in TASKS.values():
        assert f"{task}: reward 0.3" in log

    # the rewards equal the rewards in the stored spans, and the model's calls went through the proxy
    found = asyncio.run(stored(tmp_path / "baseline" / "store.db"))
    assert len(found) == 15
    for rollout, spans in found:
        assert rl.find_final_reward(spans) == pytest.approx(grade(rollout.input, spans).reward)
        assert [call.name for call in tool_calls(spans)] == ["run_simulation", "run_simulation"]
        assert [call.failed for call in tool_calls(spans)] == [True, False]
        assert sum(span.name == "openai.chat.completion" for span in spans) == 3
    assert len(model.requests) == 18 * 3
    assert all(len(request["tools"]) == 3 for request in model.requests)


@pytest.mark.slow
def test_a_rewritten_prompt_is_found_by_its_score(
    model: ScriptedModel, endpoint: str, tmp_path: Path
) -> None:
    done = train(
        tmp_path,
        "--endpoint",
        endpoint,
        "--algorithm",
        "prompt_opt",
        "--rounds",
        "1",
        "--candidates",
        "2",
        "--use-validation",
        "--use-test",
        "--n-runners",
        "1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["first"] == pytest.approx(0.3, abs=0.02)
    assert report["best"] == 1.0
    assert report["test"] == {"easy": 1.0, "medium": 1.0, "hard": 1.0, "all": 1.0}
    first, better, refused = sorted(
        report["prompts"], key=lambda prompt: (prompt["parent"] is not None, prompt["refused"] or "")
    )
    assert first["text"] == PROMPT
    assert (better["parent"], better["score"]) == (first["number"], 1.0)
    assert refused["score"] is None
    assert "its placeholders are [] instead of ['max_calls']" in refused["refused"]
    best = (tmp_path / "best_prompt.txt").read_text()
    assert best == better["text"]
    assert RULES in best
    assert "is refused: its placeholders" in (tmp_path / "training.log").read_text()
    case = next(
        r["messages"][1]["content"]
        for r in model.requests
        if "Rollouts with it" in r["messages"][1]["content"]
    )
    assert "bad_flowsheet" in case  # the writer receives the error
    assert "Completion 0.00" in case
    assert not any(task["text"] in case for split in ("val", "test") for task in load_tasks(split))  # type: ignore[arg-type]


@pytest.mark.slow
def test_debug_prints_the_whole_trace_of_one_task(endpoint: str, tmp_path: Path) -> None:
    done = train(tmp_path, "--endpoint", endpoint, "--debug", "--n-runners", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    task = load_tasks("train")[0]
    assert ": succeeded\ntask: {" in done.stdout
    for part in (task["id"], "run_simulation (", "bad_flowsheet", '"status": "converged"', "answer ("):
        assert part in done.stdout
    assert "reward: reward 0.3, completion 0, efficiency 1, quality 0" in done.stdout


@pytest.mark.slow
def test_dev_takes_a_task_of_each_difficulty_and_a_simulator_of_ones_own(
    endpoint: str, tmp_path: Path
) -> None:
    from examples.process_agent.flowsheets.local import simulator

    with simulator() as url:
        done = train(tmp_path, "--endpoint", endpoint, "--mode", "dev", "--n-runners", "1", SIMULATOR_URL=url)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"simulator at {url}" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["scores"]) == {"train"}
    assert (tmp_path / "training.log").read_text().count(": reward 0.3") == 3


@pytest.mark.slow
def test_a_model_that_refuses_ends_the_run_with_its_error(endpoint: str, tmp_path: Path) -> None:
    done = train(tmp_path, "--endpoint", endpoint, "--mode", "dev", "--n-runners", "1", key="another-key")
    assert done.returncode == 1
    assert "RolloutsFailedError: none of 3 rollouts was scored" in done.stdout
    assert "the upstream rejected this server's API key" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_simulator_that_breaks_is_not_held_against_the_agent(endpoint: str, tmp_path: Path) -> None:
    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def broken(request: Request) -> JSONResponse:
        return JSONResponse({}, status_code=503)

    with serving(Route("/health", health), Route("/simulations", broken, methods=["POST"])) as url:
        done = train(
            tmp_path,
            "--endpoint",
            endpoint,
            "--mode",
            "dev",
            "--n-runners",
            "1",
            SIMULATOR_URL=url.removesuffix("/v1"),
        )
    assert done.returncode == 1
    assert "3 of 3 rollouts were lost through no fault of the agent: SimulatorUnavailableError" in done.stdout
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow
def test_a_folder_is_served_here(tmp_path: Path) -> None:
    """The starter model can only add, and designs nothing. It receives the tools; its answers are stored."""
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(STARTER_MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained(folder)
    done = train(
        tmp_path,
        "--mode",
        "dev",
        "--n-runners",
        "1",
        "--max-model-len",
        "2048",
        "--serve-arg",
        "tool_parser=hermes",
        model=str(folder),
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "serve.log").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["scores"]["train"]["all"] == 0.0
    for _, spans in asyncio.run(stored(tmp_path / "baseline" / "store.db")):
        assert [span.name for span in spans].count("openai.chat.completion") == 1


@pytest.mark.parametrize(
    ("args", "env", "code", "message"),
    [
        (
            ("--endpoint", "http://127.0.0.1:9/v1"),
            {"SIMULATOR_URL": "http://127.0.0.1:9"},
            1,
            "no simulator responds at SIMULATOR_URL",
        ),
        (("--algorithm", "prompt_opt", "--mode", "dev"), {}, 2, "prompt_opt is not a fast algorithm"),
        (("--algorithm", "apo"), {}, 2, "invalid choice: 'apo'"),
        (("--algorithm", "prompt_opt", "--candidates", "0"), {}, 2, "--candidates at least 1"),
    ],
)
def test_bad_arguments_end_with_one_message(
    args: tuple[str, ...], env: dict[str, str], code: int, message: str, tmp_path: Path
) -> None:
    done = train(tmp_path, *args, **env)
    assert done.returncode == code
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
