"""Seconds and CPU time from the shell's prompt to the first step of `raylight quickstart`.

    python tests/benchmarks/startup.py [--rounds 3] [--against CHECKOUT]

Each round measures in turn, each in separate processes: the floor, which is `import ray, torch, transformers`
with `ray.init()` and one actor; the bound of a run with Ray Serve and a learner of verl, which is
`ray.init()`, a deployment that loads the quickstart's model, and at the same time an actor that imports
verl's engine and loads the model; and the quickstart until its first step is logged, which includes an
evaluation of 256 rollouts. Prints the medians over the rounds with their range, and the ratio of each to the
floor; then, of the last round, the quickstart's stages, and its processes in the order of their start, with
the CPU seconds that each had used at the first step. `import raylight` and `raylight --help` are the fastest
of ten. With `--against`, another checkout (`git worktree add`) takes turns. A round takes half a minute.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from harness import ROOT, make_parser, spread

from raylight.quickstart import STARTER_MODEL

SAMPLE_INTERVAL_S = 0.2
FLOOR = """
import ray, torch, transformers
ray.init(address="local", include_dashboard=True, log_to_driver=False, logging_level="ERROR")
class Actor:
    def ready(self):
        return True
ray.get(ray.remote(Actor).remote().ready.remote())
print("step 1/", flush=True)
"""
BOUND = """
import socket, sys
import ray
from ray import serve
ray.init(address="local", include_dashboard=True, log_to_driver=False, logging_level="ERROR")
MODEL = sys.argv[1]
def load():
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL)
class Learner:
    def load(self):
        import raylight.learner.verl_api  # imports torch and verl
        self.model = load()
class Engine:
    def __init__(self):
        self.model = load()
loading = ray.remote(Learner).remote().load.remote()
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(serve.deployment(Engine).bind())
ray.get(loading)
print("step 1/", flush=True)
"""
QUICKSTART = "from raylight.cli import main; main()"


@dataclass
class Start:
    """One start: seconds and CPU seconds until the first step, its stages, and its processes."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    stages: list[tuple[float, str]] = field(default_factory=list)
    processes: list[tuple[float, float, str]] = field(default_factory=list)
    """Second of the start, CPU seconds, and name."""


class ProcessTree:
    """CPU times of a process and of all that it starts. Times of ended processes are the last ones seen."""

    def __init__(self, pid: int, began: float) -> None:
        self._root, self._began = psutil.Process(pid), began
        self.seen: dict[int, tuple[float, float, str]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_ended, daemon=True)
        self._thread.start()

    def sample(self) -> None:
        """Read the times of all processes that run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times, command = process.cpu_times(), process.cmdline()
                    started = process.create_time() - self._began
                    self.seen[process.pid] = started, times.user + times.system, _name(command)

    def close(self) -> None:
        """End the thread that samples."""
        self._ended.set()
        self._thread.join()

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            self.sample()


def _name(command: list[str]) -> str:
    """Return a short name of a process."""
    title = command[0] if command else ""
    if title.startswith("ray::"):
        return title.strip()
    words = [Path(word).name for word in command if not word.startswith("-")]
    return " ".join(words[:2])[:40]


def measure(command: list[str], checkout: Path) -> Start:
    """Start a command, and stop it when it prints its first step."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start, began = Start(), time.time()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=checkout
    ) as process:
        tree = ProcessTree(process.pid, began)
        assert process.stdout is not None
        for line in process.stdout:
            start.stages.append((time.time() - began, line.strip()[:90]))
            if line.startswith("step 1/"):
                break
        else:
            sys.exit(f"{' '.join(command)[:80]} ended without a step (exit code {process.wait()})")
        start.seconds = time.time() - began
        tree.sample()
        tree.close()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    start.processes = sorted(tree.seen.values())
    start.cpu_s = sum(cpu_s for _, cpu_s, _ in start.processes)
    return start


def fastest_ms(arguments: list[str], checkout: Path) -> float:
    """Return the fewest milliseconds of ten runs of Python."""
    environment, times = {**os.environ, "PYTHONPATH": str(checkout)}, []
    for _ in range(10):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


def report(name: str, starts: list[Start], floors: list[Start]) -> None:
    """Print the medians of one program, with their range."""
    seconds, cpu_s = [start.seconds for start in starts], [start.cpu_s for start in starts]
    ratios = [start.seconds / floor.seconds for start, floor in zip(starts, floors, strict=True)]
    print(f"| {name} | {spread(seconds)} | {spread(cpu_s)} | {spread(ratios)} |", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of raylight")
    args = parser.parse_args()
    checkouts = {"quickstart": ROOT} | ({str(args.against): args.against.resolve()} if args.against else {})
    floors: list[Start] = []
    bounds: list[Start] = []
    starts: dict[str, list[Start]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        floors.append(measure([sys.executable, "-c", FLOOR], ROOT))
        bounds.append(measure([sys.executable, "-c", BOUND, STARTER_MODEL], ROOT))
        for name, checkout in checkouts.items():
            with tempfile.TemporaryDirectory() as folder:
                options = ["--steps", "2", "--output-dir", folder, "--address", "local"]
                command = [sys.executable, "-uc", QUICKSTART, "quickstart", *options]
                starts[name].append(measure(command, checkout))
    print("| | seconds | CPU s | seconds, of the floor |\n|---|---|---|---|")
    report("floor", floors, floors)
    report("bound", bounds, floors)
    for name, measured in starts.items():
        report(name, measured, floors)
    for name, checkout in checkouts.items():
        bare, imports, shows_help = (
            fastest_ms(code, checkout)
            for code in (["-c", "pass"], ["-c", "import raylight"], ["-c", QUICKSTART, "--help"])
        )
        print(
            f"\n{name}: python {bare:.0f} ms, with import raylight {imports:.0f} ms, "
            f"raylight --help {shows_help:.0f} ms"
        )
    last = starts["quickstart"][-1]
    print("\n| second | stage |\n|---|---|")
    for second, line in last.stages:
        print(f"| {second:.1f} | {line} |")
    print("\n| started at | CPU s | process |\n|---|---|---|")
    for second, cpu_s, name in last.processes:
        print(f"| {max(second, 0.0):.1f} | {cpu_s:.2f} | {name} |")


if __name__ == "__main__":
    main()
