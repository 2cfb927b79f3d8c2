"""Training of an adapter that vLLM serves on a CPU, as a separate program."""

import sys

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder

if __name__ == "__main__":
    train, val = additions(0)
    algorithm = rl.GRPO(
        model=STARTER_MODEL, n_steps=5, tasks_per_step=16, group_size=8, lr=2e-3, val_every=0, best=None
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine={"kind": "vllm", "max_model_len": 256},
        learner={"lora": {"rank": 12, "alpha": 24}},
        n_runners=1,
        output_dir=sys.argv[1],
        progress=False,
    )
    trainer.fit(adder, train, val[:32])
