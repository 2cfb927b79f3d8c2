"""Bare GRPO loop in one process, as a baseline for raylight's quickstart.

    python tests/benchmarks/bare_grpo.py [--steps N] [--seed S] [--lr LR] [--json]

It trains the quickstart's model on its task without Ray, HTTP or an inference engine. Its time per step is
the lower bound for the framework, and its accuracy shows how fast the model can learn.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylight.quickstart.additions import additions, is_right, question

MODEL = Path(__file__).parents[2] / "raylight" / "quickstart" / "model"
TASKS, GROUP = 16, 8  # 128 rollouts a step
ANSWER_TOKENS = 6  # two more than a correct answer needs
VALIDATE_EVERY = 5
VALIDATION_SAMPLES = 4  # per validation task; a single sample leaves 4 points of noise
CLIP = 0.2


def encode(tokenizer, tasks):
    """Return the prompts as one tensor. All questions have the same length: no padding is needed."""
    chats = [[{"role": "user", "content": question(task)}] for task in tasks]
    return torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))


@torch.no_grad()
def sample(model, prompts):
    """Sample answers at temperature 1. Return tokens, log-probs and a mask up to the end-of-turn token."""
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    alive = torch.ones(len(prompts), dtype=torch.bool)
    inputs, cache, tokens, logps, mask = prompts, None, [], [], []
    for _ in range(ANSWER_TOKENS):
        out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logp = out.past_key_values, out.logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1).squeeze(1).where(alive, pad)
        tokens.append(token)
        logps.append(logp.gather(1, token[:, None]).squeeze(1))
        mask.append(alive)
        alive = alive & (token != end)
        if not alive.any():
            break
        inputs = token[:, None]
    return torch.stack(tokens, 1), torch.stack(logps, 1), torch.stack(mask, 1)


def score(tokenizer, tasks, tokens):
    """Return 1 for each correct answer, otherwise 0."""
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return torch.tensor([float(is_right(task, text)) for task, text in zip(tasks, texts, strict=True)])


def update(model, optimizer, prompts, tokens, old_logps, mask, rewards):
    """Take one optimizer step on the clipped loss, averaged over all tokens. Without `old_logps` they are
    those of this pass."""
    groups = rewards.view(-1, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    inputs = torch.cat([prompts, tokens[:, :-1]], dim=1)
    logits = model(inputs, use_cache=False, logits_to_keep=tokens.shape[1]).logits
    logps = logits.log_softmax(-1).gather(2, tokens[..., None]).squeeze(2)
    ratio = (logps - (logps.detach() if old_logps is None else old_logps)).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    loss = -(gain * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the quickstart's model with a bare GRPO loop.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", action="store_true", help="print only the median seconds per step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=0.01)
    train, val = additions(args.seed)
    val = val * VALIDATION_SAMPLES
    val_prompts = encode(tokenizer, val)

    def validate(step: int) -> None:
        tokens, _, _ = sample(model, val_prompts)
        print(f"step {step:3d}  validation accuracy {score(tokenizer, val, tokens).mean():.3f}", flush=True)

    if not args.json:
        validate(0)
    seconds = {"sampling": [], "update": []}
    for step in range(args.steps):
        started = time.perf_counter()
        tasks = [train[(step * TASKS + i) % len(train)] for i in range(TASKS) for _ in range(GROUP)]
        prompts = encode(tokenizer, tasks)
        tokens, logps, mask = sample(model, prompts)
        rewards = score(tokenizer, tasks, tokens)
        sampled = time.perf_counter()
        update(model, optimizer, prompts, tokens, logps, mask, rewards)
        updated = time.perf_counter()
        seconds["sampling"].append(sampled - started)
        seconds["update"].append(updated - sampled)
        times = "  ".join(f"{stage} {values[-1]:.3f} s" for stage, values in seconds.items())
        print(f"step {step + 1:3d}  mean reward {rewards.mean():.3f}  {times}", flush=True)
        if (step + 1) % VALIDATE_EVERY == 0 and not args.json:
            validate(step + 1)
    medians = {stage: statistics.median(values) for stage, values in seconds.items()}
    if args.json:
        stages = {"rollout": medians["sampling"], "update": medians["update"]}
        return print(json.dumps({"step": sum(medians.values()), "stages": stages}))
    print("median seconds per step: " + "  ".join(f"{stage} {value:.3f}" for stage, value in medians.items()))


if __name__ == "__main__":
    main()
