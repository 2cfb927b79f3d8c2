"""Rollouts per second of raylight's full loop and of TRL's GRPOTrainer, where compute dominates.

    python tests/benchmarks/loop_vs_trl.py [--rounds 2] [--max-staleness 0 1] [--trl-python PYTHON]
                                           [--async-threads 1,1 2,1] [--cpu] [--flame DIR]

The model has 20 million random parameters; a step has 64 rollouts with answers of 64 tokens. The reward is
the share of an answer's characters that are digits. The programs run one after the other, each in its own
process, in every round. With max_staleness 0 all use `--threads` threads to compute; above 0 raylight's
engine and learner compute at the same time, with half of them each, or with each of the pairs that
`--async-threads` names (engine, learner). A ratio is that of the seconds per step after the warm-up, all work
between two steps included.
"""

import functools
import sys
import tempfile
from pathlib import Path

from loop_runs import measure, parser, report, train

ROLLOUTS, GROUP, RESPONSE_TOKENS, TASKS = 64, 8, 64, 64
LEARNING_RATE = 1e-5


def question(i: int) -> str:
    return f"Tell number {i:03} of your {TASKS} favourite rows of digits."


def reward_of(text: str) -> float:
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def build(folder: Path) -> None:
    """Save a random Qwen3 of 20 million parameters with the quickstart's byte-level tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from raylight.quickstart import STARTER_MODEL

    torch.manual_seed(0)
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
    model = Qwen3ForCausalLM(config)
    print(f"{model.num_parameters():,} parameters", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ours(model: str, steps: int, max_staleness: int, engine: int, learner: int) -> None:
    """Train with raylight, with numbers of threads of engine and learner."""
    import raylight as rl

    @rl.rollout
    async def agent(task: int, llm: rl.LLM) -> float:
        reply = await llm.client().chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": question(task)}],
            temperature=1.0,
            max_tokens=RESPONSE_TOKENS,
        )
        return reward_of(reply.choices[0].message.content or "")

    algorithm = functools.partial(
        rl.GRPO, model=model, lr=LEARNING_RATE, tasks_per_step=ROLLOUTS // GROUP, group_size=GROUP
    )
    threads = {"engine": {"num_threads": engine}, "learner": {"num_threads": learner}}
    train(agent, list(range(TASKS)), steps, max_staleness, algorithm, **threads)


def theirs(model: str, steps: int, threads: int) -> None:
    """Train with TRL."""
    import torch
    import trl_grpo

    def reward(completions: list, **rest: object) -> list[float]:
        return [reward_of(text[0]["content"]) for text in completions]

    torch.set_num_threads(threads)
    trl_grpo.train(
        model,
        [{"prompt": [{"role": "user", "content": question(i)}]} for i in range(TASKS)],
        reward,
        per_device_train_batch_size=ROLLOUTS,
        num_generations=GROUP,
        max_completion_length=RESPONSE_TOKENS,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
    )


def pair(text: str) -> tuple[int, int]:
    """Read two numbers."""
    one, other = map(int, text.split(","))
    return one, other


def main() -> None:
    if sys.argv[1:2] in (["ours"], ["theirs"]):
        function, model, *numbers = sys.argv[1:]
        return globals()[function](model, *map(int, numbers))
    options = parser(__doc__, steps=9, rounds=2)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--async-threads", nargs="+", type=pair, metavar="ENGINE,LEARNER")
    args = options.parse_args()
    half = max(args.threads // 2, 1)
    apart = args.async_threads or [(half, half)]
    runs = {
        f"S={staleness}, {engine}+{learner} threads": (staleness, engine, learner)
        for staleness in args.max_staleness
        for engine, learner in (apart if staleness else [(args.threads, args.threads)])
    }
    script, rounds = Path(__file__).name, []
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for _ in range(args.rounds):
            results = {
                name: measure(
                    sys.executable,
                    script,
                    "ours",
                    folder,
                    args.steps,
                    *run,
                    flames=args.flame and args.flame / name.partition(",")[0].replace("=", ""),
                )
                for name, run in runs.items()
            }
            results["TRL"] = measure(args.trl_python, script, "theirs", folder, args.steps, args.threads)
            rounds.append(results)
            print("  ".join(f"{name} {result['step']:.3f}" for name, result in results.items()), flush=True)
    report(rounds, "TRL", args.cpu)


if __name__ == "__main__":
    main()
