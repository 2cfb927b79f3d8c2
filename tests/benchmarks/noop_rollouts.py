"""No-op rollouts per second, end to end, with two runners and the durable store.

    python tests/benchmarks/noop_rollouts.py [--count 3000] [--runners 2] [--rounds 3] [--peer DIR]
                                             [--flame DIR]

Each rollout emits three OpenTelemetry spans and a reward. With `--peer`, the virtual environment of
agent-lightning 0.3 in DIR runs `--peer-script` in turn with raylight, and the median and range of the ratios
are printed. Its default strategy is cs (processes and HTTP); shm is threads around an in-memory store.

"bare" is the bound of any strategy: as many processes as runners, each of which records the same spans with
OpenTelemetry and writes them, its rollouts and their attempts to its own SQLite file, a transaction for 64
rollouts. There is no queue, no lease and no message. "one store" is the bound of a store in a separate
process: the same processes send their rows, 64 rollouts in a message, to one Ray actor that commits them.
With `--flame`, py-spy only records the store, a runner and the driver meanwhile.
"""

import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bare_rollouts import bare, one_store
from flames import Recorders, children, flame_folder
from harness import execute, make_parser, spread

import raylight as rl


class TimedRollouts(rl.Algorithm):
    """Algorithm that runs a warm-up batch of rollouts, then times a second batch.

    Args:
        flames: folder for flame graphs of further batches.
    """

    def __init__(self, count: int, warm_up: int = 100, flames: Path | None = None) -> None:
        self.count = count
        self.flames = flames
        self.warm_up = warm_up
        self.per_second = 0.0

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        await execute(self.get_store(), tasks(self.warm_up))
        started = time.perf_counter()
        await execute(self.get_store(), tasks(self.count))
        self.per_second = self.count / (time.perf_counter() - started)
        if self.flames is not None:
            await self._record(self.flames)

    async def _record(self, folder: Path) -> None:
        pids = children(("StoreActor", "RunnerActor"))
        names = {"StoreActor": "noop_store", "RunnerActor": "noop_runner", "driver": "noop_driver"}
        recorders = Recorders(folder, {names[kind]: pid for kind, pid in pids.items()})
        while recorders.are_running:
            await execute(self.get_store(), tasks(self.count))
        recorders.finish()


def tasks(count: int) -> list[str]:
    return [f"task {i}" for i in range(count)]


@rl.rollout
async def agent(task: str, llm: rl.LLM) -> float:
    from opentelemetry import trace

    tracer = trace.get_tracer("noop")
    for i in range(3):
        with tracer.start_as_current_span(f"step {i}") as span:
            span.set_attributes({"text": "x" * 200, "number": i})
    return 1.0


def ours(count: int, runners: int, flames: Path | None = None) -> float:
    algorithm = TimedRollouts(count, flames=flames)
    with tempfile.TemporaryDirectory() as folder:
        trainer = rl.Trainer(
            algorithm=algorithm,
            n_runners=runners,
            output_dir=folder,
            progress=False,
            initial_resources={"llm": rl.LLM(endpoint="http://unused", model="m")},
        )
        trainer.fit(agent)
        size = (Path(folder) / "store.db").stat().st_size
    scale = f"{count} rollouts, {runners} runners, store.db {size / 1e6:.1f} MB"
    print(f"raylight: {algorithm.per_second:.0f} rollouts/s ({scale})")
    return algorithm.per_second


def peer(python: Path, script: Path, count: int, runners: int, strategy: str) -> float:
    command = [str(python), str(script), str(count), str(runners), strategy]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert running.stdout
    output = ""
    for line in running.stdout:
        output += line
        if "RESULT" in line:
            break
    os.killpg(running.pid, signal.SIGKILL)  # it may not exit by itself
    result = re.search(r"RESULT .* ([\d.]+) rollouts/s", output)
    if result is None:
        raise SystemExit(f"{script} printed no RESULT line; its output ends with: {output[-1500:]}")
    print(f"agent-lightning 0.3, {strategy}: {result[1]} rollouts/s ({count} rollouts, {runners} runner(s))")
    return float(result[1])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--peer", type=Path, help="virtual environment of agent-lightning 0.3")
    parser.add_argument(
        "--peer-script", type=Path, help="script for agent-lightning, called as: SCRIPT COUNT RUNNERS cs|shm"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flame", type=flame_folder, help="folder for flame graphs (needs py-spy)")
    args = parser.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    if args.flame:
        ours(args.count, args.runners, args.flame)
        return
    peers = {"cs": (200, args.runners), "shm": (1000, 1)} if args.peer else {}  # shm supports one runner only
    ratios: dict[str, list[float]] = {strategy: [] for strategy in ["bare", "one store", *peers]}
    for _ in range(args.rounds):
        mine = ours(args.count, args.runners)
        ratios["bare"].append(mine / bare(args.count, args.runners))
        ratios["one store"].append(mine / one_store(args.count, args.runners))
        for strategy, (count, runners) in peers.items():
            theirs = peer(args.peer / "bin" / "python", args.peer_script, count, runners, strategy)
            ratios[strategy].append(mine / theirs)
    for strategy, found in ratios.items():
        print(f"ratio to {strategy}: {spread(found)}")
    print(f"driver's peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
