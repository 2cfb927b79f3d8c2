"""Rollouts per second of 1 to 4 runners whose agents wait one second, with 256 rollouts at once in each.

    python tests/benchmarks/runners.py [--runners 1 2 3 4] [--waves 6]

With no cost a runner would do 256 rollouts per second. Prints the rate, its share of that limit, the CPU time
of all processes for a rollout, and the number of cores that they kept busy: the rate is linear in the number
of runners until the cores are full. Takes one and a half minutes.
"""

import asyncio
import os
import tempfile
import time
from typing import Any

from harness import cpu_seconds, execute, make_parser

import raylight as rl

WAIT_S = 1.0
AT_ONCE = 256
"""Rollouts at once in each runner."""
WARM_UP = 50
"""Rollouts of each runner before the measured ones, which do not wait."""


@rl.rollout
async def agent(task: float) -> float:
    await asyncio.sleep(task)
    return 1.0


class Waves(rl.Algorithm):
    """Algorithm that times several rollouts in each place of the runners."""

    def __init__(self, runners: int, waves: int) -> None:
        self.runners, self.waves = runners, waves
        self.seconds = self.cpu_s = 0.0

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        await execute(self.get_store(), [0.0] * self.runners * WARM_UP)
        used, started = cpu_seconds(), time.perf_counter()
        await execute(self.get_store(), [WAIT_S] * self.runners * AT_ONCE * self.waves)
        self.seconds = time.perf_counter() - started
        self.cpu_s = cpu_seconds() - used


def measure(runners: int, waves: int) -> float:
    """Run the waves; return rollouts per second."""
    algorithm = Waves(runners, waves)
    with tempfile.TemporaryDirectory() as folder:
        trainer = rl.Trainer(
            algorithm=algorithm,
            runner={"n": runners, "max_concurrent": AT_ONCE},
            output_dir=folder,
            progress=False,
        )
        trainer.fit(agent)
    count = runners * AT_ONCE * waves
    rate, limit = count / algorithm.seconds, runners * AT_ONCE / WAIT_S
    print(
        f"{runners} runner(s): {rate:6.0f} rollouts/s, {rate / limit:.2f} of the limit {limit:.0f}; "
        f"{algorithm.cpu_s / count * 1e3:.2f} ms of CPU time a rollout, "
        f"{algorithm.cpu_s / algorithm.seconds:.2f} of {os.cpu_count()} cores busy",
        flush=True,
    )
    return rate


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runners", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--waves", type=int, default=6, help="rollouts in each place of a runner")
    args = parser.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    rates = {runners: measure(runners, args.waves) for runners in args.runners}
    fewest = min(rates)
    shares = {runners: rate / rates[fewest] / (runners / fewest) for runners, rate in rates.items()}
    print("share of linear: " + ", ".join(f"{runners}: {share:.2f}" for runners, share in shares.items()))


if __name__ == "__main__":
    main()
