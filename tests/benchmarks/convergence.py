"""Reward gain of every policy-gradient algorithm over several seeds, as a Markdown table.

    python tests/benchmarks/convergence.py [--algorithms GRPO,PPO] [--seeds 3] [--steps 10] [--plot PNG]
    python tests/benchmarks/convergence.py --algorithms GRPO --agents 8 --credit agent
    python tests/benchmarks/convergence.py --algorithms GRPO --sampling '{"top_p": 0.9}' [--truncation ignore]

Each run trains the starter model on the quickstart's additions with 128 rollouts a step, in one process
without Ray, HTTP or an engine: plain transformers sample the answers. Groups, dynamic sampling, batches,
advantages, losses and the optimizer are raylight's own. With `--agents`, a rollout answers several tasks,
each by an agent with its own reward; the rollout's reward is their mean. With `--sampling`, the answers are
truncated or penalised as the transformers engine does it; the learner replays that, or leaves such calls out
(`mask`), or takes them for samples of the policy's own distribution (`ignore`).
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import join_ranks, make_parser, mean_and_deviation
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from raylight import algorithms
from raylight.agent.emit import emit_reward
from raylight.config import LearnerConfig
from raylight.engines.candidates import find_candidates
from raylight.engines.transformers.sampling import SamplingParams, adjust_logits, distribution
from raylight.experience.batches.batch import build_batch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question
from raylight.tasks.task_set import TaskSampler
from raylight.trainer.loops.training_groups import choose_groups
from raylight.types import GREEDY, CallKey, FinishedRollout, Generation, Rollout, Span, TokenSets

ALGORITHMS = sorted(
    name
    for name in set(algorithms.__all__) - {"VERL", "algo"}
    if algorithms.PolicyAlgorithm in getattr(algorithms, name).__mro__[1:]
)
ROLLOUTS = 128
"""Rollouts of a step, for any group size. ReMax adds greedy rollouts, DAPO the rollouts of further rounds."""
ANSWER_TOKENS = 6
"""Most tokens of an answer: two more than a correct answer needs."""
VALIDATION_SAMPLES = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "PPO": {"critic": {"lr": 1e-3}},
}
"""Settings of an algorithm that differ from its defaults."""


@dataclass(frozen=True)
class Run:
    """Result of training with one seed."""

    before: float
    """Mean reward on the validation tasks before training."""
    after: float
    """Mean reward on the validation tasks after training."""
    curve: list[float]
    """Mean reward of the rollouts of each step."""
    seconds: float
    """Duration of the steps, without validation."""

    @property
    def gain(self) -> float:
        return self.after - self.before


class Sampler:
    """Rolls out tasks with a copy of the policy's weights."""

    def __init__(self, sampling: dict[str, Any] | None = None, truncation: str = "replay") -> None:
        sampling = sampling or {}
        self._params, self._truncation = SamplingParams(ANSWER_TOKENS, **sampling), truncation
        self._sampling = sampling if truncation != "ignore" else {}
        self._tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
        self._model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
        self._version = 0

    def load(self, weights: dict[str, Any], version: int) -> None:
        self._model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        self._version = version

    def answer(
        self, tasks: list[Any], samples: int, name: str, greedy: bool = False
    ) -> list[FinishedRollout]:
        """Answer every task `samples` times. The answers to a task are one group."""
        chats = [[{"role": "user", "content": question(task)}] for task in tasks]
        prompts = self._tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        finished = []
        for i, (ids, logprobs, candidates) in enumerate(self._answers(prompts, samples, greedy)):
            index, prompt = i // samples, prompts[i // samples]
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            key = CallKey(f"{name}-{i}-{greedy}", "attempt", "call")
            call = Generation(
                key,
                "policy",
                prompt,
                ids,
                logprobs,
                [self._version] * len(ids),
                "stop",
                0.0,
                1.0,
                {"temperature": float(not greedy)} | self._sampling,
                candidates=candidates,
            )
            rollout = Rollout(
                input=tasks[index],
                group_id=f"{name}-{index}",
                rollout_id=key.rollout_id,
                status="succeeded",
                start_time=0.0,
                metadata={GREEDY: True} if greedy else {},
            )
            finished.append(FinishedRollout(rollout, float(is_right(tasks[index], text)), [call]))
        return finished

    def answer_jointly(
        self, tasks: list[Any], samples: int, name: str, agents: int, greedy: bool = False
    ) -> list[FinishedRollout]:
        """Answer tasks in rollouts of several agents, each with its own task."""
        answers = self.answer(tasks, samples, name, greedy)
        if agents == 1:
            return answers
        joined = []
        for i in range(len(tasks) // agents * samples):
            parts = [answers[(i // samples * agents + k) * samples + i % samples] for k in range(agents)]
            rollout = parts[0].rollout.model_copy(update={"group_id": f"{name}-{i // samples}"})
            calls = [replace(part.generations[0], agent=f"agent-{k}") for k, part in enumerate(parts)]
            spans = [
                Span.from_core_fields(emit_reward(part.reward, agent=f"agent-{k}", propagate=False))
                for k, part in enumerate(parts)
            ]
            reward = statistics.fmean(part.reward or 0.0 for part in parts)
            joined.append(FinishedRollout(rollout, reward, calls, spans, {"primary": reward}))
        return joined

    @torch.no_grad()
    def _answers(
        self, prompts: list[list[int]], samples: int, greedy: bool
    ) -> list[tuple[list[int], list[float], TokenSets]]:
        """Return tokens, log-probs and candidates of `samples` answers to each of the prompts, which have one
        length."""
        end, inputs, cache = self._model.config.eos_token_id, torch.tensor(prompts), DynamicCache()
        tokens, logprobs, candidates = [], [], []
        rows, params = len(prompts) * samples, [self._params] * len(prompts) * samples
        for _ in range(ANSWER_TOKENS):
            logits = self._model(inputs, past_key_values=cache, logits_to_keep=1).logits
            if not tokens:  # the answers to a prompt share its pass
                cache.batch_repeat_interleave(samples)
                logits = logits.repeat_interleave(samples, 0)
            written = torch.cat(tokens, 1).tolist() if tokens else [[]] * rows
            histories = [(np.array(prompts[i // samples]), ids) for i, ids in enumerate(written)]
            log_p = distribution(adjust_logits(logits[:, -1], params, histories, []), params)
            candidates.append(find_candidates(log_p).split([1] * rows))
            inputs = log_p.argmax(-1, keepdim=True) if greedy else torch.multinomial(log_p.exp(), 1)
            tokens.append(inputs)
            logprobs.append(log_p.gather(1, inputs))
        answers = []
        for ids, ids_logprobs, sets in zip(
            torch.cat(tokens, 1).tolist(),
            torch.cat(logprobs, 1).tolist(),
            zip(*candidates, strict=True),
            strict=True,
        ):
            length = ids.index(end) + 1 if end in ids else len(ids)
            replayed = TokenSets.join(
                sets[:length] if self._sampling and self._truncation == "replay" else ()
            )
            answers.append((ids[:length], ids_logprobs[:length], replayed))
        return answers


def build_algorithm(name: str, lr: float, mini_batches: int, **more: Any) -> algorithms.PolicyAlgorithm:
    """Build an algorithm with its defaults, except these settings and the tasks per step."""
    kind = getattr(algorithms, name)
    group = kind.model_fields["group_size"].default
    common = {"lr": lr, "mini_batches": mini_batches, "tasks_per_step": ROLLOUTS // group}
    return kind(model=STARTER_MODEL, **common | SETTINGS.get(name, {}) | more)


def train(
    algorithm: algorithms.PolicyAlgorithm,
    steps: int,
    seed: int,
    agents: int = 1,
    sampling: dict[str, Any] | None = None,
    truncation: str = "replay",
) -> Run:
    """Train for `steps` steps, and validate before and after.

    Args:
        agents: agents of a training rollout, each with its own task.
        sampling: truncation and penalties of all answers.
        truncation: their treatment: "replay", "mask" or "ignore".
    """
    from raylight.learner.updates.policy import Policy

    torch.manual_seed(seed)
    learner = LearnerConfig()
    settings = PolicySettings(**{name: getattr(algorithm, name) for name in PolicySettings.model_fields})
    if not settings.max_logprob_mismatch:
        settings = settings.model_copy(update={"max_logprob_mismatch": 1e-3})
    sampler, policy = Sampler(sampling, truncation), Policy(STARTER_MODEL, learner, settings, steps)
    tasks, val = additions(seed)
    rounds = algorithm.max_rounds
    order, size, taken = TaskSampler(tasks, seed), algorithm.tasks_per_step // agents, 0

    def gather() -> list[FinishedRollout]:
        """Answer tasks until there are the groups of a step, as the Trainer's loop chooses them."""
        nonlocal taken
        groups: list[list[FinishedRollout]] = []
        informative: list[bool] = []
        while choose_groups(range(len(groups)), informative.__getitem__, size, size * rounds) is None:
            numbers = range(taken, taken + size - (sum(informative) if rounds > 1 else 0))
            new = [order.draw(number * agents + k).task for number in numbers for k in range(agents)]
            answers = sampler.answer_jointly(new, algorithm.group_size, f"train-{taken}", agents)
            if algorithm.needs_greedy_rollouts:
                answers += sampler.answer_jointly(new, 1, f"train-{taken}", agents, greedy=True)
            added = [
                [item for item in answers if item.rollout.group_id == f"train-{taken}-{index}"]
                for index in range(len(numbers))
            ]
            groups += added
            informative += [algorithm.batch_rules(learner).is_informative(group) for group in added]
            taken += len(numbers)
        return [item for group in groups for item in group]

    def validate() -> float:
        return statistics.fmean(item.reward or 0.0 for item in sampler.answer(val, VALIDATION_SAMPLES, "val"))

    before, started = validate(), time.perf_counter()
    curve = []
    for _ in range(steps):
        finished = gather()
        curve.append(
            statistics.fmean(item.reward or 0.0 for item in finished if not item.rollout.metadata.get(GREEDY))
        )
        batch, report = build_batch(finished, algorithm.batch_rules(learner))
        if report.has_signal:
            policy.update(batch)
            weights = policy.export()
            assert weights is not None, "this is rank 0"
            sampler.load(weights, policy.version)
    seconds = time.perf_counter() - started
    return Run(before, validate(), curve, seconds)


def draw(runs: dict[str, list[Run]], path: str) -> None:
    """Plot the mean reward of each step: one panel per algorithm, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(runs), 4)
    figure, axes = plt.subplots(
        -(-len(runs) // columns),
        columns,
        figsize=(9, 1.8 * -(-len(runs) // columns)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for panel in axes.flat[len(runs) :]:
        panel.axis("off")
    for panel, (name, seed_runs) in zip(axes.flat, runs.items(), strict=False):
        panel.set_title(name, fontsize=9)
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
        for run in seed_runs:
            panel.plot(range(1, len(run.curve) + 1), run.curve, linewidth=1)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("reward of its rollouts", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="comma-separated names")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; they count from 0")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--mini-batches",
        type=int,
        default=2,
        help="mini-batches of a step; with two or more, losses see ratios other than 1",
    )
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--agents", type=int, default=1, help="agents of a rollout")
    parser.add_argument("--credit", default="rollout", choices=["rollout", "agent"])
    parser.add_argument("--sampling", type=json.loads, default={}, help="truncation and penalties, as JSON")
    parser.add_argument("--truncation", default="replay", choices=["replay", "mask", "ignore"])
    parser.add_argument("--settings", type=json.loads, default={}, help="of the algorithms, as JSON")
    parser.add_argument("--plot", help="PNG file for the reward curves")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(f"{folder}/ranks")
        print(f"| algorithm | rollouts per task | reward before | after {args.steps} steps | gain | s |")
        print("|---|---|---|---|---|---|")
        results: dict[str, list[Run]] = {}
        for name in args.algorithms.split(","):
            more = {"credit": args.credit} | args.settings
            if args.truncation != "replay":
                more |= {"off_policy_sampling": "mask", "max_logprob_mismatch": 50.0}
            algorithm = build_algorithm(name, args.lr, args.mini_batches, **more)
            with contextlib.redirect_stdout(sys.stderr):  # verl prints
                runs = [
                    train(algorithm, args.steps, seed, args.agents, args.sampling, args.truncation)
                    for seed in range(args.seeds)
                ]
            results[name] = runs
            columns = [
                mean_and_deviation([getattr(run, figure) for run in runs])
                for figure in ("before", "after", "gain")
            ]
            seconds = statistics.fmean(run.seconds for run in runs)
            print(f"| {name} | {algorithm.group_size} | {' | '.join(columns)} | {seconds:.1f} |", flush=True)
        if args.plot:
            draw(results, args.plot)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
