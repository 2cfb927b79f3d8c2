"""tinker-cookbook's own `rl_loop` trains against `raylight tinker`, unchanged and with its default loss, and
learns.

It finds the model's tokenizer and the dataset as folders in its working directory, under the names that it
asks the Hugging Face hub for. It continues from a checkpoint, as after an interruption: an adapter that has
learned the format of the answer, because a small random model would never guess it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_cluster import CLUSTER_VARIABLE, DEADLINE_S, SESSION, eventually, processes_with
from run_output import metric_rows
from sdk_examples import example
from serve_command import serve
from tiny_models import build_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tinker_cookbook") is None and "RAYLIGHT_REQUIRE_TINKER" not in os.environ,
    reason="not installed: tinker_cookbook; see docs/tinker.md",
)
NAME = "Qwen/Qwen3-4B-Instruct-2507"
KEY = "tml-rl-loop"
STEPS, GROUP, PROBLEMS = 8, 8, 4
ANSWERS = ("3", "7")
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOT = [
    {"role": "user", "content": f"How many r's are in strawberry?{SUFFIX}"},
    {"role": "assistant", "content": "Let's spell the word out. \\boxed{3}"},
]
"""A conversation like the one that rl_loop begins with."""
README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
---
"""


def write_dataset(folder: Path) -> list[str]:
    """Write questions in the form of GSM8K, whose answer is always 7; return the questions."""
    (folder / "main").mkdir(parents=True)
    questions = [f"What is {7 + i} - {i}?" for i in range(STEPS * PROBLEMS)]
    lines = [json.dumps({"question": q, "answer": "It is seven.\n#### 7"}) for q in questions]
    (folder / "main" / "train.jsonl").write_text("\n".join(lines))
    (folder / "README.md").write_text(README)
    return questions


def teach_format(url: str, questions: list[str]) -> str:
    """Train an adapter to answer with one of ANSWERS in a box; return the path of its state."""
    import tinker
    from tinker_cookbook import renderers
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    tokenizer = get_tokenizer(NAME)
    renderer = renderers.get_renderer("qwen3_instruct", tokenizer)
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    client = service.create_lora_training_client(NAME, rank=16, seed=0).result()
    for step in range(30):
        examples = []
        for answer in ANSWERS:
            question = {"role": "user", "content": questions[step] + SUFFIX}
            prompt = renderer.build_generation_prompt([*SHOT, question])
            response = [*tokenizer.encode(f"\\boxed{{{answer}}}"), *renderer.get_stop_sequences()]
            examples.append(example(prompt.to_ints(), response))
        passed = client.forward_backward(examples, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=5e-3, grad_clip_norm=1.0)).result()
    assert passed.result().metrics["loss:sum"] < 2.5
    path = client.save_state("format").result().path
    service.close("success").result()
    return path


def test_rl_loop_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_model("qwen3", tmp_path / NAME, max_position_embeddings=2048, initializer_range=0.3)
    questions = write_dataset(tmp_path / "openai" / "gsm8k")
    shared = {CLUSTER_VARIABLE: "tinker-rl-loop"}
    options = ["--model", NAME, "--port", "0", "--api-key", KEY, "--engine=transformers"]
    options += ["--stable-reinforce", "ppo"]
    with serve(*options, env=shared, command="tinker") as server:
        state = teach_format(server.url, questions)
        log = tmp_path / "log"
        log.mkdir()
        (log / "checkpoints.jsonl").write_text(
            json.dumps({"name": "format", "batch": 0, "state_path": state})
        )
        run_rl_loop(server.url, log)
    rewards = [row["reward/total"] for row in read_metrics(log)]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards
    final = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    for kind in ("state_path", "sampler_path"):
        assert (tmp_path / "outputs" / "tinker" / final[kind].removeprefix("tinker://")).is_dir()
    eventually(lambda: not processes_with({**SESSION, **shared}), DEADLINE_S, "the end of the server")


def run_rl_loop(url: str, log: Path) -> None:
    settings: dict[str, Any] = {
        "base_url": url,
        "log_path": log,
        "model_name": NAME,
        "batch_size": PROBLEMS,
        "group_size": GROUP,
        "learning_rate": 1e-2,
        "max_tokens": 12,
        "save_every": 3,
        "max_steps": STEPS,
    }
    command = [sys.executable, "-m", "tinker_cookbook.recipes.rl_loop"]
    command += [f"{name}={value}" for name, value in settings.items()]
    env = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    finished = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def read_metrics(log: Path) -> list[dict[str, Any]]:
    rows = metric_rows(log)
    return [row for row in rows if "reward/total" in row]
