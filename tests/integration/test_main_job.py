"""`raylight quickstart`, as a user runs it: a fresh process, a fresh local Ray, everything real."""

import contextlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from ray_cluster import BIN, eventually
from run_output import metric_rows

from raylight.serving.deploy.ingress_host import DEFAULT_PORT, FALLBACK_PORT

LOCAL = {**os.environ, "RAY_ADDRESS": "local"}


def quickstart(*args: str) -> list[str]:
    return [str(BIN / "raylight"), "quickstart", *args]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "learners", "steps"),
    [
        (["--steps", "10"], 1, 10),
        pytest.param(["--seed", "1", "--n-learners", "2"], 2, 25, marks=pytest.mark.slow),
    ],
)
def test_the_agent_learns(
    options: list[str], learners: int, steps: int, tmp_path: Path, no_processes_left: None
) -> None:
    command = quickstart("--output-dir", str(tmp_path), *options)
    done = subprocess.run(command, env=LOCAL, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "before" in done.stdout
    assert f"step {steps}/{steps}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_before"] <= 0.6
    assert summary["reward_after"] >= 0.85
    assert summary["steps"] == steps
    assert summary["rollouts_lost"] == 0

    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    wanted = {
        "train/reward",
        "time/rollout_s",
        "time/update_s",
        "time/sync_s",
        "learner/grad_norm",
        "mismatch/logprob_abs_max",
        "train/response_tokens",
        "train/tokens_per_s",
        "weights/version",
    }
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert len(learned) >= 0.8 * steps
    for row in learned:
        assert wanted <= row.keys()
        assert row["mismatch/logprob_abs_max"] < 1e-3
    assert learned[-1]["weights/version"] == len(learned)

    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["learner"]["n"] == learners
    assert config["algorithm"]["lr"] == 2e-4
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    checkpoint_answers(tmp_path / "checkpoint")


@pytest.mark.slow
def test_an_agent_with_a_tool_learns(tmp_path: Path, no_processes_left: None) -> None:
    command = quickstart("--tools", "--steps", "10", "--output-dir", str(tmp_path))
    done = subprocess.run(command, env=LOCAL, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0.25 <= summary["reward_before"] <= 0.65
    assert summary["reward_after"] >= summary["reward_before"] + 0.25
    rows = metric_rows(tmp_path)
    assert {row["trace/drifts"] for row in rows if "learner/grad_norm" in row} == {0}


@pytest.mark.slow
def test_a_run_starts_beside_another_ray_serve(tmp_path: Path, no_processes_left: None) -> None:
    """The other Serve is represented by its ports, including the ports of a HAProxy without launcher."""
    with contextlib.ExitStack() as held:
        for port in (DEFAULT_PORT, FALLBACK_PORT, 9101, 8404):
            held.enter_context(socket.create_server(("0.0.0.0", port)))
        command = quickstart("--steps", "1", "--output-dir", str(tmp_path))
        done = subprocess.run(command, env=LOCAL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def checkpoint_answers(folder: Path) -> None:
    """Assert that plain transformers load the checkpoint, and that it adds better than the starter model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from raylight.quickstart.additions import additions, is_right, question

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    tasks = additions(0)[1]
    chats = [[{"role": "user", "content": question(task)}] for task in tasks]
    ids = torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))
    output = model.generate(ids, do_sample=True, max_new_tokens=8)[:, ids.shape[1] :]
    right = [
        is_right(task, text)
        for task, text in zip(tasks, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True)
    ]
    assert sum(right) / len(right) >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_leaves_nothing(
    number: int, code: int, tmp_path: Path, no_processes_left: None
) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(
            quickstart("--steps", "500", "--output-dir", str(tmp_path)),
            env=LOCAL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            eventually(lambda: "step 1/" in log.read_text(), 90, "the first step")
            run.send_signal(number)
            assert run.wait(120) == code
        finally:
            run.kill()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_bad_argument_ends_with_one_message(tmp_path: Path) -> None:
    command = quickstart("--output-dir", str(tmp_path), "--model", "/no/such/model")
    done = subprocess.run(command, env=LOCAL, capture_output=True, text=True, timeout=240)
    assert done.returncode in (1, 2)
    assert "ModelNotFoundError: there is no model folder /no/such/model" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
