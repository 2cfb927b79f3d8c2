"""Time per step of raylight's full loop and of TRL's GRPOTrainer, where compute dominates.

    python tests/benchmarks/loop_vs_trl.py [--steps 4] [--threads 2]        (needs `pip install trl`)

The model has 20 million random parameters; a step has 64 rollouts with answers of 64 tokens. The reward is
the share of an answer's characters that are digits. Both programs run one after the other, each in its own
process and with the same number of compute threads. Prints the median seconds per step and the ratio of
rollouts per second.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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


def ours(model: str, folder: str, steps: int, threads: int) -> None:
    """Train with raylight. Print the median seconds of each stage."""
    import raylight as rl

    @rl.rollout
    async def agent(task: int, llm: rl.LLM) -> float:
        from raylight.quickstart.agent import client

        reply = (
            await client()
            .with_options(base_url=llm.endpoint, api_key=llm.api_key)
            .chat.completions.create(
                model=llm.model,
                messages=[{"role": "user", "content": question(task)}],
                temperature=1.0,
                max_tokens=RESPONSE_TOKENS,
            )
        )
        return reward_of(reply.choices[0].message.content or "")

    trainer = rl.Trainer(
        algorithm=rl.GRPO(
            model=model, lr=LEARNING_RATE, tasks_per_step=ROLLOUTS // GROUP, group_size=GROUP, n_steps=steps
        ),
        n_runners=2,
        output_dir=folder,
        engine={"num_threads": threads},
        learner={"num_threads": threads},
        progress=False,
    )
    trainer.fit(agent, list(range(TASKS)))
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 1 and "time/sync_s" in row]
    stages = {
        name: statistics.median(row[f"time/{name}_s"] for row in rows)
        for name in ("rollout", "update", "sync")
    }
    print(json.dumps(stages | {"all": sum(stages.values())}))


def theirs(model: str, folder: str, steps: int, threads: int) -> None:
    """Train with TRL. Print the median seconds per step."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl_grpo import Clock

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = Clock()
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=ROLLOUTS,
        num_generations=GROUP,
        max_completion_length=RESPONSE_TOKENS,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        beta=0.0,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        seed=0,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )

    def reward(completions: list, **rest: object) -> list[float]:
        return [reward_of(text[0]["content"]) for text in completions]

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": question(i)}]} for i in range(TASKS)])
    GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=rows, callbacks=[clock]).train()
    print(json.dumps({"all": statistics.median(clock.seconds[1:])}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trainer", choices=["raylight", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        with tempfile.TemporaryDirectory() as folder:
            {"raylight": ours, "trl": theirs}[args.trainer](args.model, folder, args.steps, args.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        seconds = {}
        for trainer in ("raylight", "trl"):
            command = [
                sys.executable,
                __file__,
                "--trainer",
                trainer,
                "--model",
                folder,
                "--steps",
                str(args.steps),
            ]
            command += ["--threads", str(args.threads)]
            last = (
                subprocess.run(command, capture_output=True, text=True, check=True)
                .stdout.strip()
                .splitlines()[-1]
            )
            seconds[trainer] = json.loads(last)
            print(trainer, {name: round(s, 2) for name, s in seconds[trainer].items()}, flush=True)
    ratio = seconds["trl"]["all"] / seconds["raylight"]["all"]
    print(f"raylight does {ratio:.2f} x TRL's rollouts per second")


if __name__ == "__main__":
    main()
