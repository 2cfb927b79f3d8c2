"""Search by GEPA with an agent that needs no model: python gepa_run.py OUTPUT_DIR REFLECTION_URL"""

import sys

from openai import AsyncOpenAI

import raylight as rl

WORDS = ("politely", "briefly", "in words")


@rl.rollout
def obedient(task: int, prompt_template: rl.PromptTemplate) -> float:
    """Reward the words that the prompt has."""
    missing = [word for word in WORDS if word not in prompt_template.template]
    rl.emit_message(f"missing: {missing}")
    return 1.0 - len(missing) / len(WORDS)


def main(folder: str, url: str) -> None:
    client = AsyncOpenAI(base_url=url, api_key="key", timeout=60)
    trainer = rl.Trainer(
        algorithm=rl.GEPA(client, max_rollouts=40, minibatch_size=2),
        n_runners=1,
        output_dir=folder,
        initial_resources={"prompt_template": rl.PromptTemplate(template="Add {a}.")},
        progress=False,
    )
    trainer.fit(obedient, [1, 2, 3, 4], [5, 6, 7], resume="auto")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
