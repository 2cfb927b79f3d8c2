"""Training of a schema-bound agent through vLLM on a CPU, as a separate program."""

import sys

from schema_agent import questions, schema_agent

import raylight as rl
from raylight.quickstart import STARTER_MODEL

if __name__ == "__main__":
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        n_steps=10,
        tasks_per_step=16,
        lr=5e-4,
        mini_batches=2,
        val_every=0,
        val_samples=4,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine={"kind": "vllm"},
        n_runners=1,
        output_dir=sys.argv[1],
        progress=False,
    )
    trainer.fit(schema_agent, questions(128), val_dataset=questions(16))
