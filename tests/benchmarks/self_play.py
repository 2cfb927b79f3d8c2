"""Skill that a policy gains against the initial model and in self-play, as a Markdown table.

    python tests/benchmarks/self_play.py [--variants initial,latest,pool] [--seeds 3]

A game of eight questions: each has one right answer in four, and who has more right answers wins. A policy
that has five right nearly always beats the initial model, so that nothing is left to learn from it. The
figure is the share of the policy's right answers. Everything runs in one process without Ray: plain
transformers sample; opponents, batches, advantages, losses and the optimizer are raylight's own.
"""

import contextlib
import copy
import sys
import tempfile

import torch
import torch.distributed as dist
from harness import join_ranks, make_parser, mean_and_deviation
from toy_policy import GROUP, GROUPS, finish, learning_curve

from raylight import algorithms
from raylight.experience.opponents import OpponentPool
from raylight.types import CallKey, FinishedRollout, Generation

KINDS = 4
"""Answers to a question: the token's rest."""
RIGHT = torch.tensor([3, 0, 1, 2, 2, 0, 3, 1])
"""Right answer to each question."""
PROMPTS = torch.tensor([[7, question] for question in range(len(RIGHT))])
VARIANTS = {
    "initial": algorithms.SelfPlay(every=10**6),
    "latest": algorithms.SelfPlay(every=4),
    "pool": algorithms.SelfPlay(every=4, pool=4),
}


class Game:
    """Plays the steps of a run against its opponents."""

    def __init__(self, settings: algorithms.SelfPlay, seed: int) -> None:
        self._pool = OpponentPool(settings, seed)
        self._models: dict[int, torch.nn.Module] = {}
        self.skill: list[float] = []
        """Share of right answers in each step."""

    def play(self, model: torch.nn.Module, version: int, step: int) -> list[FinishedRollout]:
        """Sample the rollouts of a step; the rollouts of a group have the same opponent."""
        if self._pool.is_due(step):
            self._models[step] = copy.deepcopy(model)
            self._models.pop(self._pool.add(step, version), None)
        logp = logprobs(model)
        answers = torch.multinomial(logp.exp(), GROUP * GROUPS, True).T
        scores = count_right(answers)
        self.skill.append(float(scores.float().mean() / len(RIGHT)))
        finished, results = [], []
        for group in range(GROUPS):
            met = self._pool.draw(step * GROUPS + group)
            others = count_right(torch.multinomial(logprobs(self._models[met]).exp(), GROUP, True).T)
            for rollout, other in enumerate(others, group * GROUP):
                reward = float(torch.sign(scores[rollout] - other) + 1) / 2
                calls = calls_of(f"{step}-{rollout}", answers[rollout].tolist(), logp, version)
                finished.append(finish(step, rollout, reward, calls))
                results.append((met, reward))
        self._pool.record(results)
        return finished


def calls_of(rollout: str, answers: list[int], logp: torch.Tensor, version: int) -> list[Generation]:
    """Return a call for each question of a rollout."""
    calls = []
    for question, token in enumerate(answers):
        key, at = CallKey(rollout, "attempt", f"call-{question}"), float(question)
        prompt, logprob = PROMPTS[question].tolist(), float(logp[question, token])
        calls.append(Generation(key, "m", prompt, [token], [logprob], [version], "stop", at, at + 0.5))
    return calls


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """Return the log-probs of the answers to each question, shape (questions, vocabulary)."""
    with torch.no_grad():
        return model(PROMPTS).logits[:, -1].float().log_softmax(-1)


def count_right(answers: torch.Tensor) -> torch.Tensor:
    """Return the number of right answers of each rollout, given tokens of shape (rollouts, questions)."""
    return (answers % KINDS == RIGHT).sum(1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated opponents")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; they count from 0")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--entropy", type=float, default=0.05, help="coefficient of the entropy")
    args = parser.parse_args()
    settings = {"entropy_coef": args.entropy}
    print("| opponents | right answers at the start | at the end | each seed |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(f"{folder}/ranks")
        for variant in args.variants.split(","):
            curves = []
            for seed in range(args.seeds):
                game = Game(VARIANTS[variant], seed)
                with contextlib.redirect_stdout(sys.stderr):  # verl prints
                    learning_curve(algorithms.GRPO, settings, game.play, args.steps, args.lr, seed)
                curves.append(game.skill)
            ends = [curve[-1] for curve in curves]
            shown = " ".join(f"{end:.2f}" for end in ends)
            print(f"| {variant} | {curves[0][0]:.2f} | {mean_and_deviation(ends)} | {shown} |", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
