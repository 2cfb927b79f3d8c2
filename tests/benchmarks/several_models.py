"""Two roles with conflicting tasks: an adapter for each against one adapter for both, as a Markdown table.

    python tests/benchmarks/several_models.py [--seeds 3] [--steps 15]

Both roles get the quickstart's additions, in the same words. The adder must answer with the sum. The other
role must end its answer with an even digit, whatever the sum is. Each step has 64 rollouts of each role, in
one process without Ray, HTTP or an engine (see convergence.py).
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from convergence import VALIDATION_SAMPLES, Sampler
from harness import join_ranks, make_parser, mean_and_deviation

import raylight as rl
from raylight.config import LearnerConfig, LoraConfig
from raylight.experience.batches.batch import build_batch
from raylight.learner.protocol import ModelSettings
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.tasks.task_set import TaskSampler
from raylight.types import FinishedRollout

ROLES = ("adder", "even")
LEARNER = LearnerConfig(lora=LoraConfig(rank=8))


@dataclass(frozen=True)
class Result:
    """Mean rewards of the roles on held-out tasks, before and after training."""

    before: dict[str, float]
    after: dict[str, float]
    seconds: float
    """Duration of the updates."""


class Roles:
    """Rolls out tasks, each role with the weights of its model."""

    def __init__(self) -> None:
        self._samplers = {role: Sampler() for role in ROLES}

    def load(self, weights: Callable[[str], dict[str, Any]], version: int) -> None:
        for role, sampler in self._samplers.items():
            sampler.load(weights(role), version)

    def answer(self, role: str, tasks: list[Any], samples: int, name: str) -> list[FinishedRollout]:
        """Answer tasks in a role, with its reward."""
        found = self._samplers[role].answer(tasks, samples, f"{role}-{name}")
        for item in found:
            item.generations[0] = replace(item.generations[0], model=role)
        if role == "adder":
            return found
        return [replace(item, reward=float(self._is_even(item))) for item in found]

    def _is_even(self, item: FinishedRollout) -> bool:
        ids = item.generations[0].output_ids
        text = self._samplers["even"]._tokenizer.decode(ids, skip_special_tokens=True).strip()
        return text[-1:] in {*"02468"}


def train(separate: bool, steps: int, lr: float, seed: int) -> Result:
    """Train both roles, and validate before and after.

    Args:
        separate: an adapter for each role; False: one for both.
    """
    from raylight.learner.updates.policy import Policy
    from raylight.learner.updates.policy_set import PolicySet

    torch.manual_seed(seed)
    algorithm = rl.GRPO(
        model=str(STARTER_MODEL),
        models={role: {} for role in ROLES} if separate else {},
        lr=lr,
        max_logprob_mismatch=1e-3,
    )
    settings = algorithm.policy_settings()
    models = {role: ModelSettings(settings) for role in ROLES}
    policy: Any = (
        PolicySet(STARTER_MODEL, LEARNER, models, steps)
        if separate
        else Policy(STARTER_MODEL, LEARNER, settings, steps)
    )
    roles, (tasks, val) = Roles(), additions(seed)
    order, size = TaskSampler(tasks, seed), 64 // algorithm.group_size

    def validate() -> dict[str, float]:
        answers = {role: roles.answer(role, val, VALIDATION_SAMPLES, "val") for role in ROLES}
        return {role: statistics.fmean(item.reward or 0.0 for item in own) for role, own in answers.items()}

    before, seconds = validate(), 0.0
    for step in range(steps):
        drawn = [order.draw(step * size + place).task for place in range(size)]
        finished = [
            item
            for role in ROLES
            for item in roles.answer(role, drawn, algorithm.group_size, f"train-{step}")
        ]
        batch, report = build_batch(finished, algorithm.batch_rules(LEARNER))
        if report.has_signal:
            started = time.perf_counter()
            policy.update(batch)
            seconds += time.perf_counter() - started
            roles.load(lambda role: (policy.use(role) if separate else policy).export(), policy.version)
    return Result(before, validate(), seconds)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; they count from 0")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(f"{folder}/ranks")
        columns = [f"{role}, {when}" for role in ROLES for when in ("before", "after")]
        print(f"| adapters | {' | '.join(columns)} | mean after | s of updates |")
        print("|---|" + "---|" * (len(columns) + 2))
        for separate in (False, True):
            with contextlib.redirect_stdout(sys.stderr):  # verl prints
                runs = [train(separate, args.steps, args.lr, seed) for seed in range(args.seeds)]
            figures = [
                [run.before[r] for run in runs] if w == "b" else [run.after[r] for run in runs]
                for r in ROLES
                for w in "ba"
            ]
            figures.append([statistics.fmean(run.after.values()) for run in runs])
            seconds = statistics.fmean(run.seconds for run in runs)
            name = "one for each role" if separate else "one for both"
            print(f"| {name} | {' | '.join(map(mean_and_deviation, figures))} | {seconds:.1f} |", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
