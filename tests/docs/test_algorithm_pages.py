"""The algorithm pages match the code: settings with defaults, advantages, and loss gradients per token."""

from collections import Counter
from typing import Any

import pytest
import torch
from docs_snippets import DOCS
from flat_settings import flat_settings
from page_tables import Table, code, tables

from raylight import algorithms
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.experience.settings.policy_settings import CriticSettings, PolicySettings

PAGES = sorted((DOCS / "algorithms").glob("*.md"))
INDEX = DOCS / "algorithms" / "README.md"
FAMILY = {
    name: getattr(algorithms, name)
    for name in sorted(set(algorithms.__all__) - {"VERL", "MiniGRPO", "algo"})  # with separate pages
    if issubclass(getattr(algorithms, name), PolicyAlgorithm)
}
SUPERVISED = {name: getattr(algorithms, name) for name in ("SFT", "DPO", "RewardModel")}
CLASSES = FAMILY | SUPERVISED | {"CriticSettings": CriticSettings}
UNSEEN = object()
REQUIRED: dict[str, dict[str, Any]] = {
    "GDPO": {"reward_weights": {"right": 1.0}},
    "OPD": {"teacher": "t"},
}
"""Settings that an algorithm cannot do without, besides the model."""


def class_of(table: Table) -> str:
    """Return the name of the class whose settings a table shows; empty for other tables."""
    name = table.header[0].strip("`").rpartition(".")[2]
    return name if name in CLASSES and table.header[1] == "default" else ""


SETTINGS = [table for page in PAGES for table in tables(page) if class_of(table)]


def defaults(cls: Any) -> dict[str, Any]:
    required = dict.fromkeys(REQUIRED.get(cls.__name__, {}))
    return required | flat_settings(cls)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_algorithm_has_one_table_and_a_place_in_the_index() -> None:
    assert Counter(map(class_of, SETTINGS)) == Counter([*CLASSES])
    index = INDEX.read_text()
    for page in PAGES:
        assert page == INDEX or f"]({page.name})" in index, f"{INDEX} does not link {page.name}"


@pytest.mark.parametrize("table", SETTINGS, ids=class_of)
def test_defaults_are_those_of_the_code(table: Table) -> None:
    name = class_of(table)
    cls, real = CLASSES[name], defaults(CLASSES[name])
    words = {setting: "required" for setting, field in cls.model_fields.items() if field.is_required()}
    words["critic"] = "CriticSettings()"
    shown = {code(row[0]): code(row[1]) for row in table.rows}
    assert shown == {setting: words.get(setting, repr(real[setting])) for setting in shown}


@pytest.mark.parametrize("table", SETTINGS, ids=class_of)
def test_changed_defaults_are_shown(table: Table) -> None:
    name = class_of(table)
    base = SupervisedAlgorithm if name in SUPERVISED else PolicyAlgorithm
    general = defaults(base) if name != "CriticSettings" else {}
    changed = {
        setting for setting, value in defaults(CLASSES[name]).items() if general.get(setting, UNSEEN) != value
    }
    assert changed - {"model"} <= {code(row[0]) for row in table.rows} | ({"model"} - changed)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(table.page == page for table in SETTINGS) and page != INDEX],
    ids=lambda p: p.stem,
)
def test_a_page_has_formula_settings_advice_and_source(page: Any) -> None:
    text = page.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Formula",
        "## Settings",
        "## When to use it",
        "## Source",
    ]
    assert "https://arxiv.org/abs/" in text.partition("## Source")[2]
    classes = [
        CLASSES[class_of(table)]
        for table in SETTINGS
        if table.page == page and class_of(table) in FAMILY | SUPERVISED
    ]
    for cls in classes:
        paper = (cls.__doc__ or "").partition("arxiv.org/abs/")[2][:10]
        assert len(paper) == 10, cls
        assert paper in text, f"{page} does not name the paper of {cls.__name__}, {paper}"


def policy_settings(name: str) -> PolicySettings:
    algorithm = FAMILY[name](model="m", **REQUIRED.get(name, {}))
    return PolicySettings(**{field: getattr(algorithm, field) for field in PolicySettings.model_fields})


def figures(title: str) -> dict[str, list[float]]:
    """The rows of the index's table whose header has this, by their first cell's code."""
    (table,) = (table for table in tables(INDEX) if title in table.header)
    return {row[0]: [float(cell) for cell in row[1:]] for row in table.rows}


