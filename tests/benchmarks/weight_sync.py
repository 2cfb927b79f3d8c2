"""Publications of weights: seconds, and memory of every process, over model size, replicas and ranks.

    python tests/benchmarks/weight_sync.py [--millions 0.25 20] [--replicas 1 2] [--ranks 1 2]
    python tests/benchmarks/weight_sync.py --engine vllm --parallel 1 2     # needs vLLM
    git worktree add /tmp/before COMMIT
    python tests/benchmarks/weight_sync.py --against /tmp/before

Each line is a separate run, with learners, served replicas, store and coordinator as a training run has
them, in which `Publications.publish` sends versions and nothing is trained. `full` sends the model,
`lora` what the checkout sends for an adapter of rank 8. Seconds exclude the comparison of log-probs after a
publication: `first` opens connections, `next` is the fastest of the later ones. `blocked` is the shortest
time from the end of an update until the next one may begin, with the comparison; with `--overlap`, the lines
`overlap` send a snapshot while the next update could run, as runs with `max_staleness` do. Memory is the
increase of a process's resident memory (VmHWM over VmRSS before) in the first publication, of the process in
which it is largest; learners return their unused memory to the system before. `store` is Ray's object store.
Shared memory counts in each process that maps it. With `--against`, the checkouts take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from harness import make_parser, memory_kib, reset_peak, save_random

SIZES = {20: (256, 12), 125: (768, 12), 350: (1024, 24), 500: (1280, 18)}
"""Millions of parameters -> width and layers of the model."""
STARTER = 0.25
"""Millions of parameters of the quickstart's model."""
TIMEOUT_S = 300.0
CELL_TIMEOUT_S = 900.0
ROLES = ("learner 0", "learners", "engine", "store", "driver", "other")
ENGINES = ("ServeReplica", "VLLM::", "RayWorker")
"""Parts of the titles of engines' processes. The children of these belong to engines too."""
RESULT = "result: "


class Memory:
    """Resident memory of this process's descendants, and of itself, during some work."""

    def __init__(self, learners: list[int]) -> None:
        """`learners` are the processes of the ranks."""
        own = psutil.Process()
        self._roles = {process.pid: role(process) for process in own.children(recursive=True)}
        self._roles |= {own.pid: "driver"} | dict.fromkeys(learners, "learners") | {learners[0]: "learner 0"}
        self._before: dict[int, int] = {}

    def start(self) -> None:
        for pid in self._roles:
            try:
                reset_peak(pid)
                self._before[pid] = memory_kib("VmRSS", pid)
            except (ProcessLookupError, FileNotFoundError):
                continue  # the process has ended

    def increases(self) -> dict[str, int]:
        """Return the largest increase of a process of each role, in KiB."""
        found = dict.fromkeys(ROLES, 0)
        for pid, before in self._before.items():
            try:
                increase = memory_kib("VmHWM", pid) - before
            except (ProcessLookupError, FileNotFoundError):
                continue
            found[self._roles[pid]] = max(found[self._roles[pid]], increase)
        return found


def role(process: psutil.Process) -> str:
    try:
        title = " ".join(process.cmdline())
        titles = [title, *(" ".join(parent.cmdline()) for parent in process.parents())]
    except psutil.NoSuchProcess:
        return "other"
    if "raylet/raylet" in title:
        return "store"
    return "engine" if any(name in one for one in titles for name in ENGINES) else "other"


async def publish(planned: Any, report: Any, publications: int, overlap: bool) -> list[dict[str, Any]]:
    """Publish versions in a run; return the seconds and memory of each."""
    rows: list[dict[str, Any]] = []
    async with planned.components(report.stage, True) as run:
        learners = run.learners
        settings = dataclasses.replace(learners.publications._settings, during_updates=overlap)
        learners.publications._settings = settings
        compare = learners.publications.check_parity

        async def compare_later(*args: Any) -> Any:
            rows.append({"seconds": time.perf_counter() - began, **memory.increases()})
            return await compare(*args)

        learners.publications.check_parity = compare_later  # type: ignore[method-assign]
        for version in range(1, publications + 1):
            await learners.learner.load_state("", 0, version)  # numbers the weights only
            ranks = await learners.learner._call("trim")
            learners.version = version
            memory = Memory(ranks)
            memory.start()
            began = time.perf_counter()
            publishing = asyncio.create_task(learners.publications.publish(version))
            await asyncio.sleep(0)
            async with learners.publications.learners_busy:  # as an update
                blocked = time.perf_counter() - began
            await publishing
            rows[-1]["blocked"] = blocked
    return rows


