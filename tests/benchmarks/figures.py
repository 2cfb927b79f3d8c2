"""All figures of docs/performance.md, in one run of twenty minutes on a quiet machine with two cores.

    python tests/benchmarks/figures.py [NAME ...] --out DIR [--peer DIR --peer-script FILE]
                                       [--vllm-python PYTHON] [--list]

Runs the benchmarks one after the other, the most wanted first, and writes the output of each to OUT/NAME.txt
and flame graphs to OUT/flames. A name selects one. A benchmark that fails is reported, and the next one runs.
`--peer` and `--peer-script` are passed to noop_rollouts.py; without them the peer's rows are missing.
`--vllm-python` is the Python of an environment with vLLM; without it streaming is left out.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness import make_parser
from loop_runs import FLAMES

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """A command of this folder, and the seconds that it is expected to take."""

    name: str
    seconds: int
    arguments: list[str]
    python: str = sys.executable
    environment: tuple[tuple[str, str], ...] = ()


def benchmarks(args: argparse.Namespace) -> list[Benchmark]:
    """Return the benchmarks in the order in which they run."""
    flames = str(args.out / "flames")
    peer = ["--peer", str(args.peer), "--peer-script", str(args.peer_script)] if args.peer else []
    steps = ["--steps", "20", "--rounds", "2", "--cpu"]
    large = ["--steps", "7", "--rounds", "1", "--async-threads", "1,1", "1,2", "--cpu"]
    loop_flames = ((FLAMES, f"{flames}/loop"),)
    listed = [
        Benchmark("layers", 30, ["gateway_layers.py"]),
        Benchmark("capture", 110, ["capture.py", "--bound", "--rounds", "3", "--flame", flames]),
        Benchmark("loop", 260, ["loop.py", *steps]),
        Benchmark("loop_large", 320, ["loop.py", "--shape", "20M", *large]),
        Benchmark("noop", 140, ["noop_rollouts.py", "--rounds", "2", *peer]),
        Benchmark("noop_flames", 30, ["noop_rollouts.py", "--flame", flames]),
        Benchmark("runners", 90, ["runners.py"]),
        Benchmark("startup", 100, ["startup.py", "--rounds", "2"]),
        Benchmark("loop_flames", 50, ["loop.py", "quickstart", "25", "0"], environment=loop_flames),
        Benchmark("overhead", 60, ["rollout_overhead.py", "--rounds", "2"]),
    ]
    if args.vllm_python:
        listed.append(Benchmark("streaming", 180, ["streaming.py", "--rounds", "3"], args.vllm_python))
    return [benchmark for benchmark in listed if not args.names or benchmark.name in args.names]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--peer-script", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--list", action="store_true", help="print the commands only")
    args = parser.parse_args()
    chosen = benchmarks(args)
    for benchmark in chosen if args.list else ():
        print(f"{benchmark.seconds:5} s  {benchmark.name:12}  {' '.join(benchmark.arguments)}")
    print(f"{sum(benchmark.seconds for benchmark in chosen)} s expected", flush=True)
    if not args.list:
        args.out.mkdir(parents=True, exist_ok=True)
        sys.exit(sum(not run(benchmark, args.out) for benchmark in chosen))


def run(benchmark: Benchmark, out: Path) -> bool:
    """Run a benchmark; return True if it succeeded."""
    script, *arguments = benchmark.arguments
    command = [benchmark.python, str(HERE / script), *arguments]
    started = time.perf_counter()
    with (out / f"{benchmark.name}.txt").open("w") as output:
        environment = os.environ | dict(benchmark.environment)
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    outcome = "done" if done.returncode == 0 else f"FAILED ({done.returncode})"
    print(f"{benchmark.name:12} {outcome} after {time.perf_counter() - started:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
