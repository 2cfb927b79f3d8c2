"""Seconds per step of raylight, of TRL with colocated vLLM, and of a bare bound, on one GPU.

    python tests/benchmarks/gpu_loop.py [--shape 0.5B 1.5B] [--rounds 2] [--max-staleness 0 1]
                                        [--trl-python PYTHON] [--without-trl]

A step has 16 groups of 8 answers with 256 tokens, from a model with random weights, which hardly ever ends
an answer earlier. The bound is vLLM's own `generate` of as many tokens, and a plain update of torch on them,
each measured alone. The programs run one after the other, each in its own process, in every round; a ratio is
that of the seconds per step after the warm-up. Targets: 0.8 of the bound, 1.3 of TRL. On a machine without a
GPU, `--shape tiny --tokens 16 --steps 5 --without-trl` rehearses it with vLLM for CPU, into which TRL cannot
load weights.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loop_runs import WARM_UP, Programs, chat_agent, measure, parser, report, run_rounds, train

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from gpu_shapes import SHAPES, build

GROUPS, GROUP = 16, 8
PROMPT_TOKENS = 16
TASKS = 640
STEPS = 9
"""Steps of a run, unless others are given."""
LEARNING_RATE = 1e-6
ENGINE_SHARE = 0.4
"""Share of the GPU's memory for vLLM, wherever a learner shares the GPU."""
PACK = 16_384
"""Tokens of a micro-batch of the bare update."""


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def question(i: int) -> str:
    return f"{i}+1="


def reward_of(text: str) -> float:
    return float(sum(map(ord, text)) % 2)


def raylight(model: str, tokens: int, steps: int, max_staleness: int) -> None:
    """Train with raylight's defaults."""
    import raylight as rl

    algorithm = functools.partial(
        rl.GRPO,
        model=model,
        lr=LEARNING_RATE,
        tasks_per_step=GROUPS,
        group_size=GROUP,
        max_steps_without_signal=steps + 1,
    )
    agent = chat_agent(question, reward_of, tokens)
    train(agent, list(range(TASKS)), steps, max_staleness, algorithm, engine={"kind": "vllm"})


def trl(model: str, tokens: int, steps: int) -> None:
    """Train with TRL, whose trainer has vLLM in its process."""
    import trl_grpo

    on_gpu = device() == "cuda"
    trl_grpo.train_chat(
        model,
        TASKS,
        question,
        reward_of,
        per_device_train_batch_size=GROUPS * GROUP // 4,
        gradient_accumulation_steps=4,
        num_generations=GROUP,
        max_completion_length=tokens,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=ENGINE_SHARE,
        vllm_max_model_length=2048,
        vllm_enable_sleep_mode=on_gpu,
    )


def generate(model: str, tokens: int, steps: int) -> None:
    """Sample the answers of a step with vLLM alone."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        gpu_memory_utilization=ENGINE_SHARE,
        max_model_len=2048,
        max_num_seqs=GROUPS * GROUP,
        dtype="bfloat16" if device() == "cuda" else "float32",
        enforce_eager=device() == "cpu",
    )
    prompts = [{"prompt_token_ids": [40 + i // GROUP] * PROMPT_TOKENS} for i in range(GROUPS * GROUP)]
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    _print_step(lambda: engine.generate(prompts, sampling, use_tqdm=False), steps)


def update(model: str, tokens: int, steps: int) -> None:
    """Update on the answers of a step with torch alone: weights and moments in float32, bf16 to compute."""
    import torch
    from transformers import AutoModelForCausalLM

    where = device()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(where)
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, fused=True)
    length = PROMPT_TOKENS + tokens
    rows = torch.randint(0, policy.config.vocab_size, (GROUPS * GROUP, length), device=where)

    def loss_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = policy.lm_head(hidden).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step() -> None:
        for ids in rows.split(max(PACK // length, 1)):
            with torch.autocast(where, torch.bfloat16, enabled=where == "cuda"):
                hidden = policy.model(ids).last_hidden_state[:, PROMPT_TOKENS - 1 : -1]
                parts = hidden, ids[:, PROMPT_TOKENS:]
                loss = torch.utils.checkpoint.checkpoint(loss_of, *parts, use_reentrant=False)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if where == "cuda":
            torch.cuda.synchronize()

    _print_step(step, steps)


def _print_step(step, steps: int) -> None:
    """Print the mean seconds of a step after the warm-up."""
    for number in range(steps):
        if number == WARM_UP:
            begun = time.perf_counter()
        step()
    print(json.dumps({"step": (time.perf_counter() - begun) / (steps - WARM_UP)}))


def make_programs(args: argparse.Namespace, model: str) -> Programs:
    common = model, args.tokens, args.steps or STEPS

    def run(python: str, function: str, *more: object) -> dict[str, Any]:
        return measure(python, Path(__file__).name, function, *common, *more)

    def bound() -> dict[str, Any]:
        parts = {"rollout": "generate", "update": "update"}
        stages = {stage: run(sys.executable, part)["step"] for stage, part in parts.items()}
        return {"step": sum(stages.values()), "stages": stages}

    programs: Programs = {
        f"raylight, S={stale}": functools.partial(run, sys.executable, "raylight", stale)
        for stale in args.max_staleness
    }
    if not args.without_trl:
        programs["TRL"] = functools.partial(run, args.trl_python, "trl")
    return programs | {"bound": bound}


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("raylight", "trl", "generate", "update"):
        function, model, *numbers = sys.argv[1:]
        return globals()[function](model, *map(int, numbers))
    options = parser(__doc__)
    options.add_argument("--shape", nargs="+", default=["0.5B", "1.5B"], choices=list(SHAPES))
    options.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    options.add_argument("--without-trl", action="store_true", help="leave TRL out")
    args = options.parse_args()
    for shape in args.shape:
        with tempfile.TemporaryDirectory() as folder:
            model = build(SHAPES[shape], Path(folder), device())
            rounds = run_rounds(make_programs(args, model), args.rounds)
        print(f"{shape}, {GROUPS * GROUP} answers of {args.tokens} tokens")
        for peer in [name for name in ("bound", "TRL") if name in rounds[0]]:
            report(rounds, peer, args.cpu)
    return None


if __name__ == "__main__":
    main()
