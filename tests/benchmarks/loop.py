"""Rollouts per second of raylight's full loop, of bare torch loops and of TRL's GRPOTrainer.

    python tests/benchmarks/loop.py [--shape quickstart|20M] [--model FOLDER] [--rounds 2]
                                    [--max-staleness 0 1] [--trl-python PYTHON] [--async-threads 1,1 2,1]
                                    [--cpu] [--flame DIR]

The full loop has an agent with OpenAI's client, HTTP, capture, updates and weight syncs; TRL samples in its
own process. The programs run one after the other, each in its own process, in every round. A ratio compares
the seconds per step after the warm-up, including all work between two steps.

quickstart: all train the quickstart's model, of 0.25 million parameters, on its task with 128 rollouts a
step, without a KL term. "bare" samples in its own process; "HTTP" is "bare" with OpenAI's client and a server
in another process, and nothing else: the bound of the full loop.

20M: compute dominates. The model has 20 million random parameters; a step has 64 rollouts with answers of 64
tokens, whose reward is the share of digits among their characters. With max_staleness 0 all use `--threads`
threads to compute; above 0 raylight's engine and learner compute at the same time, with half of them each, or
with each of the pairs that `--async-threads` names (engine, learner). `--model` takes a pretrained model in
place of the random one, with answers of 28 tokens.
"""

import argparse
import functools
import sys
import tempfile
from pathlib import Path

from harness import save_random
from loop_runs import Programs, chat_agent, measure, parser, report, run_rounds, train

ROLLOUTS, GROUP, TASKS = 64, 8, 64
RANDOM_ANSWER, PRETRAINED_ANSWER = 64, 28
"""Tokens of an answer, of the random model and of a pretrained one."""
LEARNING_RATE = 1e-5
STEPS = {"quickstart": 25, "20M": 9}
"""Steps of a run by shape, unless others are given."""
SCRIPT = Path(__file__).name


def quickstart(steps: int, max_staleness: int) -> None:
    """Train the quickstart's model with raylight."""
    import raylight as rl
    from raylight.quickstart import STARTER_MODEL
    from raylight.quickstart.additions import additions
    from raylight.quickstart.agent import adder

    algorithm = functools.partial(rl.GRPO, model=STARTER_MODEL, lr=2e-4, tasks_per_step=16, group_size=8)
    train(adder, additions(0)[0], steps, max_staleness, algorithm)


def question(i: int) -> str:
    return f"Tell number {i:03} of your {TASKS} favourite rows of digits."


def reward_of(text: str) -> float:
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def build(folder: Path) -> None:
    """Save a random Qwen3 of 20 million parameters with the quickstart's byte-level tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config

    from raylight.quickstart import STARTER_MODEL

    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=448,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=7,
        num_key_value_heads=7,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_random(config, folder)


def ours(model: str, answer: int, steps: int, max_staleness: int, engine: int, learner: int) -> None:
    """Train with raylight, with numbers of threads of engine and learner."""
    import raylight as rl

    algorithm = functools.partial(
        rl.GRPO, model=model, lr=LEARNING_RATE, tasks_per_step=ROLLOUTS // GROUP, group_size=GROUP
    )
    threads = {"engine": {"num_threads": engine}, "learner": {"num_threads": learner}}
    agent = chat_agent(question, reward_of, answer)
    train(agent, list(range(TASKS)), steps, max_staleness, algorithm, **threads)


def theirs(model: str, answer: int, steps: int, threads: int) -> None:
    """Train with TRL."""
    import torch
    import trl_grpo

    torch.set_num_threads(threads)
    trl_grpo.train_chat(
        model,
        TASKS,
        question,
        reward_of,
        per_device_train_batch_size=ROLLOUTS,
        num_generations=GROUP,
        max_completion_length=answer,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
    )


def pair(text: str) -> tuple[int, int]:
    """Read two numbers."""
    one, other = map(int, text.split(","))
    return one, other


def quickstart_programs(args: argparse.Namespace) -> Programs:
    run = functools.partial(measure, sys.executable)
    programs: Programs = {
        f"raylight S={stale}": functools.partial(
            run, SCRIPT, "quickstart", args.steps, stale, flames=args.flame and args.flame / f"S{stale}"
        )
        for stale in args.max_staleness
    }
    bare = ("bare_grpo.py", "--steps", args.steps, "--json")
    programs |= {"bare": functools.partial(run, *bare), "HTTP": functools.partial(run, *bare, "--http")}
    trl = functools.partial(measure, args.trl_python, "trl_grpo.py", "--steps", args.steps)
    return programs | {"TRL": trl}


def large_programs(args: argparse.Namespace, model: str, answer: int) -> Programs:
    half = max(args.threads // 2, 1)
    pairs = args.async_threads or [(half, half)]
    ours = functools.partial(measure, sys.executable, SCRIPT, "ours", model, answer, args.steps)
    programs: Programs = {
        f"S={stale}, {engine}+{learner} threads": functools.partial(
            ours, stale, engine, learner, flames=args.flame and args.flame / f"S{stale}"
        )
        for stale in args.max_staleness
        for engine, learner in (pairs if stale else [(args.threads, args.threads)])
    }
    theirs = functools.partial(
        measure, args.trl_python, SCRIPT, "theirs", model, answer, args.steps, args.threads
    )
    return programs | {"TRL": theirs}


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("quickstart", "ours", "theirs"):
        function, *values = sys.argv[1:]
        return globals()[function](*(int(value) if value.isdigit() else value for value in values))
    options = parser(__doc__)
    options.add_argument("--shape", choices=list(STEPS), default="quickstart")
    options.add_argument("--model", help="folder of a pretrained model, in place of the shape")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--async-threads", nargs="+", type=pair, metavar="ENGINE,LEARNER")
    args = options.parse_args()
    args.steps = args.steps or STEPS[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            programs = large_programs(args, args.model, PRETRAINED_ANSWER)
        elif args.shape == "quickstart":
            programs = quickstart_programs(args)
        else:
            build(Path(folder))
            programs = large_programs(args, folder, RANDOM_ANSWER)
        report(run_rounds(programs, args.rounds), "TRL", args.cpu)


if __name__ == "__main__":
    main()
