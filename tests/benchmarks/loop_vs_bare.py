"""Time per step of raylight's full loop, of a bare torch loop and, if installed, of TRL's GRPOTrainer.

    python tests/benchmarks/loop_vs_bare.py [--steps 15]

The full loop has an agent, HTTP, capture, updates and weight syncs. The programs run one after the other,
each in its own process, with the quickstart's model and task and 128 rollouts a step.
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
STAGES = ("rollout", "update", "sync")


def bare(steps: int) -> dict[str, float]:
    """Return the median seconds per step of the bare loop, which its last line of output shows."""
    command = [sys.executable, str(HERE / "bare_grpo.py"), "--steps", str(steps)]
    last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    stages = {name: float(value) for name, value in re.findall(r"(\w+) (\d+\.\d+)", last)}
    return {"rollout": stages["sampling"], "update": stages["update"], "sync": 0.0}


def trl(steps: int) -> float:
    """Return the median seconds per step of TRL's trainer."""
    command = [sys.executable, str(HERE / "trl_grpo.py"), "--steps", str(steps)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def quickstart(steps: int) -> dict[str, float]:
    """Return the median seconds per step of `raylight quickstart`."""
    raylight = Path(sys.executable).parent / "raylight"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(raylight), "quickstart", "--steps", str(steps), "--output-dir", folder]
        subprocess.run(command, capture_output=True, check=True, env={**os.environ, "RAY_ADDRESS": "local"})
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 1 and "time/sync_s" in row]
    return {name: statistics.median(row[f"time/{name}_s"] for row in rows) for name in STAGES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    ours, theirs = quickstart(steps), bare(steps)
    print(f"{'seconds per step':18}{'raylight':>10}{'bare':>10}")
    for name in STAGES:
        print(f"{name:18}{ours[name]:10.3f}{theirs[name]:10.3f}")
    total, bare_total = sum(ours.values()), sum(theirs.values())
    print(f"{'all':18}{total:10.3f}{bare_total:10.3f}")
    print(f"ratio {total / bare_total:.1f}; overhead per rollout {1e3 * (total - bare_total) / 128:.1f} ms")
    if importlib.util.find_spec("trl") is not None:
        peer = trl(steps)
        print(f"TRL: {peer:.3f} s a step; raylight does {peer / total:.2f} x its rollouts per second")


if __name__ == "__main__":
    main()
