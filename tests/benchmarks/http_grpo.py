"""Bare GRPO loop whose rollouts call a server: the bound of a trainer of agents that call a model over HTTP.

    python tests/benchmarks/http_grpo.py [--steps N]

As bare_grpo.py, but a process of its own serves the transformers engine, and each rollout is a call by
OpenAI's client, all of a step at once. There is no Ray, capture, store or gateway, and no weights are sent to
the server. Prints the median seconds and the CPU seconds per step as JSON.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from bare_grpo import ANSWER_TOKENS, GROUP, MODEL, TASKS, encode, update
from loop_runs import WARM_UP, cpu_seconds

from raylight.quickstart.additions import additions, is_right, question


def serve() -> None:
    """Serve the engine on a free port, print the port, and end with the standard input."""
    import threading

    import uvicorn

    from raylight.engines.transformers.engine import TransformersEngine

    async def run() -> None:
        torch.set_num_threads(1)
        engine = TransformersEngine(str(MODEL), "policy", slots=TASKS * GROUP)
        config = uvicorn.Config(
            await engine.app(), port=0, log_level="warning", access_log=False, lifespan="off"
        )
        server, socket = uvicorn.Server(config), config.bind_socket()
        print(socket.getsockname()[1], flush=True)

        def end() -> None:
            sys.stdin.read()
            server.should_exit = True

        threading.Thread(target=end, daemon=True).start()
        await server.serve(sockets=[socket])
        engine.close()

    asyncio.run(run())


async def answers(client: Any, tasks: list[Any]) -> list[str]:
    async def answer(task: Any) -> str:
        reply = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": question(task)}],
            temperature=1.0,
            max_tokens=ANSWER_TOKENS,
        )
        return reply.choices[0].message.content or ""

    return await asyncio.gather(*(answer(task) for task in tasks))


def encode_answers(tokenizer: Any, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of shape (answers, ANSWER_TOKENS), and a mask of those up to the end-of-turn token."""
    rows = [
        ids[:ANSWER_TOKENS] for ids in tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"]
    ]
    tokens = torch.tensor([row + [tokenizer.pad_token_id] * (ANSWER_TOKENS - len(row)) for row in rows])
    mask = torch.tensor([[i < len(row) for i in range(ANSWER_TOKENS)] for row in rows])
    return tokens, mask


async def train(port: int, steps: int) -> dict[str, Any]:
    from openai import AsyncOpenAI, DefaultAioHttpClient
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01)
    train_tasks, _ = additions(0)
    seconds: dict[str, list[float]] = {"rollout": [], "update": []}
    async with AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", http_client=DefaultAioHttpClient()
    ) as client:
        for step in range(steps):
            if step == WARM_UP:
                cpu = cpu_seconds().total()
            started = time.perf_counter()
            tasks = [
                train_tasks[(step * TASKS + i) % len(train_tasks)] for i in range(TASKS) for _ in range(GROUP)
            ]
            texts = await answers(client, tasks)
            sampled = time.perf_counter()
            rewards = torch.tensor(
                [float(is_right(task, text)) for task, text in zip(tasks, texts, strict=True)]
            )
            prompts, (tokens, mask) = encode(tokenizer, tasks), encode_answers(tokenizer, texts)
            update(model, optimizer, prompts, tokens, None, mask, rewards)
            seconds["rollout"].append(sampled - started)
            seconds["update"].append(time.perf_counter() - sampled)
    stages = {stage: statistics.median(values[WARM_UP:]) for stage, values in seconds.items()}
    return {
        "step": sum(stages.values()),
        "stages": stages,
        "cpu": {"all": (cpu_seconds().total() - cpu) / (steps - WARM_UP)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=pipe, stdout=pipe, text=True
    ) as server:
        assert server.stdout is not None
        result = asyncio.run(train(int(server.stdout.readline()), args.steps))
        server.communicate()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
