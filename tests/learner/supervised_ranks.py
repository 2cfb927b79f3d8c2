"""One rank that learns answers: two updates of supervised fine-tuning, and two of preferences."""

import numpy as np
import torch
from ranks import ANSWERS, PROBE, PROMPTS

from raylight.config import LearnerConfig
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import shard_batch
from raylight.experience.batches.supervised_batches import Example, LearnedRow, build_supervised_batch
from raylight.experience.settings.supervised_settings import (
    PreferenceSettings,
    RankingSettings,
    SupervisedSettings,
)
from raylight.quickstart import STARTER_MODEL

SETTINGS = {
    "sft": SupervisedSettings(lr=1e-4),
    "dpo": PreferenceSettings(lr=1e-4, beta=0.5, loss_type="sigmoid"),
    "reward": RankingSettings(lr=1e-4, center_rewards_coefficient=0.01),
}


def row(prompt: list[int], answer: list[int]) -> LearnedRow:
    mask = np.array([0] * len(prompt) + [1] * len(answer), np.int8)
    return LearnedRow(np.array(prompt + answer, np.int32), mask)


def conversations() -> list[Example]:
    """Seven conversations, the last of them of two rows."""
    rows = [row(prompt, answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    return [Example(str(i), ((each,),)) for i, each in enumerate(rows[:6])] + [Example("6", ((*rows[6:],),))]


def pairs() -> list[Example]:
    """Four pairs: each prompt with its own answer, which is chosen, and another one."""
    return [
        Example(str(i), ((row(PROMPTS[i], ANSWERS[i]),), (row(PROMPTS[i], ANSWERS[i + 1][::-1]),)))
        for i in range(4)
    ]


def scored_pairs() -> list[Example]:
    """The pairs for a reward model, with margins."""
    return [
        Example(
            example.source,
            tuple((LearnedRow.scored(answer[0].tokens.tolist()),) for answer in example.answers),
            margin,
        )
        for example, margin in zip(pairs(), (0.0, 0.5, 0.0, 1.0), strict=True)
    ]


def batch(kind: str) -> TrainBatch:
    examples = {"sft": conversations, "dpo": pairs, "reward": scored_pairs}
    return build_supervised_batch(examples[kind]())


def make_model(kind: str, learner=None, **settings):
    from raylight.learner.updates.supervised import SupervisedModel

    known = SETTINGS[kind].model_copy(update=settings)
    torch.manual_seed(0)  # the head of a reward model
    return SupervisedModel(STARTER_MODEL, LearnerConfig(**learner or {}), known, total_steps=4)


def shard_of(model, content: TrainBatch):
    ranks, rank = model.engine.get_data_parallel_size(), model.engine.get_data_parallel_rank()
    return list(shard_batch(content, model._settings, ranks))[rank]


def main(rank: int, ranks: int) -> dict[str, float]:
    """Return the metrics and the log-probs after the updates."""
    found = {}
    for kind in SETTINGS:
        model = make_model(kind, {"n": ranks, "max_tokens_per_micro_batch": 64})
        for step in (1, 2):
            metrics = model.update_shard(shard_of(model, batch(kind)))
            found |= {f"{kind}/{step}/{name}": value for name, value in metrics.items()}
        totals = model.evaluate_shard(shard_of(model, batch(kind)))
        found |= {f"{kind}/val/{name}": value for name, value in totals.items()}
        if kind != "reward":
            found |= {f"{kind}/probe/{i}": value for i, value in enumerate(model.logprobs(PROBE))}
    return found
