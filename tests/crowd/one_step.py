"""One step of the quickstart, with time for a busy machine."""

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder

START_TIMEOUT_S = 1000.0


def main() -> None:
    train_tasks, val_tasks = additions(0)
    limit = {"start_timeout_s": START_TIMEOUT_S}
    trainer = rl.Trainer(
        algorithm=rl.GRPO(model=STARTER_MODEL, n_steps=1),
        output_dir="run",
        address="local",
        n_runners=1,
        engine=limit,
        learner=limit,
        runner=limit,
    )
    trainer.fit(adder, train_tasks, val_dataset=val_tasks[:16])


if __name__ == "__main__":
    main()
