"""Training runs of the loop benchmarks, each in a separate process, in paired rounds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from flames import Recorders, children, flame_folder
from harness import make_parser, process_tree, run_script
from simulated_load import kind_of

HERE = Path(__file__).parent
WARM_UP = 3
"""First steps of a run, which are left out."""
ACTORS = ("ServeReplica", "RunnerActor", "StoreActor", "LearnerActor")
"""Kinds of actors whose flame graphs are recorded."""
FLAMES = "RAYLIGHT_BENCHMARK_FLAMES"
"""Environment variable with the folder for flame graphs of raylight's runs."""
STAGES = ("rollout", "update", "sync")
Programs = dict[str, Callable[[], dict[str, Any]]]
"""Functions that run a program and return its result, by name."""


class Meter:
    """Metric logger that measures the wall and CPU seconds per step, from the end of the warm-up to the last
    step for which rollouts of later steps are still sampled.

    Args:
        flames: folder for flame graphs of the driver and an actor of each kind; they are recorded meanwhile.
    """

    def __init__(self, n_steps: int, max_staleness: int, flames: Path | None = None) -> None:
        self._first, self._last = WARM_UP, n_steps - max_staleness
        self._flames = flames
        self._recorders: Recorders | None = None
        self._rows: list[dict[str, float]] = []
        self._marks: list[tuple[float, Counter[str]]] = []

    def start(self, config: dict[str, Any]) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._first < step <= self._last:
            self._rows.append(metrics)
        if step in (self._first, self._last):
            self._marks.append((time.perf_counter(), cpu_by_kind()))
        if step == self._first and self._flames is not None:
            self._recorders = Recorders(self._flames, children(ACTORS))

    def finish(self) -> None:
        if self._recorders is not None:
            self._recorders.finish()

    def result(self) -> dict[str, Any]:
        (begun, cpu_begun), (ended, cpu_ended) = self._marks
        steps = self._last - self._first
        stages = {
            name: statistics.median(row.get(f"time/{name}_s", 0.0) for row in self._rows) for name in STAGES
        }
        cpu = {kind: seconds / steps for kind, seconds in (cpu_ended - cpu_begun).items()}
        return {"step": (ended - begun) / steps, "stages": stages, "cpu": cpu}


def cpu_by_kind() -> Counter[str]:
    """Return the CPU time of this process and of all processes below it, by kind."""
    seconds: Counter[str] = Counter()
    for process in process_tree():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            kind = "driver" if process.pid == os.getpid() else kind_of(process)
            seconds[kind] += sum(process.cpu_times()[:2])
    return seconds


def train(
    agent: Any, tasks: list[Any], n_steps: int, max_staleness: int, algorithm: Any, **settings: Any
) -> None:
    """Train with raylight, and print what the Meter measured."""
    import raylight as rl

    flames = os.environ.get(FLAMES)
    meter = Meter(n_steps, max_staleness, Path(flames) if flames else None)
    with tempfile.TemporaryDirectory() as folder:
        rl.Trainer(
            algorithm=algorithm(n_steps=n_steps, max_staleness=max_staleness, val_every=None),
            n_runners=2,
            output_dir=folder,
            address="local",
            progress=False,
            loggers=[meter],
            checkpoint={"every": 0},
            **settings,
        ).fit(agent, tasks)
    print(json.dumps(meter.result()))


def chat_agent(question: Callable[[int], str], reward_of: Callable[[str], float], max_tokens: int) -> Any:
    """Return an agent that asks a question, and whose reward is `reward_of` the answer's text."""
    import raylight as rl

    @rl.rollout
    async def agent(task: int, llm: rl.LLM) -> float:
        reply = await llm.client().chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": question(task)}],
            temperature=1.0,
            max_tokens=max_tokens,
        )
        return reward_of(reply.choices[0].message.content or "")

    return agent


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all loop benchmarks."""
    parser = make_parser(doc)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 1], help="raylight's runs")
    parser.add_argument("--trl-python", default=sys.executable, help="Python of an environment with TRL")
    parser.add_argument("--flame", type=flame_folder, help="folder for flame graphs (needs py-spy)")
    parser.add_argument("--cpu", action="store_true", help="print the CPU time of each kind of process")
    return parser


def measure(python: str, script: str, *args: object, flames: Path | None = None) -> dict[str, Any]:
    """Run a script of this folder; return the result that it prints.

    Args:
        flames: folder for the flame graphs of raylight's processes, whose figures are then too high.
    """
    environment = {FLAMES: str(flames)} if flames else {}
    return run_script(str(HERE / script), *args, python=python, **environment)


def run_rounds(programs: Programs, count: int) -> list[dict[str, dict[str, Any]]]:
    """Run all programs in every round; return the results of each round."""
    rounds = []
    for _ in range(count):
        rounds.append({name: run() for name, run in programs.items()})
        print("  ".join(f"{name} {result['step']:.3f}" for name, result in rounds[-1].items()), flush=True)
    return rounds


def report(rounds: list[dict[str, dict[str, Any]]], peer: str, cpu: bool) -> None:
    """Print each trainer's seconds per step, and its rollouts per second relative to a peer's.

    Args:
        rounds: per round, the results by trainer.
    """
    print(
        f"{'median s a step':22}{'all':>8}"
        + "".join(f"{name:>9}" for name in STAGES)
        + f"{'of ' + peer:>9}  range"
    )
    for name in rounds[0]:
        results = [a_round[name] for a_round in rounds]
        stages = [statistics.median(r.get("stages", {}).get(stage, 0.0) for r in results) for stage in STAGES]
        ratios = [a_round[peer]["step"] / a_round[name]["step"] for a_round in rounds]
        print(
            f"{name:22}{statistics.median(r['step'] for r in results):8.3f}"
            + "".join(f"{seconds:9.3f}" for seconds in stages)
            + f"{statistics.median(ratios):9.2f}  {min(ratios):.2f} to {max(ratios):.2f}"
        )
    for name in rounds[0] if cpu else ():
        kinds = rounds[-1][name].get("cpu", {})
        print(f"CPU ms a step, {name}: {1e3 * sum(kinds.values()):.0f}")
        for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1]):
            print(f"  {kind:24}{1e3 * seconds:8.1f}")
