"""Training of two adapters, with a third fixed one, that vLLM serves on a CPU, as a separate program:
python several_models_training.py OUTPUT_DIR STEPS
"""

import sys

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question


async def answer(llm: rl.LLM, task: dict) -> float:
    reply = await llm.client().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": question(task)}], max_tokens=6
    )
    return float(is_right(task, reply.choices[0].message.content or ""))


@rl.rollout
async def all_answer(task: dict, planner: rl.LLM, coder: rl.LLM, judge: rl.LLM) -> float:
    """Return the share of right answers of the trained models."""
    await answer(judge, task)
    return (await answer(planner, task) + await answer(coder, task)) / 2


if __name__ == "__main__":
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        models={"planner": {"lr": 2e-3}, "coder": {"lr": 1e-3}, "judge": {"trained": False}},
        n_steps=int(sys.argv[2]),
        tasks_per_step=8,
        group_size=8,
        val_every=None,
        best=None,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine={"kind": "vllm", "max_model_len": 128},
        learner={"lora": {"rank": 8}},
        n_runners=1,
        output_dir=sys.argv[1],
        checkpoint={"every": 1},
        progress=False,
    )
    trainer.fit(all_answer, additions(0)[0], resume="auto")
