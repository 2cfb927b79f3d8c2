"""Serve a model by two vLLM replicas; print the first answers of each to the same prompt, as JSON."""

import asyncio
import json
import sys
from pathlib import Path

import ray
from served_replicas import served

ANSWERS = 4


async def first_answers(folder: Path) -> dict[str, list[str]]:
    answers: dict[str, list[str]] = {}
    async with served(folder, "vllm", replicas=2, max_model_len=256, max_concurrent=4) as model:
        while len(answers) < 2 or min(map(len, answers.values())) < ANSWERS:
            for rollout in await model.rollouts(8):
                raw = await model.client(rollout).chat.completions.with_raw_response.create(
                    model="policy",
                    messages=[{"role": "user", "content": "12+30="}],
                    temperature=2.0,
                    max_tokens=16,
                    extra_body={"ignore_eos": True},
                )
                text = raw.parse().choices[0].message.content or ""
                answers.setdefault(raw.headers["x-raylight-replica"], []).append(text)
    return answers


if __name__ == "__main__":
    with ray.init(log_to_driver=False):
        print(json.dumps(asyncio.run(first_answers(Path(sys.argv[1])))))
