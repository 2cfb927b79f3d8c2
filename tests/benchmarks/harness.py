"""Tools of the benchmarks: options, figures, processes with their times and memory, and random models."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
"""This checkout."""
Pairs = list[tuple[list[int], list[int]]]
"""Tokens of prompts and of their answers."""


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring as its help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def spread(values: list[float], digits: int = 1) -> str:
    """Format the median and the range."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def mean_and_deviation(values: list[float]) -> str:
    """Format the mean and the sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def checkouts(other: Path | None) -> dict[str, Path]:
    """Return this checkout and, if there is one, the other that it is compared with, by name."""
    return {"this": ROOT} | ({"other": other.resolve()} if other else {})


def run_script(
    script: str, *arguments: object, checkout: Path = ROOT, python: str = sys.executable, **environment: str
) -> Any:
    """Run a script with the raylight of a checkout; return its last line that is JSON.

    A library may print after it.
    """
    command = [python, script, *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=checkout,  # from which Ray's workers import first
        env=os.environ | {"PYTHONPATH": str(checkout)} | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith(("{", "["))][-1])


def process_tree() -> list[psutil.Process]:
    """Return this process and all below it."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def cpu_seconds(processes: Iterable[psutil.Process] | None = None) -> float:
    """Return the CPU time that processes have used; by default this one and all below it."""
    used = 0.0
    for process in process_tree() if processes is None else processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:2])
    return used


def memory_kib(name: str, pid: int | str = "self") -> int:
    """Return a size of a process's status, such as "VmRSS" or "VmHWM", its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def reset_peak(pid: int | str = "self") -> None:
    """Have the kernel measure the peak of a process's memory from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def join_ranks(rendezvous: str | Path, rank: int = 0, ranks: int = 1, threads: int = 1) -> None:
    """Make this process a rank of a group on this machine."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    store = dist.FileStore(str(rendezvous), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def save_random(config: Any, folder: Path) -> str:
    """Save a model with random weights and the starter model's tokenizer. Return its path."""
    import torch
    from transformers import AutoModelForCausalLM

    from raylight.quickstart import STARTER_MODEL

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for file in Path(STARTER_MODEL).glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def start_store(name: str, folder: str) -> Any:
    """Start the store's actor; return its client."""
    from raylight.config import StoreConfig
    from raylight.store.actor import start_store
    from raylight.store.client import StoreClient

    return StoreClient(start_store(name, f"{folder}/store.db", StoreConfig(lease_s=3600)))


async def start_attempts(store: Any, count: int) -> list[tuple[str, str]]:
    """Return the ids of rollouts and attempts that are in progress."""
    from raylight.types import EnqueueRolloutRequest

    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="x", mode="train")] * count)
    rollouts = await store.dequeue_many_rollouts(limit=count, worker_id="benchmark")
    return [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in rollouts]


async def execute(store: Any, tasks: Iterable[Any]) -> None:
    """Have the runners execute tasks; all must succeed."""
    from raylight.types import EnqueueRolloutRequest

    requests = [EnqueueRolloutRequest(input=task, mode="train") for task in tasks]
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    await store.wait_until_decided(rollout_ids=ids)
    states = await store.get_rollout_states(ids)
    assert {state.status for state in states} == {"succeeded"}, [state.failure for state in states][:3]


def record_of(
    key: Any, prompt: list[int], output: list[int], logprobs: list[float], turn: int, messages: list[Any]
) -> tuple[Any, Any]:
    """Return the generation and the span of a call, as serving records them.

    Args:
        messages: the request's, and the answer's last.
    """
    from raylight.semconv import CALL_ID, DIALECT, INPUT_MESSAGES, OUTPUT_MESSAGES, REQUEST_PARAMETERS
    from raylight.types import Generation, Span

    start, end, versions = float(turn), turn + 0.5, [3] * len(output)
    sampling = {"temperature": 1.0}
    call = Generation(key, "policy", prompt, output, logprobs, versions, "stop", start, end, sampling)  # type: ignore[arg-type]
    *asked, answer = messages
    attributes = {
        INPUT_MESSAGES: json.dumps(asked),
        OUTPUT_MESSAGES: json.dumps([answer]),
        REQUEST_PARAMETERS: json.dumps({"model": "policy", "temperature": 1.0}),
        DIALECT: "chat",
        CALL_ID: key.call_id,
    }
    ids = {"rollout_id": key.rollout_id, "attempt_id": key.attempt_id}
    ids |= {"span_id": key.call_id[:16], "trace_id": key.call_id}
    name = "openai.chat.completion"
    return call, Span.from_attributes(name=name, attributes=attributes, start_time=start, end_time=end, **ids)
