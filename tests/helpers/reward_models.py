"""Small reward models: the quickstart's model with a scalar head."""

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import question


def build_reward_model(folder: Path, seed: int = 0, **config: Any) -> str:
    """Save a reward model with a random head; return its folder.

    Args:
        config: changes to the model's configuration.
    """
    torch.manual_seed(seed)
    shutil.copytree(STARTER_MODEL, folder, dirs_exist_ok=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        STARTER_MODEL, **{"num_labels": 1} | config, dtype=torch.float32
    )
    with torch.no_grad():
        model.score.weight.normal_(std=0.1)
    model.save_pretrained(folder)
    return str(folder)


def plain_scores(path: str, conversations: list[list[dict[str, Any]]]) -> list[float]:
    """Return the scores by plain transformers, one conversation at a time."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    scores = []
    for messages in conversations:
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            scores.append(float(model(**ids).logits[0, 0]))
    return scores


def digit_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs of rendered conversations: a number with a 7 as the answer to a sum, and one without."""
    tokenizer, draws = AutoTokenizer.from_pretrained(STARTER_MODEL), random.Random(seed)

    def shown(number: str) -> str:
        asked = question({"a": draws.randint(10, 99), "b": draws.randint(10, 99)})
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": number}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    numbers = [str(draws.randint(10, 199)) for _ in range(count)]
    others = [number.replace("7", draws.choice("0123456899")) for number in numbers]
    better = [
        number if "7" in number else number[:at] + "7" + number[at + 1 :]
        for number in numbers
        for at in [draws.randrange(len(number))]
    ]
    return [(shown(number), shown(other)) for number, other in zip(better, others, strict=True)]


def teach_digit(path: str, steps: int, pairs: int = 64) -> float:
    """Train a reward model to prefer answers with a 7 (Bradley-Terry), as TRL's RewardTrainer does.

    Returns the accuracy on pairs that it was not trained on.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def margins(found: list[tuple[str, str]]) -> torch.Tensor:
        texts = [text for side in zip(*found, strict=True) for text in side]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        better, worse = model(**batch).logits[:, 0].chunk(2)
        return better - worse

    for step in range(steps):
        optimizer.zero_grad()
        (-torch.nn.functional.logsigmoid(margins(digit_pairs(pairs, step))).mean()).backward()
        optimizer.step()
    model.save_pretrained(path)
    with torch.no_grad():
        return float((margins(digit_pairs(256, steps)) > 0).float().mean())
