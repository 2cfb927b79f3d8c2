"""Success rate of a task of many turns with one thin reward at its end, with GRPO and with GiGPO.

    python tests/benchmarks/turn_credit.py [--algorithms GRPO,GiGPO,GiGPO-turn,GRPO-process] [--seeds 3]

A lock has four dials. In each of twelve turns the model sees the number of dials that are set and answers a
token, whose rest by eight sets the next dial or does not. The reward, at the end, is 1 if all dials are set.
A random policy earns it in 5% of its rollouts. Everything runs in one process without Ray: plain transformers
sample; batches, advantages, losses and the optimizer are raylight's own. `-process` adds a reward to each
turn (0.25 for a dial), as a process reward would.
"""

import contextlib
import json
import statistics
import sys
import tempfile

import torch
import torch.distributed as dist
from harness import join_ranks, make_parser
from toy_policy import GROUP, GROUPS, finish, learning_curve

from raylight import algorithms
from raylight.semconv import ANNOTATION, GRADE_SPAN_ID, GRADE_TURNS
from raylight.types import CallKey, FinishedRollout, Generation, Span

DIALS, TURNS, KINDS = 4, 12, 8
SECRET = (3, 6, 1, 4)
"""Rest of the token that sets each dial."""
VARIANTS = {
    "GRPO": ("GRPO", {}),
    "GiGPO": ("GiGPO", {}),
    "GiGPO-turn": ("GiGPO", {"turn_groups": "turn"}),
    "GRPO-process": ("GRPO", {"turn_rewards": True}),
    "GiGPO-process": ("GiGPO", {"turn_rewards": True}),
}


def play(model: torch.nn.Module, version: int, step: int) -> list[FinishedRollout]:
    """Sample the rollouts of a step."""
    count = GROUP * GROUPS
    states, calls, scores = [0] * count, [[] for _ in range(count)], [{} for _ in range(count)]
    for turn in range(TURNS):
        with torch.no_grad():
            logp = model(torch.tensor([[7, state] for state in states])).logits[:, -1].float().log_softmax(-1)
        tokens = torch.multinomial(logp.exp(), 1)[:, 0].tolist()
        for rollout, token in enumerate(tokens):
            state = states[rollout]
            if state == DIALS:
                continue
            key = CallKey(f"{step}-{rollout}", "attempt", f"call-{turn}")
            logprob, at = float(logp[rollout, token]), float(turn)
            calls[rollout].append(
                Generation(key, "m", [7, state], [token], [logprob], [version], "stop", at, at + 0.5)
            )
            right = token % KINDS == SECRET[state]
            states[rollout] += right
            scores[rollout][key.call_id] = 0.25 * right
    finished = []
    for rollout, state in enumerate(states):
        grade = Span.from_attributes(
            name=ANNOTATION, attributes={GRADE_TURNS: json.dumps(scores[rollout])}, span_id=GRADE_SPAN_ID
        )
        finished.append(finish(step, rollout, float(state == DIALS), calls[rollout], [grade]))
    return finished


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--algorithms", default=",".join(VARIANTS), help="comma-separated variants")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; they count from 0")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(f"{folder}/ranks")
        for variant in args.algorithms.split(","):
            for seed in range(args.seeds):
                with contextlib.redirect_stdout(sys.stderr):  # verl prints
                    name, settings = VARIANTS[variant]
                    algorithm = getattr(algorithms, name)
                    curve = learning_curve(algorithm, settings, play, args.steps, args.lr, seed)
                means = [statistics.fmean(curve[i : i + 5]) for i in range(0, len(curve), 5)]
                reached = next((i for i in range(2, len(curve)) if min(curve[i - 2 : i + 1]) >= 0.8), None)
                rollouts = None if reached is None else (reached + 1) * GROUP * GROUPS
                print(
                    variant, seed, [round(one, 2) for one in means], "rollouts to 0.8:", rollouts, flush=True
                )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
