"""A short run through the Trainer: reads its task as JSON from the command line, prints its metrics.

python run_program.py '{"model": FOLDER, "device": "cuda", "folder": ..., "engine": {...}, "learner": {...}}'
"""

import json
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

import raylight as rl

STEPS = 3


@rl.rollout
async def talker(task: int, llm: rl.LLM) -> float:
    """Let the model write, and reward the parity of what it wrote: any signal will do."""
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": f"{task}+1="}],
            temperature=1.0,
            max_tokens=64,
        )
    return float(sum(map(ord, reply.choices[0].message.content or "")) % 2)


def main(task: dict[str, Any]) -> dict[str, Any]:
    algorithm = rl.GRPO(
        model=task["model"], n_steps=STEPS, tasks_per_step=4, lr=1e-5, max_steps_without_signal=STEPS + 1
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine={"start_timeout_s": 600} | task["engine"],
        learner={"start_timeout_s": 600} | task["learner"],
        n_runners=1,
        output_dir=task["folder"],
        address="local",
        progress=False,
        seed=0,
    )
    summary = trainer.fit(talker, list(range(64)))
    rows = [json.loads(line) for line in (Path(task["folder"]) / "metrics.jsonl").read_text().splitlines()]
    return {"summary": summary, "rows": rows}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
