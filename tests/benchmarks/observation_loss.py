"""Success rate of a task whose answers the environment shows in passing, with and without `observation_coef`.

    python tests/benchmarks/observation_loss.py [--coefs 0,0.1,1] [--seeds 3] [--steps 40]

A secret table gives each of 16 keys a value. A rollout has two calls: any token, to which a tool returns two
entries of the table and a third key, and then the answer, which is right if it is that key's value. An
untrained policy is right in one of 16 rollouts. Everything runs in one process without Ray: plain
transformers sample; trajectories, batches, advantages, losses and the optimizer are raylight's own.
"""

import contextlib
import statistics
import sys
import tempfile

import torch
import torch.distributed as dist
from harness import join_ranks, make_parser
from toy_policy import GROUP, GROUPS, finish, learning_curve

from raylight import algorithms
from raylight.types import CallKey, FinishedRollout, Generation

KEYS, START, FIRST_KEY = 16, 1, 100
VALUES = [(7 * key + 3) % KEYS for key in range(KEYS)]
"""Rest by 16 of the value of each key."""


def sample(model: torch.nn.Module, prompts: list[list[int]]) -> tuple[list[int], list[float]]:
    """Return a token after each prompt, and its log-prob."""
    with torch.no_grad():
        logp = model(torch.tensor(prompts)).logits[:, -1].float().log_softmax(-1)
    tokens = torch.multinomial(logp.exp(), 1)
    return tokens[:, 0].tolist(), logp.gather(1, tokens)[:, 0].tolist()


def play(model: torch.nn.Module, version: int, step: int) -> list[FinishedRollout]:
    """Sample the rollouts of a step; a group's rollouts have the same last key."""
    count = GROUP * GROUPS
    asked = torch.randint(KEYS, (GROUPS,)).repeat_interleave(GROUP).tolist()
    shown = torch.randint(KEYS, (count, 2)).tolist()
    prompts, calls = [[START]] * count, [[] for _ in range(count)]
    for turn in range(2):
        tokens, logprobs = sample(model, prompts)
        for rollout in range(count):
            key = CallKey(f"{step}-{rollout}", "attempt", f"call-{turn}")
            made = Generation(
                key,
                "m",
                prompts[rollout],
                tokens[rollout : rollout + 1],
                logprobs[rollout : rollout + 1],
                [version],
                "stop",
                float(turn),
                turn + 0.5,
            )
            calls[rollout].append(made)
        entries = [[token for key in keys for token in (FIRST_KEY + key, VALUES[key])] for keys in shown]
        prompts = [
            [*prompt, token, *table, FIRST_KEY + key]
            for prompt, token, table, key in zip(prompts, tokens, entries, asked, strict=True)
        ]
    finished = []
    for rollout in range(count):
        right = int(calls[rollout][1].output_ids[0]) % KEYS == VALUES[asked[rollout]]
        finished.append(finish(step, rollout, float(right), calls[rollout]))
    return finished


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--coefs", default="0,0.1,1", help="comma-separated values of observation_coef")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; they count from 0")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(f"{folder}/ranks")
        for coef in map(float, args.coefs.split(",")):
            for seed in range(args.seeds):
                with contextlib.redirect_stdout(sys.stderr):  # verl prints
                    settings = {"observation_coef": coef}
                    curve = learning_curve(algorithms.GRPO, settings, play, args.steps, args.lr, seed)
                shown = [round(statistics.fmean(curve[i : i + 5]), 2) for i in range(0, len(curve), 5)]
                print(coef, seed, shown, flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