def advantages(name: str, lengths: list[int], rewards: list[float]) -> list[float]:
    """Return the advantages of two groups of four one-row rollouts. A row must have a single value."""
    from raylight.experience.batches.batch import TrainBatch
    from raylight.experience.batches.shards import shard_batch
    from raylight.learner.losses.advantages import KlController, RolloutSequences, estimate
    from raylight.types import Trajectory

    rollouts = [
        Trajectory("r", [0] * (n + 1), [0] + [1] * n, [-0.5] * (n + 1), [-1] + [0] * n) for n in lengths
    ]
    settings = policy_settings(name)
    baselines = [0.0] * 4 + [1.0] * 4 if name == "ReMax" else None
    parts = [(reward,) for reward in rewards] if name == "GDPO" else None
    batch = TrainBatch(rewards, list("aaaabbbb"), rollouts, list(range(8)), baselines=baselines, parts=parts)
    (shard,) = shard_batch(batch, settings, 1)
    sequences = RolloutSequences(shard.outline)
    found = estimate(shard.outline, sequences, {}, settings, KlController(settings)).advantages
    of_rows = [row[:length] for row, length in zip(found, lengths, strict=True)]
    assert all(float(row.max() - row.min()) < 1e-5 for row in of_rows)
    return [float(row[0]) for row in of_rows]


def test_the_same_eight_rollouts() -> None:
    shown = figures("task 1")
    lengths, rewards = [int(n) for n in shown.pop("sampled tokens")], shown.pop("reward")
    shared = shown.pop("`GRPO` and its subclasses")
    subclasses = [
        name for name, cls in FAMILY.items() if issubclass(cls, algorithms.GRPO) and name != "DrGRPO"
    ]
    for name in subclasses:
        assert advantages(name, lengths, rewards) == pytest.approx(shared, abs=0.0051), name
    for name, values in shown.items():
        assert advantages(code(name), lengths, rewards) == pytest.approx(values, abs=0.0051), name
    assert {*subclasses, *map(code, shown)} == {*FAMILY} - {
        "PolicyAlgorithm",
        "PPO",
        "OTB",
        "OPD",
        "GiGPO",
    }


def pushes(name: str, advantage: float, ratios: list[float]) -> list[float]:
    """Return the negated loss gradient by a token's log-prob at each ratio, for a row of one token."""
    from raylight.learner import verl_api
    from raylight.learner.losses.policy_loss import actor_config

    settings = policy_settings(name)
    config = actor_config(settings)
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=1, global_batch_size=1, loss_scale_factor=settings.loss_scale_factor
    )
    found = []
    for ratio in ratios:
        log_prob = torch.tensor([[ratio]]).log().requires_grad_()
        loss, _ = verl_api.POLICY_LOSS_REGISTRY[settings.loss.name](
            old_log_prob=torch.zeros(1, 1),
            log_prob=log_prob,
            advantages=torch.tensor([[advantage]]),
            response_mask=torch.ones(1, 1),
            loss_agg_mode=settings.loss_agg_mode,
            config=config,
        )
        found.append(-float(torch.autograd.grad(loss, log_prob)[0]))
    return found


def test_how_far_one_token_is_pushed() -> None:
    shown = figures("A = 1, p = 0.5")
    (table,) = (table for table in tables(INDEX) if "A = 1, p = 0.5" in table.header)
    ratios = [float(cell.rpartition("=")[2]) for cell in table.header[1:]]
    assert ratios[:6] == ratios[6:]
    for name, values in shown.items():
        found = pushes(code(name), 1.0, ratios[:6]) + pushes(code(name), -1.0, ratios[6:])
        assert found == pytest.approx(values, abs=0.0051), name
    losses = {policy_settings(name).loss.name for name in FAMILY}
    shown_losses = {policy_settings(code(name)).loss.name for name in shown}
    assert losses - shown_losses == {"clip_cov", "kl_cov"}  # which need all tokens of a micro-batch


def test_how_losses_are_averaged() -> None:
    from typing import get_args

    from raylight.experience.settings.policy_settings import LossAggregation

    (table,) = (table for table in tables(INDEX) if table.header[0] == "`loss_agg_mode`")
    assert {code(row[0]) for row in table.rows} == {*get_args(LossAggregation)}
