"""Rollouts per second of asynchronous training against synchronous training, with agents whose tools take a
log-normal time.

    python tests/benchmarks/async_vs_sync.py [--steps 16] [--sigma 1.0] [--runs "wait 2,mask 2"]

The agents are the quickstart's, and call a tool that waits. The runs take turns on this machine, each with
its own Ray, the real engine and learners, and the same waiting times. `bound` is the ratio that a model of
the same pacing predicts, in which nothing but tools, updates and publications takes time.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from harness import make_parser

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.trainer.loops.pacer import Pacer

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from pacing_model import Simulation

GROUPS, SAMPLES = 8, 4
WARM_UP = 3
"""First steps of a run, which are left out."""


def tool_s(group: int, sample: int, median: float, sigma: float) -> float:
    """Return the time that the tool of a rollout takes."""
    return median * random.Random(f"{group}-{sample}").lognormvariate(0, sigma)


def make_agent(median: float, sigma: float) -> rl.LitAgent:
    """Return the quickstart's agent with a tool that waits."""
    answer = adder

    @rl.rollout
    async def waiting_adder(task: dict, llm: rl.LLM, rollout: rl.Rollout) -> float:
        mode, group, *_, sample = rollout.rollout_id.split("-")[1:]
        if mode == "train":
            await asyncio.sleep(tool_s(int(group), int(sample), median, sigma))
        return await answer(task, llm)

    return waiting_adder


class Measured:
    """Figures of a run: steps per second, and median seconds of an update and a publication."""

    def __init__(self, rows: list[dict]) -> None:
        rows = [row for row in rows if row["step"] > WARM_UP]
        seconds = rows[-1]["time/total_s"] - rows[0]["time/total_s"]
        self.steps_per_s = (len(rows) - 1) / seconds
        self.update_s = statistics.median(row["time/update_s"] for row in rows if "time/update_s" in row)
        self.publish_s = statistics.median(row["time/sync_s"] for row in rows if "time/sync_s" in row)
        self.staleness = max(row.get("async/staleness_max", 0.0) for row in rows)
        self.reward = statistics.fmean(row["train/reward"] for row in rows[-3:])


def train(stale: str, staleness: int, steps: int, median: float, sigma: float) -> Measured:
    """Train for some steps."""
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=SAMPLES,
        tasks_per_step=GROUPS,
        n_steps=steps,
        lr=2e-4,
        val_every=None,
        val_before_train=False,
        max_staleness=staleness,
        **({"stale": stale} if stale != "wait" else {}),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = rl.Trainer(
            algorithm=algorithm,
            runner={"n": 1, "max_concurrent": 1024},
            output_dir=folder,
            address="local",
            progress=False,
            checkpoint={"every": 0},
        )
        trainer.fit(make_agent(median, sigma), additions(0)[0])
        return Measured(
            [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        )


def model(stale: str, staleness: int, steps: int, median: float, sigma: float, run: Measured) -> float:
    """Return the steps per second of the model."""
    simulation = Simulation(
        Pacer(GROUPS, staleness, steps),
        1,
        stale,
        lambda group: max(tool_s(group, sample, median, sigma) for sample in range(SAMPLES)),
        update_s=run.update_s,
        publish_s=run.publish_s,
    )
    simulation.run()
    times = simulation.taken_at[WARM_UP:]
    return (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--median", type=float, default=0.5, help="median seconds of a tool")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of these seconds")
    parser.add_argument("--runs", default="wait 1,wait 2,drop 2,mask 2", help="stale and max_staleness")
    args = parser.parse_args()
    settings = (args.steps, args.median, args.sigma)
    baseline = train("wait", 0, *settings)
    slowest = model("wait", 0, *settings, baseline)
    per_step = GROUPS * SAMPLES
    print(f"{'':8}{'rollouts/s':>12}{'ratio':>8}{'bound':>8}{'of it':>8}{'oldest':>8}{'reward':>8}")
    rate = baseline.steps_per_s * per_step
    print(f"{'sync':8}{rate:12.1f}{1:8.2f}{1:8.2f}{1:8.2f}{0:8}{baseline.reward:8.2f}")
    for name in args.runs.split(","):
        stale, staleness = name.split()
        run = train(stale, int(staleness), *settings)
        ratio = run.steps_per_s / baseline.steps_per_s
        bound = model(stale, int(staleness), *settings, baseline) / slowest
        print(
            f"{name:8}{run.steps_per_s * per_step:12.1f}{ratio:8.2f}{bound:8.2f}{ratio / bound:8.2f}"
            f"{run.staleness:8.0f}{run.reward:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
