"""Short run of the quickstart's agent: python resumed_run.py OUTPUT_DIR STEPS LEARNERS RESUME KIND

KIND: full (all weights), lora (an adapter), images (a model that reads them, in the folder `model`), or
asynchronous (all weights, a curriculum, attempts that fail, and groups that are late).
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question
from raylight.quickstart.agent import SAMPLING, adder

FOLDER = "RESUMED_RUN_FOLDER"
"""Environment variable with the output directory, in which the failing agent keeps its log."""
LATE = {2: 3, 9: 7}
"""Groups that end when a step is logged, with the step."""


def is_logged(folder: Path, step: int) -> bool:
    """Return True once a step is logged; none is before 1."""
    file = folder / "metrics.jsonl"
    return step == 0 or (file.exists() and f'"step": {step},' in file.read_text())


@rl.rollout
async def failing_adder(task: dict, llm: rl.LLM, rollout: rl.AttemptedRollout) -> float:
    """The quickstart's agent. Every fifth sum fails its first attempt, every seventh one always, and two
    groups end late.

    It logs the tokens of each attempt, as the response to its call counts them, and the reward.
    """
    reply = await llm.client().chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": question(task)}],
        **SAMPLING | llm.sampling_parameters,
    )
    right = is_right(task, reply.choices[0].message.content or "")
    fails = task["a"] % 5 == 0 and rollout.attempt.sequence_id == 1
    fails |= task["a"] % 7 == 0
    reward = None if fails else float(right)
    line = [rollout.attempt.attempt_id, reply.usage.completion_tokens, reward]
    folder = Path(os.environ[FOLDER])
    logged_after = LATE.get(int(rollout.rollout_id.split("-")[-2]), 0)
    while not is_logged(folder, logged_after):  # noqa: ASYNC110 - another process writes the file
        await asyncio.sleep(0.1)
    with (folder / "agent.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")  # one write, of a line that is short
    if fails:
        raise ValueError("this attempt fails")
    return float(right)


def asynchronous_run(folder: str, steps: int, learners: int) -> tuple[rl.Trainer, Any, Any]:
    """Return a trainer, the agent and its tasks."""
    train, _ = additions(0)
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=4,
        tasks_per_step=4,
        n_steps=steps,
        lr=1e-4,
        max_staleness=1,
        stale="drop",
        val_every=None,
        best=None,
        rollout={"max_attempts": 2, "retry_condition": ["failed"]},
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_learners=learners,
        n_runners=1,
        output_dir=folder,
        address="local",
        engine={"max_model_len": 64},
        checkpoint={"every": 3, "keep": 4},
    )
    return trainer, failing_adder, rl.tasks.Curriculum(train[:40])


@rl.rollout
async def looker(task: dict, llm: rl.LLM) -> float:
    """Send two images in two calls; return the share of small letters in the answers."""
    parts, text = [], ""
    for url in task["images"]:
        parts.append({"type": "image_url", "image_url": {"url": url}})
        reply = await llm.client().chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": parts}], max_tokens=6
        )
        text += reply.choices[0].message.content or ""
    return sum(letter.islower() for letter in text) / 12


def images_run(folder: str, steps: int) -> tuple[rl.Trainer, Any, Any]:
    """Return a trainer, an agent that sends images, and its tasks."""
    urls = json.loads(Path(folder, "images.json").read_text())
    algorithm = rl.GRPO(
        model=f"{folder}/model", group_size=4, tasks_per_step=2, n_steps=steps, lr=1e-2, val_every=None
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=1,
        output_dir=folder,
        address="local",
        engine={"kind": "transformers", "max_model_len": 256},
        checkpoint={"every": 2},
    )
    return trainer, looker, [{"images": [one, other]} for one, other in itertools.permutations(urls, 2)]


def main(folder: str, steps: int, learners: int, resume: str, kind: str) -> None:
    resumes = "auto" if resume == "auto" else resume == "yes"
    if kind in ("asynchronous", "images"):
        trainer, agent, tasks = (
            images_run(folder, steps) if kind == "images" else asynchronous_run(folder, steps, learners)
        )
        trainer.fit(agent, tasks, resume=resumes)
        return
    train, val = additions(0)
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        lr=2e-4,
        kl_coef=0.01,
        group_size=4,
        tasks_per_step=8,
        n_steps=steps,
        val_every=4,
        best=None,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_learners=learners,
        n_runners=1,
        output_dir=folder,
        address="local",
        engine={"max_model_len": 64},
        checkpoint={"every": 3, "keep": 2},
        learner={"lora": {"rank": 8}} if kind == "lora" else {},
    )
    trainer.fit(adder, train[:40], val[:8], resume=resumes)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
