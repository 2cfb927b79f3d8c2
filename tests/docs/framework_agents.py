"""Agents of documentation pages, each in a virtual environment with its framework's own packages.

A page names its packages in an indented line `pip install ...` and their versions after "Tested with". The
rollout function that it shows runs in that environment, as a program of a `CommandAgent`: its file
`page_agent.py` needs pydantic and nothing else of raylight's packages.
"""

import hashlib
import json
import random
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs_snippets import DOCS

import raylight as rl
from raylight.types import FinishedRollout

CLIENTS = DOCS / "clients"
MAX_TOKENS = 16_384
"""Limit of a conversation: some frameworks' prompts are long, and a token of a small model is a byte."""
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}
"""Variables that keep frameworks from calling the network."""
PROGRAM = Path(__file__).with_name("page_agent.py")
INSTALL = re.compile(r"^    (?:pip|npm) install (.+)$", re.MULTILINE)
VERSION = re.compile(r"(?<!\S)((?:@[a-z-]+/)?[a-z][a-z0-9-]*) (\d+\.\d+(?:\.\d+)*)\b")


def requirements(page: Path) -> list[str]:
    """Return the packages that a page installs, with the versions that it was tested with; none if it
    installs none."""
    text = page.read_text()
    line = " ".join(INSTALL.findall(text))
    versions = dict(VERSION.findall(text.partition("Tested with")[2]))
    given = [re.sub(r"[<>=].*", "", package) for package in shlex.split(line)]
    names = {name: re.sub(r"\[.*", "", name) for name in given}
    missing = [name for name in names.values() if name not in versions]
    assert not missing, f'{page.name} does not say after "Tested with" which version of {missing} it means'
    sign = "@" if "npm install" in text else "=="
    return [f"{name}{sign}{versions[bare]}" for name, bare in names.items()]


class Environments:
    """Virtual environments, each built once for its requirements.

    Args:
        folder: folder of the environments.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def python(self, packages: list[str]) -> Path:
        """Return the interpreter of an environment with these packages; this one's if there are none.

        Raises:
            AssertionError: pip fails; the message has its output.
        """
        if not packages:
            return Path(sys.executable)
        name = hashlib.sha256("\n".join(sorted(packages)).encode()).hexdigest()[:16]
        python = self._folder / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", self._folder / name], check=True)
            command = [python, "-m", "pip", "install", "--quiet", "--no-compile", *packages]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"pip cannot install {packages}:\n{done.stderr[-4000:]}"
        return python


def modules(packages: list[str], folder: Path) -> None:
    """Install packages of npm in a folder.

    Raises:
        AssertionError: npm fails; the message has its output.
    """
    command = ["npm", "install", "--no-audit", "--no-fund", *packages]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"npm cannot install {packages}:\n{done.stderr[-4000:]}"


def agent_of_page(
    page: Path, environments: Environments, block: str = "agent", *replaced: str, noise: bool = False
) -> rl.CommandAgent:
    """Return an agent that runs the rollout function of a page with the page's packages.

    Args:
        block: name of the page's block, whose function is called `agent`.
        replaced: texts in the block, each followed by its replacement.
        noise: add a random number between 0 and 0.1 to each reward, so that every batch has a gradient.
    """
    python = environments.python(requirements(page))
    return rl.CommandAgent(
        [python, PROGRAM, page, block, *replaced], reward=noisy if noise else "stdout", env=OFFLINE
    )


def noisy(task: Any, result: Any) -> float:
    """Return the reward in the last line of a program's output, with noise."""
    return float(result.stdout.split()[-1]) + random.uniform(0, 0.1)


class RunTasks(rl.FastAlgorithm):
    """Algorithm that rolls out every task once and keeps the results."""

    results: list[FinishedRollout]

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        requests = [rl.EnqueueRolloutRequest(input=task, mode="train") for task in train_dataset]
        ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
        await store.wait_until_decided(rollout_ids=ids, timeout=120)
        self.results = await store.collect(ids, with_spans=True)


def run_once(agent: Any, tasks: list[Any], url: str, folder: Path) -> list[FinishedRollout]:
    """Run an agent once on each task, with a model that another server serves at `url`.

    Args:
        folder: output folder of the run.
    """
    algorithm = RunTasks()
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=1,
        output_dir=folder,
        progress=False,
        initial_resources={"llm": rl.LLM(endpoint=url, model="scripted", traced=True)},
    )
    trainer.fit(agent, tasks)
    return algorithm.results


@dataclass
class Training:
    """Results of a run of two steps."""

    metrics: list[dict[str, Any]]
    """Rows of metrics.jsonl, one for each step."""
    rollouts: list[FinishedRollout]

    @property
    def failures(self) -> list[str]:
        """Errors of failed rollouts, with the standard error of their programs."""
        return failures(self.rollouts)


def failures(rollouts: list[FinishedRollout]) -> list[str]:
    """Return the errors of failed rollouts, with the standard error of their programs."""
    attempts = [item.rollout.attempt for item in rollouts if item.rollout.attempt]
    return [f"{a.failure.error}\n{a.failure.trace}" for a in attempts if a.failure]


def train(agent: Any, tasks: list[Any], model: str, folder: Path, **settings: Any) -> Training:
    """Train an agent for two steps on the Ray cluster of RAY_ADDRESS.

    Args:
        folder: output folder of the run.
        settings: further arguments of `rl.GRPO`.
    """
    options = {"n_steps": 2, "tasks_per_step": 2, "group_size": 4, "lr": 1e-4} | settings
    trainer = rl.Trainer(
        algorithm=rl.GRPO(model=model, **options),
        n_runners=1,
        runner={"max_concurrent": 4},
        engine={"max_model_len": MAX_TOKENS},
        output_dir=folder,
        progress=False,
    )
    trainer.fit(agent, tasks)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Training([json.loads(line) for line in lines], rl.read_rollouts(folder))
