"""Rollouts under load with a simulated learner: speed, and the memory of each kind of process.

    python tests/benchmarks/simulated_load.py [--agents 1000] [--steps 113] [--speed 12] [--staleness 2]
    python tests/benchmarks/simulated_load.py --engine echo --agents 10000 --turns 20 --rate 100

An agent makes `--turns` calls of at most 8 tokens and waits `--tool-s` seconds after each, as for a tool.
`--agents` of them run at a time, in two runner processes; the engine is the quickstart's model on a CPU.
With `--engine echo`, `--replicas` of an engine answer at once with the text of the last message, so that all
else is measured. `--rate` sets the wait so that all agents together make that many calls a second: then
figures of runs with different numbers of agents differ by that number alone.

Simulated time is the learner's clock: each step is 30 s of an update and 2 s of a publication. These and the
tools' time pass `--speed` times faster; agents, engine, store and loop do not. 113 steps are an hour of
simulated time. If rollouts do not keep up, the run takes longer, and the learner's idle time is printed.
Ctrl-C ends a run early and prints what there is.

Memory is counted by kind of process, without shared memory, which is the object store's and counted once.
CPU is what all processes of a kind used between the first and the last call, per call. The store's file is
behind by at most the bytes of SQLite's write-ahead log, whose largest size is printed.
Its growth is a line fitted to `BLOCKS` means over the rollouts of the last three quarters of the run.
"""

import argparse
import array
import asyncio
import contextlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from harness import ROOT, make_parser, memory_kib

import raylight as rl
from raylight.quickstart import STARTER_MODEL

GROUP_SIZE = 8
STEP_S, SYNC_S = 30.0, 2.0
SAMPLE_S = 1.0
BLOCKS = 20
"""Means that a line is fitted to: single samples depend on those before."""
ROLLOUT_ENDS = -1.0
"""Mark of a finished rollout, among the durations of calls."""
PROCESS: list[Any] = []
"""HTTP client and open file of a runner's process, once it has them."""


@rl.rollout
async def agent(task: dict, llm: rl.LLM) -> float:
    if not PROCESS:
        connector = aiohttp.TCPConnector(limit=1000)
        PROCESS.append(aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)))
        PROCESS.append(os.open(f"{task['folder']}/times-{os.getpid()}", os.O_WRONLY | os.O_CREAT))
    client, times = PROCESS
    messages = [{"role": "user", "content": f"{task['number']}+1="}]
    for _ in range(task["turns"]):
        start = time.monotonic()
        async with client.post(
            f"{llm.endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {llm.api_key}"},
            json={"model": llm.model, "messages": messages, "max_tokens": 8},
            raise_for_status=True,
        ) as answer:
            choices = (await answer.json())["choices"]
        now = time.monotonic()
        os.write(times, array.array("d", [now, now - start]))
        text = choices[0]["message"]["content"]
        await asyncio.sleep(task["tool_s"] * random.uniform(0.5, 1.5))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "1+1="}]
    os.write(times, array.array("d", [time.monotonic(), ROLLOUT_ENDS]))
    return float(len(text) % 2)


def engine(args: argparse.Namespace) -> dict[str, Any]:
    settings = {"replicas": args.replicas, "max_concurrent": 256}
    if args.engine == "echo":
        return {**settings, "kind": "echo_engine:EchoEngine"}
    return {**settings, "kind": args.engine, "max_model_len": 128}


