"""Scores of a reward model: equal to plain transformers', for single and padded rows; and what is refused."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_models import build_reward_model, plain_scores
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from raylight.engines.reward_model.engine import Classifier, padded_batches
from raylight.engines.reward_model.scorer import ConversationScorer
from raylight.errors import EngineStartError, RewardModelError
from raylight.quickstart import STARTER_MODEL
from raylight.rewards.scoring_model import RewardModelInput
from raylight.trainer.cluster_fit.scoring_models import check_reward_model

ASKED = {"role": "user", "content": "What is 2+3?"}
CONVERSATIONS = [
    [ASKED, {"role": "assistant", "content": answer}]
    for answer in ("5", "Five, and that is all.", "", "It is " + "very " * 40 + "hard.", "6", "4<|im_end|>")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[float]:
    return plain_scores(model, CONVERSATIONS)


class DirectEngine:
    """An engine without Serve, around a classifier or with given scores."""

    def __init__(self, classifier: Classifier | None = None, limit: int = 512, scores: Sequence[float] = ()):
        self.tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
        self.max_model_len: int | None = limit
        self._classifier, self._scores = classifier, scores
        self.rows: list[list[int]] = []

    async def classify(self, rows: list[list[int]]) -> list[float]:
        self.rows += rows
        return self._classifier.scores(rows) if self._classifier else list(self._scores)[: len(rows)]


@pytest.mark.parametrize("tokens", [4096, 200, 1])
def test_scores_are_those_of_plain_transformers(model: str, expected: list[float], tokens: int) -> None:
    """Conversations are scored in one padded batch, in several, and one by one."""
    scorer = ConversationScorer(DirectEngine(Classifier(model, "float32", "cpu", tokens)))
    scored = asyncio.run(scorer.score([RewardModelInput(one) for one in CONVERSATIONS], truncate=False))
    assert [one.score for one in scored] == pytest.approx(expected, abs=1e-5)
    assert len({round(one.score or 0.0, 3) for one in scored}) == len(CONVERSATIONS)


@pytest.mark.slow
def test_a_model_that_trl_saved_reads_what_it_was_trained_on(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    pair = {"chosen": CONVERSATIONS[0], "rejected": CONVERSATIONS[4]}
    options = {"report_to": [], "use_cpu": True, "bf16": False, "max_steps": 2, "save_strategy": "no"}
    trainer = trl.RewardTrainer(
        STARTER_MODEL,
        args=trl.RewardConfig(output_dir=str(tmp_path / "run"), **options),
        train_dataset=Dataset.from_list([pair] * 4),
    )
    trainer.train()
    path = str(tmp_path / "saved")
    trainer.save_model(path)
    assert check_reward_model(path, None) == 2048
    engine = DirectEngine(Classifier(path, "float32", "cpu", 4096))
    engine.tokenizer = AutoTokenizer.from_pretrained(path)
    chats = [pair["chosen"], pair["rejected"]]
    scored = asyncio.run(ConversationScorer(engine).score(list(map(RewardModelInput, chats)), truncate=False))
    trained_on = trainer.train_dataset[0]
    assert engine.rows == [trained_on["chosen_ids"], trained_on["rejected_ids"]]
    with torch.inference_mode():
        ids = [torch.tensor([row]) for row in engine.rows]
        expected = [float(trainer.model.eval()(input_ids=row).logits[0, 0]) for row in ids]
    assert [one.score for one in scored] == pytest.approx(expected, abs=1e-5)


def test_a_model_without_a_padding_token_is_computed_row_by_row(
    model: str, expected: list[float], tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    scorer = ConversationScorer(DirectEngine(Classifier(str(tmp_path), "float32", "cpu", 4096)))
    scored = asyncio.run(scorer.score([RewardModelInput(one) for one in CONVERSATIONS], truncate=False))
    assert [one.score for one in scored] == pytest.approx(expected, abs=1e-5)


def test_a_head_without_weights_is_refused(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["score.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(EngineStartError, match=r"lacks 1 weights, such as score\.weight"):
        Classifier(str(tmp_path), "float32", "cpu", 64)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(0, 200))
def test_batches_have_all_rows_and_keep_the_limit(lengths: list[int], most: int) -> None:
    found = list(padded_batches(lengths, most))
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= most


@pytest.mark.parametrize("truncate", [True, False])
def test_a_long_conversation_is_dropped_or_its_end_is_scored(truncate: bool) -> None:
    engine = DirectEngine(limit=40, scores=[1.0, 2.0])
    long, short = RewardModelInput(CONVERSATIONS[3]), RewardModelInput(CONVERSATIONS[0])
    scored = asyncio.run(ConversationScorer(engine).score([long, short], truncate))
    assert [one.score for one in scored] == ([1.0, 2.0] if truncate else [None, 1.0])
    assert scored[0].length > 40 >= scored[1].length
    if truncate:
        whole = engine.tokenizer.apply_chat_template(long.messages, return_dict=False)
        assert engine.rows[0] == whole[-40:]


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error(score: float) -> None:
    with pytest.raises(RewardModelError, match=f"the score {score}; if its dtype is float16"):
        asyncio.run(
            ConversationScorer(DirectEngine(scores=[score])).score([RewardModelInput([ASKED])], False)
        )


def test_tools_and_calls_reach_the_template_as_it_expects_them() -> None:
    engine = DirectEngine(scores=[0.5])
    engine.tokenizer.chat_template = (
        "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.word }}{% endfor %};{% endfor %}"
    )
    function = {"name": "find", "arguments": json.dumps({"word": "Faust"})}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
    ]
    tools = [{"type": "function", "function": {"name": "find"}}]
    asyncio.run(ConversationScorer(engine).score([RewardModelInput(messages, tools)], False))
    assert engine.tokenizer.decode(engine.rows[0]) == "find;system:a\nb;assistant:Faust;"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"word": "Faust"}'


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        ("{{ raise_exception('no system') }}", "x", "rejects a conversation of 1 messages: .*no system"),
        ("{{ 1 / 0 }}", "x", "ZeroDivisionError"),
        ("", "x", "shows nothing"),
        (
            "x",
            [{"type": "image_url", "image_url": {"url": "u"}}],
            "has image_url, and a reward model reads text",
        ),
    ],
)
def test_what_cannot_be_rendered_is_an_error(template: str, content: Any, message: str) -> None:
    engine = DirectEngine()
    engine.tokenizer.chat_template = template or "{# nothing #}"
    with pytest.raises(RewardModelError, match=message):
        asyncio.run(
            ConversationScorer(engine).score(
                [RewardModelInput([{"role": "user", "content": content}])], False
            )
        )


def test_lower_precision_is_computed(model: str, expected: list[float]) -> None:
    scorer = ConversationScorer(DirectEngine(Classifier(model, "bfloat16", "cpu", 4096)))
    (scored,) = asyncio.run(scorer.score([RewardModelInput(CONVERSATIONS[0])], truncate=False))
    assert scored.score == pytest.approx(expected[0], rel=0.2)
    assert scored.score != pytest.approx(expected[0], abs=1e-6)
