"""Reward at a given staleness, for each correction, as a Markdown table and a figure.

    python tests/benchmarks/staleness.py [--seeds 3] [--steps 40] [--processes 2] [--out FOLDER] [--plot PNG]

Each run trains the starter model on the quickstart's additions in one process, without Ray, HTTP or an
engine: plain transformers sample the answers, from the weights that the policy had exactly S updates before
(in the first S steps, from the initial ones). Groups, batches, advantages, corrections, losses and the
optimizer are raylight's own. All runs have the same number of rollouts. The reward is measured with the
trained weights on tasks that are not trained on.

- naive: PPO's clipped loss around the learners' policy before the update, without weights for old tokens.
- TIS: a plain policy gradient (the loss `gpg`) with importance weights of tokens, truncated at 2.
- decoupled: PPO's clipped loss with these weights, the default of `max_staleness`.
- loglinear: the same with an interpolated proximal policy.
- DPPO: one ratio to the policy that sampled, bounded by the change of probability.
- +RS: the same as the one before, without rows whose geometric mean ratio of probabilities to the policy that
  sampled is outside 0.9 to 1.1.

Results are kept in `--out`; a repeated command computes only those that are missing.
"""

import collections
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from convergence import Sampler
from harness import join_ranks, make_parser, mean_and_deviation

from raylight import algorithms
from raylight.config import LearnerConfig
from raylight.experience.batches.batch import build_batch
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.tasks.task_set import TaskSampler

STALENESS = (0, 1, 2, 4, 8)
REJECTION: dict[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}
CORRECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "naive": ("GRPO", {"rollout_is": None}),
    "TIS": ("GRPO", {"loss_mode": "gpg"}),
    "TIS+RS": ("GRPO", {"loss_mode": "gpg"} | REJECTION),
    "decoupled": ("GRPO", {}),
    "decoupled+RS": ("GRPO", REJECTION),
    "loglinear": ("GRPO", {"proximal": "loglinear"}),
    "DPPO": ("DPPO", {}),
    "DPPO+RS": ("DPPO", REJECTION),
}
TASKS = 16
"""Tasks of a step, with eight rollouts each."""
VALIDATE_EVERY = 5
SAMPLES = 2
"""Answers to each validation task."""


@dataclass(frozen=True)
class Case:
    """One run."""

    correction: str
    staleness: int
    seed: int
    steps: int
    lr: float
    mini_batches: int

    @property
    def name(self) -> str:
        return "-".join(map(str, asdict(self).values()))


def train(case: Case) -> list[float]:
    """Return the rewards before training and after every fifth step."""
    from raylight.learner.updates.policy import Policy

    torch.manual_seed(case.seed)
    kind, settings = CORRECTIONS[case.correction]
    algorithm = getattr(algorithms, kind)(
        model=STARTER_MODEL,
        lr=case.lr,
        mini_batches=case.mini_batches,
        tasks_per_step=TASKS,
        max_staleness=max(case.staleness, 1),
        max_logprob_mismatch=1e-3,
        calculate_entropy=False,
        **settings,
    )
    learner = LearnerConfig()
    sampler, newest = Sampler(), Sampler()
    policy = Policy(STARTER_MODEL, learner, algorithm.policy_settings(), case.steps)
    tasks, val = additions(case.seed)
    order = TaskSampler(tasks, case.seed)
    weights = collections.deque([exported(policy)], case.staleness + 1)

    def reward() -> float:
        newest.load(weights[-1], policy.version)
        answers = newest.answer(val, SAMPLES, "val")
        return statistics.fmean(item.reward or 0.0 for item in answers)

    rewards = [reward()]
    for step in range(1, case.steps + 1):
        version = max(policy.version - case.staleness, 0)
        sampler.load(weights[0], version)
        chosen = [order.draw(group).task for group in range((step - 1) * TASKS, step * TASKS)]
        finished = sampler.answer(chosen, algorithm.group_size, f"train-{step}")
        batch, report = build_batch(finished, algorithm.batch_rules(learner, version=policy.version))
        assert report.ages is not None
        assert report.ages.staleness_max <= case.staleness
        policy.update(batch)
        weights.append(exported(policy))
        if step % VALIDATE_EVERY == 0:
            rewards.append(reward())
    return rewards


def exported(policy: Any) -> dict[str, Any]:
    weights: dict[str, Any] | None = policy.export()
    assert weights is not None, "this is rank 0"
    return weights


def start_process() -> None:
    """Make this process the only rank of a new group."""
    join_ranks(Path(tempfile.mkdtemp(prefix="staleness-"), "ranks"))


def run(case: Case, out: Path) -> tuple[Case, list[float]]:
    """Return the rewards of a run, from its file if it has one."""
    file = out / f"{case.name}.json"
    if not file.exists():
        with contextlib.redirect_stdout(sys.stderr):  # verl prints
            rewards = train(case)
        file.write_text(json.dumps(rewards))
    return case, json.loads(file.read_text())


def end_of(rewards: list[float]) -> float:
    """Return the mean of the last two rewards."""
    return statistics.fmean(rewards[-2:])


def print_table(results: dict[Case, list[float]]) -> None:
    """Print the mean reward at the end, with its standard deviation over the seeds."""
    corrections = list(dict.fromkeys(case.correction for case in results))
    print(f"| S | {' | '.join(corrections)} |")
    print("|---|" + "---|" * len(corrections))
    for staleness in sorted({case.staleness for case in results}):
        cells = []
        for correction in corrections:
            ends = [
                end_of(rewards)
                for case, rewards in results.items()
                if (case.correction, case.staleness) == (correction, staleness)
            ]
            cells.append(mean_and_deviation(ends))
        print(f"| {staleness} | {' | '.join(cells)} |", flush=True)


def draw(results: dict[Case, list[float]], path: str) -> None:
    """Plot the reward by rollouts: one panel per correction, one line per staleness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    corrections = list(dict.fromkeys(case.correction for case in results))
    size = (2.2 * len(corrections), 2.6)
    figure, axes = plt.subplots(1, len(corrections), figsize=size, sharey=True, squeeze=False)
    panels = axes[0]
    for panel, correction in zip(panels, corrections, strict=True):
        panel.set_title(correction, fontsize=9)
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
        for staleness in sorted({case.staleness for case in results}):
            curves = [
                rewards
                for case, rewards in results.items()
                if (case.correction, case.staleness) == (correction, staleness)
            ]
            means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            rollouts = [n * VALIDATE_EVERY * TASKS * 8 for n in range(len(means))]
            panel.plot(rollouts, means, linewidth=1, label=f"S = {staleness}")
        panel.tick_params(labelsize=7)
    panels[0].legend(fontsize=7)
    figure.supxlabel("rollouts", fontsize=9)
    panels[0].set_ylabel("reward", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; they count from 0")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--corrections", default=",".join(CORRECTIONS), help="comma-separated names")
    parser.add_argument("--staleness", default=",".join(map(str, STALENESS)))
    parser.add_argument("--out", help="folder of the results; default: a temporary one")
    parser.add_argument("--plot", help="PNG file for the reward curves")
    args = parser.parse_args()
    out = Path(args.out or tempfile.mkdtemp(prefix="staleness-"))
    out.mkdir(parents=True, exist_ok=True)
    chosen = args.corrections.split(","), map(int, args.staleness.split(",")), range(args.seeds)
    cases = [Case(*case, args.steps, args.lr, args.mini_batches) for case in itertools.product(*chosen)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context, start_process) as pool:
        results = dict(pool.map(run, cases, itertools.repeat(out)))
    print_table(results)
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