def run_cell(cell: dict[str, Any]) -> None:
    """Measure one configuration with the raylight that is importable, and print its rows."""
    import functools

    import raylight as rl
    from raylight.learner.ranks.actor import LearnerActor
    from raylight.trainer.components import run_learner
    from raylight.trainer.runs.policy_run import PolicyRun

    class TrimmedLearner(LearnerActor):
        def trim(self) -> int:
            """Return memory that is unused, which learners keep; return the process id."""
            import ctypes
            import gc

            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            return os.getpid()

    @rl.rollout
    async def agent(task: int, llm: rl.LLM) -> float:
        return 0.0

    async def work(planned: Any, report: Any, owns_cluster: bool) -> dict[str, Any]:
        rows = await publish(planned, report, cell["publications"], cell["overlap"])
        print(RESULT + json.dumps(rows), flush=True)
        return {}

    run_learner.LearnerGroup = functools.partial(run_learner.LearnerGroup, actor=TrimmedLearner)  # type: ignore[misc]
    PolicyRun.work = work  # type: ignore[method-assign]
    args = {"tensor_parallel_size": cell["parallel"]} if cell["parallel"] > 1 else {}
    trainer = rl.Trainer(
        algorithm=rl.GRPO(model=cell["model"], n_steps=1, max_logprob_mismatch=1e6, sync_timeout_s=TIMEOUT_S),
        engine={
            "kind": cell["engine"],
            "replicas": cell["replicas"],
            "num_cpus": 0.2,
            "max_model_len": 256,
            "max_concurrent": 4,
            "start_timeout_s": 600,
            "args": args,
        },
        learner={
            "n": cell["ranks"],
            "num_cpus": 0.4,
            "start_timeout_s": 600,
            "lora": {"rank": 8} if cell["sends"] == "lora" else None,
        },
        output_dir=cell["folder"],
        address="local",
        progress=False,
        loggers=[],
    )
    trainer.fit(agent, [0])


def run_process(cell: dict[str, Any], checkout: str) -> list[dict[str, Any]] | str:
    """Run a configuration in a process; return its rows, or the reason for having none."""
    environment = os.environ | {
        "PYTHONPATH": checkout,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as folder:
        task = json.dumps(cell | {"folder": f"{folder}/run"})
        command = [sys.executable, str(Path(__file__).resolve()), "--cell", task]
        try:
            done = subprocess.run(
                command,
                cwd=checkout,  # from which Ray's workers import
                env=environment,
                capture_output=True,
                text=True,
                timeout=CELL_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"no result within {CELL_TIMEOUT_S:g} s"
    found = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not found:
        return (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}")[-600:]
    rows: list[dict[str, Any]] = json.loads(found[-1].removeprefix(RESULT))
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--millions", type=float, nargs="+", default=[STARTER, 20], choices=[STARTER, *SIZES])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parallel", type=int, nargs="+", default=[1], help="tensor parallel sizes of vLLM")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--sends", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--publications", type=int, default=4)
    parser.add_argument("--overlap", action="store_true", help="measure publications during updates too")
    parser.add_argument("--against", metavar="CHECKOUT", help="worktree of another commit")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publications < 2:
        parser.error("--publications must be at least 2")
    return options


def main() -> None:
    options = parse_arguments()
    if options.cell:
        run_cell(json.loads(options.cell))
        return
    checkouts = {"now": str(Path(__file__).resolve().parents[2])}
    if options.overlap:
        checkouts["overlap"] = checkouts["now"]
    if options.against:
        checkouts["before"] = options.against
    print(f"{'':48} {'seconds':>20}  {'increase of memory, MiB':>24}")
    columns = ("millions", "sends", "ranks", "replicas", "parallel", "path")
    print(
        *(f"{name:>8}" for name in (*columns, "first", "next", "blocked")), *(f"{name:>9}" for name in ROLES)
    )
    dimensions = (options.millions, options.sends, options.ranks, options.replicas, options.parallel)
    with tempfile.TemporaryDirectory() as folder:
        for values in itertools.product(*dimensions):
            cell = dict(zip(columns, values, strict=False))
            cell |= {"engine": options.engine, "publications": options.publications}
            cell["model"] = find_model(Path(folder), cell["millions"])
            for name, checkout in checkouts.items():
                show([*values, name], run_process(cell | {"overlap": name == "overlap"}, checkout))


def find_model(folder: Path, millions: float) -> str:
    """Return the folder of a model, which is written at its first use."""
    if millions == STARTER:
        from raylight.quickstart import STARTER_MODEL

        return str(STARTER_MODEL)
    model = folder / f"model-{millions:g}"
    if not model.exists():
        make_model(model, int(millions))
    return str(model)


def make_model(folder: Path, millions: int) -> None:
    """Write a model with random weights."""
    from transformers import Qwen3Config

    width, layers = SIZES[millions]
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        tie_word_embeddings=True,
    )
    save_random(config, folder)


def show(values: list[Any], rows: list[dict[str, Any]] | str) -> None:
    key = " ".join(f"{value:>8}" for value in values)
    if isinstance(rows, str):
        print(key, f"failed: {rows}", flush=True)
        return
    first, fastest = rows[0], min(row["seconds"] for row in rows[1:])
    memory = " ".join(f"{first[name] / 1024:9.1f}" for name in ROLES)
    blocked = min(row["blocked"] for row in rows[1:])
    print(key, f"{first['seconds']:8.2f} {fastest:8.2f} {blocked:8.3f}", memory, flush=True)


if __name__ == "__main__":
    main()