def train(args: argparse.Namespace) -> None:
    """The driver's part."""
    task = {"turns": args.turns, "tool_s": args.tool_s / args.speed, "folder": args.folder}
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=GROUP_SIZE,
        tasks_per_step=args.tasks_per_step,
        n_steps=args.steps,
        max_steps_without_signal=args.steps,
        max_staleness=args.staleness,
        stale=args.stale,
        rollout={"timeout_seconds": 3600},
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        learner={"kind": "simulated", "step_s": STEP_S / args.speed, "sync_s": SYNC_S / args.speed},
        engine=engine(args),
        runner={"n": args.runners, "max_concurrent": -(-args.agents // args.runners)},
        checkpoint={"every": 0},
        output_dir=Path(args.folder, "run"),
        loggers=["jsonl"],
        progress=False,
    )
    trainer.fit(agent, [{"number": number, **task} for number in range(1000)])


class Processes:
    """Samples of the memory and the CPU time of a process and its descendants, by kind."""

    def __init__(self, pid: int, folder: str) -> None:
        self._driver = psutil.Process(pid)
        self._folder = Path(folder)
        self.times: list[float] = []
        self.wal_bytes = 0
        """Largest size of the store's write-ahead log."""
        self._samples: list[Counter[str]] = []
        self._cpu_s: list[Counter[str]] = []

    def sample(self) -> None:
        found: Counter[str] = Counter()
        cpu_s: Counter[str] = Counter()
        for process in [self._driver, *self._driver.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                kind = "driver" if process.pid == self._driver.pid else kind_of(process)
                shared = memory_kib("RssShmem", process.pid)
                found[kind] += memory_kib("VmRSS", process.pid) - shared
                cpu_s[kind] += sum(process.cpu_times()[:2])
                if kind == "raylet":
                    found["object store"] += shared
        for log in self._folder.rglob("store.db-wal"):
            self.wal_bytes = max(self.wal_bytes, log.stat().st_size)
        self.times.append(time.monotonic())
        self._samples.append(found)
        self._cpu_s.append(cpu_s)

    def cpu_line(self, start: float, end: float, calls: int) -> str:
        """Return the CPU milliseconds per call of each kind, between two times."""
        first, last = np.searchsorted(self.times, [start, end]) - 1
        used = Counter(self._cpu_s[last])
        used.subtract(self._cpu_s[first])
        return ", ".join(f"{kind} {seconds / calls * 1e3:.2f}" for kind, seconds in used.most_common())

    def table(self, rollout_ends: np.ndarray) -> str:
        """Return for each kind: MB at the start of the second quarter and at the end, and the growth."""
        times = np.array(self.times)
        first, last = rollout_ends[0], rollout_ends[-1]
        chosen = (times >= first + (last - first) / 4) & (times <= last)
        rollouts = np.searchsorted(rollout_ends, times[chosen]) / 1000
        kinds = {kind for sample in self._samples for kind in sample}
        lines = []
        for kind in kinds:
            values = np.array([sample[kind] for sample in self._samples])[chosen] / 1e3
            if values[-1] < 1:  # of processes that have ended
                continue
            slope, error = fit(rollouts, values)
            sizes = f"{kind:24}{values[0]:9.1f}{values[-1]:9.1f}"
            lines.append((values[-1], f"{sizes}{slope:9.3f} ± {error:.3f}"))
        head = f"{'MB':24}{'from':>9}{'to':>9}   growth per 1,000 rollouts\n"
        return head + "\n".join(line for _, line in sorted(lines, reverse=True))


def kind_of(process: psutil.Process) -> str:
    title = (process.cmdline() or [""])[0]
    actor = re.match(r"ray::(\w+)", title)
    if actor is not None:
        return actor[1]
    name = Path(title).name
    return name if name in ("raylet", "gcs_server", "haproxy") else "others of Ray"


def fit(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the slope of a line through means of blocks, and its standard error."""
    if len(x) < BLOCKS:
        return math.nan, math.nan
    xs, ys = (np.array([part.mean() for part in np.array_split(values, BLOCKS)]) for values in (x, y))
    (slope, _), covariance = np.polyfit(xs, ys, 1, cov=True)
    return float(slope), float(covariance[0, 0] ** 0.5)


def report(args: argparse.Namespace, processes: Processes) -> None:
    folder = Path(args.folder)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"]]
    events = np.concatenate([np.fromfile(path).reshape(-1, 2) for path in folder.glob("times-*")])
    events = events[events[:, 0].argsort()]
    rollout_ends = events[events[:, 1] == ROLLOUT_ENDS, 0]
    calls = events[events[:, 1] != ROLLOUT_ENDS]
    seconds = rollout_ends[-1] - rollout_ends[0]
    p50, p99 = np.quantile(calls[:, 1], [0.5, 0.99])
    in_progress = np.mean([row.get("async/rollouts_in_progress", 0.0) for row in rows])
    idle = sum(row.get("async/trainer_idle_s", row["time/rollout_s"]) for row in rows)
    print(
        f"{len(rows)} steps of {args.tasks_per_step * GROUP_SIZE} rollouts, {args.turns} calls each, "
        f"max_staleness={args.staleness}, stale={args.stale!r}\n"
        f"{len(rows) * (STEP_S + SYNC_S) / 60:.1f} min of simulated time in {seconds:.0f} s, in which the "
        f"learner was idle for {idle:.0f} s\n"
        f"{len(calls) / np.ptp(calls[:, 0]):.0f} requests/s, {len(rollout_ends) / seconds:.1f} rollouts/s, "
        f"{in_progress:.0f} rollouts in progress on average; a call: p50 {p50:.2f} s, "
        f"p99 {p99:.2f} s\n"
        f"{len(rollout_ends)} rollouts, failed: {sum(row['train/failed'] for row in rows):.0f}"
    )
    print(f"CPU ms per call: {processes.cpu_line(calls[0, 0], calls[-1, 0], len(calls))}")
    print(f"write-ahead log of the store: at most {processes.wal_bytes / 1e6:.0f} MB")
    print(processes.table(rollout_ends))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=113)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tool-s", type=float, default=48.0, help="seconds of a tool, in simulated time")
    parser.add_argument("--speed", type=float, default=12.0, help="simulated seconds per second")
    parser.add_argument("--staleness", type=int, default=2, help="max_staleness; 0 is synchronous")
    parser.add_argument("--stale", choices=("wait", "drop", "mask"), default="wait")
    parser.add_argument("--engine", choices=("transformers", "vllm", "echo"), default="transformers")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rate", type=float, help="calls a second of all agents together, in real time")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rate:
        args.tool_s = args.agents / args.rate * args.speed
    args.tasks_per_step = -(-args.agents // GROUP_SIZE // (args.staleness + 1))
    os.environ.setdefault("RAY_ADDRESS", "local")
    if args.folder:  # in a separate process, whose memory is not measured
        return train(args)
    path = os.pathsep.join([str(ROOT / "tests/unit/helpers"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as args.folder:
        command = [sys.executable, *sys.argv, "--folder", args.folder]
        with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}) as driver:
            processes = Processes(driver.pid, args.folder)
            with contextlib.suppress(KeyboardInterrupt):  # which ends the driver too
                while driver.poll() is None:
                    processes.sample()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        driver.wait(SAMPLE_S)
        report(args, processes)
        sys.exit(driver.returncode)


if __name__ == "__main__":
    main()
