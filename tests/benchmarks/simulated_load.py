"""Rollouts under load with a simulated learner: requests per second, and the memory of each kind of process.

    python tests/benchmarks/simulated_load.py [--agents 1000] [--steps 120] [--speed 60]

An agent makes `--turns` calls of at most 8 tokens and waits `--tool-s` seconds after each, as for a tool.
`--agents` of them run at a time, in two runner processes; the engine is the quickstart's model on a CPU. With
`--speed`, the learner's 30 s for an update and 2 s for a publication, and the tools' time, pass as many times
faster: 120 steps at the default settings are an hour of simulated time if engine and runners keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import httpx2
import psutil

import raylight as rl
from raylight.quickstart import STARTER_MODEL

GROUP_SIZE = 8
STEP_S, SYNC_S = 30.0, 2.0
SAMPLE_S = 1.0
KINDS = ("driver", "ray::StoreActor", "ray::RunnerActor", "ray::ServeReplica", "ray::CoordinatorActor")
CLIENTS: list[httpx2.AsyncClient] = []
"""The HTTP client of a runner's process, once it has one."""


@rl.rollout
async def agent(task: dict, llm: rl.LLM) -> float:
    if not CLIENTS:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        CLIENTS.append(httpx2.AsyncClient(limits=limits, timeout=None, trust_env=False))
    messages = [{"role": "user", "content": f"{task['number']}+1="}]
    for _ in range(task["turns"]):
        answer = await CLIENTS[0].post(
            f"{llm.endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {llm.api_key}"},
            json={"model": llm.model, "messages": messages, "max_tokens": 8},
        )
        answer.raise_for_status()
        text = answer.json()["choices"][0]["message"]["content"]
        await asyncio.sleep(task["tool_s"])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "1+1="}]
    return float(len(text) % 2)


class MemorySampler(threading.Thread):
    """Reads the resident memory of this process and the run's actors, once a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        own = psutil.Process()
        while not self._ended.wait(SAMPLE_S):
            found: dict[str, int] = defaultdict(int)
            found["driver"] = own.memory_info().rss
            for process in own.children(recursive=True):
                try:
                    title = " ".join(process.cmdline()[:1])
                    kind = next((kind for kind in KINDS if title.startswith(kind)), None)
                    if kind is not None:
                        found[kind] += process.memory_info().rss
                except psutil.Error:  # it has ended
                    continue
            self.samples.append((time.monotonic(), dict(found)))

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def growth(self, kind: str) -> tuple[float, float]:
        """Return the mean MB of the first and the last third, after a warm-up of a quarter."""
        values = [sample.get(kind, 0) / 1e6 for _, sample in self.samples]
        values = values[len(values) // 4 :]
        third = max(len(values) // 3, 1)
        return sum(values[:third]) / third, sum(values[-third:]) / third


def run(args: argparse.Namespace, folder: Path) -> None:
    tasks = [
        {"number": number, "turns": args.turns, "tool_s": args.tool_s / args.speed} for number in range(1000)
    ]
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=GROUP_SIZE,
        tasks_per_step=args.agents // GROUP_SIZE,
        n_steps=args.steps,
        max_steps_without_signal=args.steps,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        learner={"kind": "simulated", "step_s": STEP_S / args.speed, "sync_s": SYNC_S / args.speed},
        engine={"max_model_len": 128, "max_concurrent": 256},
        runner={"n": args.runners, "max_concurrent": -(-args.agents // args.runners)},
        checkpoint={"every": 0},
        output_dir=folder,
        loggers=["jsonl"],
        progress=False,
    )
    sampler = MemorySampler()
    sampler.start()
    started = time.monotonic()
    trainer.fit(agent, tasks)
    seconds = time.monotonic() - started
    sampler.stop()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"]]  # the first row is of the evaluation before training
    rollouts = GROUP_SIZE * (args.agents // GROUP_SIZE)
    sampling = sum(row["time/rollout_s"] for row in rows)
    print(
        f"{len(rows)} steps of {rollouts} agents at a time, {args.turns} calls each, in {seconds:.0f} s "
        f"({seconds * args.speed / 60:.0f} min of simulated time); failed: "
        f"{sum(row['train/failed'] for row in rows):.0f}"
    )
    print(f"{len(rows) * rollouts * args.turns / sampling:.0f} requests/s while agents run")
    for kind in KINDS:
        first, last = sampler.growth(kind)
        print(f"{kind.removeprefix('ray::'):18} {first:7.0f} MB -> {last:7.0f} MB ({last - first:+.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tool-s", type=float, default=10.0, help="seconds of a tool, in simulated time")
    parser.add_argument("--speed", type=float, default=60.0, help="simulated seconds per second")
    args = parser.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    main()
