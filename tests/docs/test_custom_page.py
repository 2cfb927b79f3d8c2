"""The estimator and the loss that docs/algorithms/custom.md shows run and update the policy."""

from typing import Any

import cloudpickle
import pytest
import torch
from answer_rows import answer_logprobs, answer_row
from docs_snippets import DOCS, snippet
from page_tables import code, tables
from process_groups import only_rank
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.advantages import ADVANTAGES
from raylight.experience.settings.losses import LOSSES
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL

PAGE = DOCS / "algorithms" / "custom.md"
PAIRS = [(12, 34), (12, 34), (12, 34), (51, 27), (51, 27), (51, 27)]
ANSWERS = ["46", "47", "36", "78", "88", "7"]
REWARDS = [1.0, 0.2, 0.0, 1.0, 0.2, 0.2]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    names = snippet(PAGE, "custom").run()
    return snippet(PAGE, "class").run(names)


@only_rank()
@torch.no_grad()
def test_the_policy_favours_answers_that_win_duels(names: dict[str, Any]) -> None:
    from raylight.learner.updates.policy import Policy

    tokenizer, model = (
        AutoTokenizer.from_pretrained(STARTER_MODEL),
        AutoModelForCausalLM.from_pretrained(STARTER_MODEL),
    )
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{a}+{b}=<|im_end|>\n<|im_start|>assistant\n") for a, b in PAIRS
    ]
    answers = [tokenizer.encode(text + "<|im_end|>") for text in ANSWERS]
    before = [answer_logprobs(model, *pair) for pair in zip(prompts, answers, strict=True)]
    rows = [
        answer_row(str(i), prompt, answer, known.tolist())
        for i, (prompt, answer, known) in enumerate(zip(prompts, answers, before, strict=True))
    ]
    settings = PolicySettings(
        **{field: getattr(names["algorithm"], field) for field in PolicySettings.model_fields} | {"lr": 5e-5}
    )
    pickled = cloudpickle.loads(cloudpickle.dumps(settings))  # as a learner in another process receives it
    with torch.enable_grad():
        policy = Policy(STARTER_MODEL, names["rl"].LearnerConfig(), pickled, total_steps=1)
        metrics = policy.update(TrainBatch(REWARDS, list("aaabbb"), rows, list(range(6))))
    # duel scores are 1, 0, -1 in the first group and 1, -1/2, -1/2 in the second; GRPO's advantages differ
    tokens = [len(answer) for answer in answers]
    wins = [1.0, 0.0, -1.0, 1.0, -0.5, -0.5]
    mean = sum(abs(w) * n for w, n in zip(wins, tokens, strict=True)) / sum(tokens)
    assert metrics["learner/advantage_abs_mean"] == pytest.approx(mean, abs=1e-5)
    assert metrics["learner/grad_norm"] > 0
    weights = policy.export()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    after = [answer_logprobs(model, *pair) for pair in zip(prompts, answers, strict=True)]
    gained = [float((b - a).sum()) for a, b in zip(before, after, strict=True)]
    assert gained[0] > gained[2], gained
    assert gained[3] > max(gained[4:]), gained


def test_the_loss_has_the_optimum_that_the_page_states(names: dict[str, Any]) -> None:
    low = names["algorithm"].loss.clip_ratio_low
    ratio = torch.tensor([1.0, 1 + low, 1 + 2 * low]).log().requires_grad_()
    loss = names["pulled_back"](ratio, torch.zeros(3), torch.ones(3), names["algorithm"].loss).sum()
    (gradient,) = torch.autograd.grad(loss, ratio)
    assert gradient.sign().tolist()[::2] == [-1.0, 1.0]
    assert float(gradient[1]) == pytest.approx(0, abs=1e-5)


def test_a_class_names_the_combination(names: dict[str, Any]) -> None:
    algorithm = names["Duels"](model="m")
    assert isinstance(algorithm, PolicyAlgorithm)
    assert (algorithm.user_estimator, algorithm.user_loss, algorithm.group_size) == (
        names["duels"],
        names["pulled_back"],
        4,
    )


@pytest.mark.parametrize(
    ("title", "arguments"),
    [("estimator parameter", ADVANTAGES.arguments), ("loss parameter", LOSSES.arguments)],
)
def test_all_parameters_are_documented(title: str, arguments: tuple[str, ...]) -> None:
    (table,) = (table for table in tables(PAGE) if table.header[0] == title)
    assert {code(word) for row in table.rows for word in row[0].split(", ")} == {*arguments}
