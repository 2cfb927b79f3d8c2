"""Rollouts per second of raylight's full loop, of bare torch loops and of TRL's GRPOTrainer, for a model of
0.25M parameters.

    python tests/benchmarks/loop_vs_bare.py [--rounds 3] [--max-staleness 0 1] [--trl-python PYTHON]
                                            [--cpu] [--flame DIR]

The full loop has an agent with OpenAI's client, HTTP, capture, updates and weight syncs. TRL and "bare"
sample in their own process. "HTTP" is "bare" with OpenAI's client and a server in another process, and
nothing else: the bound of the full loop. All train the quickstart's model on its task with 128 rollouts a
step, without a KL term. They run one after the other, each in its own process, in every round. A ratio is
that of the seconds per step after the warm-up, all work between two steps included.
"""

import functools
import sys

from loop_runs import measure, parser, report, train

GROUPS, GROUP = 16, 8


def ours(steps: int, max_staleness: int) -> None:
    """Train with raylight."""
    import raylight as rl
    from raylight.quickstart import STARTER_MODEL
    from raylight.quickstart.additions import additions
    from raylight.quickstart.agent import adder

    algorithm = functools.partial(
        rl.GRPO, model=STARTER_MODEL, lr=2e-4, tasks_per_step=GROUPS, group_size=GROUP
    )
    train(adder, additions(0)[0], steps, max_staleness, algorithm)


def main() -> None:
    if sys.argv[1:2] == ["ours"]:
        return ours(*map(int, sys.argv[2:]))
    args = parser(__doc__, steps=25, rounds=3).parse_args()
    rounds = []
    for _ in range(args.rounds):
        results = {
            f"raylight S={staleness}": measure(
                sys.executable,
                "loop_vs_bare.py",
                "ours",
                args.steps,
                staleness,
                flames=args.flame and args.flame / f"S{staleness}",
            )
            for staleness in args.max_staleness
        }
        results["bare"] = measure(sys.executable, "bare_grpo.py", "--steps", args.steps, "--json")
        results["HTTP"] = measure(sys.executable, "http_grpo.py", "--steps", args.steps)
        results["TRL"] = measure(args.trl_python, "trl_grpo.py", "--steps", args.steps)
        rounds.append(results)
        print("  ".join(f"{name} {result['step']:.3f}" for name, result in results.items()), flush=True)
    report(rounds, "TRL", args.cpu)


if __name__ == "__main__":
    main()
