"""Short run of the quickstart's agent: python resumed_run.py OUTPUT_DIR STEPS LEARNERS RESUME TRAINED"""

import sys

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder


def main(folder: str, steps: int, learners: int, resume: str, trained: str) -> None:
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
        learner={"lora": {"rank": 8}} if trained == "lora" else {},
    )
    trainer.fit(adder, train[:40], val[:8], resume="auto" if resume == "auto" else resume == "yes")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
