"""Training where a learner and vLLM share a GPU that Ray only counts, as a separate program.

Roles are placed as on a machine with one GPU; vLLM's CPU build and the learner compute on the CPU.
"""

import json
import sys

import ray

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder

if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    ray.init(address="local", num_cpus=2, num_gpus=1, log_to_driver=False)
    trainer = rl.Trainer(
        algorithm=rl.GRPO(
            model=STARTER_MODEL, n_steps=3, tasks_per_step=8, group_size=8, lr=2e-4, **options["algorithm"]
        ),
        engine={
            "kind": "vllm",
            "num_gpus": 0.4,
            "max_model_len": 256,
            "dtype": "float32",
            **options["engine"],
        },
        learner={"num_gpus": 0.6, "dtype": "float32", "packed": True, **options["learner"]},
        n_runners=1,
        output_dir=sys.argv[1],
    )
    trainer.fit(adder, additions(0)[0])
    print(json.dumps(ray.cluster_resources().get("GPU")))
