"""Bare GRPO loops, as baselines for raylight's quickstart.

    python tests/benchmarks/bare_grpo.py [--steps N] [--seed S] [--lr LR] [--json] [--http]

They train the quickstart's model on its task without Ray, capture, store or gateway. The plain loop samples
in its own process: its time per step is the lower bound for the framework, and its accuracy shows how fast
the model can learn. With `--http`, another process serves the transformers engine, and each rollout is a call
by OpenAI's client, all of a step at once; no weights are sent to the server. That is the bound of a trainer
of agents that call a model over HTTP. `--json` prints the median seconds and the CPU seconds per step.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import cpu_seconds, make_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylight.quickstart.additions import additions, is_right, question

MODEL = Path(__file__).parents[2] / "raylight" / "quickstart" / "model"
TASKS, GROUP = 16, 8  # 128 rollouts a step
ANSWER_TOKENS = 6  # two more than a correct answer needs
WARM_UP = 3
"""First steps, which are left out of the figures."""
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
    """Take one optimizer step on the clipped loss, averaged over all tokens. `old_logps` defaults to this
    pass's."""
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


async def serve() -> None:
    """Serve the engine on a free port, print the port, and end with the standard input."""
    import uvicorn

    from raylight.engines.transformers.engine import TransformersEngine

    torch.set_num_threads(1)
    engine = TransformersEngine(str(MODEL), "policy", slots=TASKS * GROUP)
    config = uvicorn.Config(await engine.app(), port=0, log_level="warning", access_log=False, lifespan="off")
    server, socket = uvicorn.Server(config), config.bind_socket()
    print(socket.getsockname()[1], flush=True)

    def end() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end, daemon=True).start()
    await server.serve(sockets=[socket])
    engine.close()


@contextmanager
def sampled_over_http(tokenizer):
    """Yield a function that answers tasks through a server in another process."""
    from openai import AsyncOpenAI, DefaultAioHttpClient

    async def answer(task) -> str:
        reply = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": question(task)}],
            temperature=1.0,
            max_tokens=ANSWER_TOKENS,
        )
        return (reply.choices[0].message.content or "") + tokenizer.eos_token

    async def answer_all(tasks) -> list[str]:
        return await asyncio.gather(*map(answer, tasks))

    def rollouts(tasks):
        rows = [ids[:ANSWER_TOKENS] for ids in tokenizer(runner.run(answer_all(tasks)))["input_ids"]]
        padding = [tokenizer.pad_token_id] * ANSWER_TOKENS
        tokens = torch.tensor([(row + padding)[:ANSWER_TOKENS] for row in rows])
        mask = torch.tensor([[i < len(row) for i in range(ANSWER_TOKENS)] for row in rows])
        return tokens, None, mask

    pipe = subprocess.PIPE
    command = [sys.executable, __file__, "--serve"]
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server,
        asyncio.Runner() as runner,
    ):
        runner.get_loop()
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        client = AsyncOpenAI(base_url=url, api_key="none", http_client=DefaultAioHttpClient())
        yield rollouts
        runner.run(client.close())
        server.communicate()


@contextmanager
def sampled_here(model, tokenizer):
    """Yield a function that answers tasks in this process."""
    yield lambda tasks: sample(model, encode(tokenizer, tasks))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", action="store_true", help="print only the figures of a step")
    parser.add_argument("--http", action="store_true", help="sample through a server")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return asyncio.run(serve())
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=0.01)
    train, val = additions(args.seed)
    val = val * VALIDATION_SAMPLES

    def validate(step: int) -> None:
        tokens, _, _ = sample(model, encode(tokenizer, val))
        print(f"step {step:3d}  validation accuracy {score(tokenizer, val, tokens).mean():.3f}", flush=True)

    if not args.json:
        validate(0)
    seconds = {"rollout": [], "update": []}
    with sampled_over_http(tokenizer) if args.http else sampled_here(model, tokenizer) as rollouts:
        for step in range(args.steps):
            if step == WARM_UP:
                used = cpu_seconds()
            started = time.perf_counter()
            tasks = [train[(step * TASKS + i) % len(train)] for i in range(TASKS) for _ in range(GROUP)]
            tokens, logps, mask = rollouts(tasks)
            rewards = score(tokenizer, tasks, tokens)
            sampled = time.perf_counter()
            update(model, optimizer, encode(tokenizer, tasks), tokens, logps, mask, rewards)
            seconds["rollout"].append(sampled - started)
            seconds["update"].append(time.perf_counter() - sampled)
            times = "  ".join(f"{stage} {values[-1]:.3f} s" for stage, values in seconds.items())
            print(f"step {step + 1:3d}  mean reward {rewards.mean():.3f}  {times}", flush=True)
            if (step + 1) % VALIDATE_EVERY == 0 and not args.json:
                validate(step + 1)
        cpu = (cpu_seconds() - used) / (args.steps - WARM_UP)
    stages = {stage: statistics.median(values[WARM_UP:]) for stage, values in seconds.items()}
    if args.json:
        return print(json.dumps({"step": sum(stages.values()), "stages": stages, "cpu": {"all": cpu}}))
    print("median seconds per step: " + "  ".join(f"{stage} {value:.3f}" for stage, value in stages.items()))


if __name__ == "__main__":
    main()
