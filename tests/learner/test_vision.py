"""Images in training: log-probs and gradients as plain transformers computes them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_ranks
from image_helpers import make_image, mirror
from rank_processes import run_ranks
from tiny_models import build_model
from tiny_vlms import FAMILIES, build_vlm
from transformers import AutoModelForImageTextToText
from vision_rows import ANSWERS, SQUARE, make_batch, plain_logprobs

import raylight.learner.model.vision
from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import shard_batch
from raylight.experience.settings.policy_settings import CriticSettings, PolicySettings
from raylight.images.model_inputs import PROCESSOR_FILES, ModelImages
from raylight.learner.model.model_check import check_model, read_shapes
from raylight.learner.model.weights import save_model
from raylight.learner.tokens.rows import build_rows
from raylight.learner.updates.policy import Policy
from raylight.trainer.cluster_fit.model_shape import read_shape
from raylight.weights.source import WeightSource

pytestmark = pytest.mark.usefixtures("one_rank")
LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
VISION = {"train_vision": True, "max_tokens_per_micro_batch": 64}
PACKED = VISION | {"packed": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return folders of models by family."""

    class Built(dict[str, str]):
        def __missing__(self, family: str) -> str:
            self[family] = build_vlm(family, tmp_path_factory.mktemp(family))
            return self[family]

    return Built()


def load_plain(folder: str) -> tuple[Any, ModelImages, list[torch.Tensor]]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    images = ModelImages.load(folder)
    assert images is not None
    with torch.no_grad():
        return model, images, plain_logprobs(model, images)


def build_policy(folder: str, settings: dict[str, Any] | None = None, **config: Any) -> Policy:
    mismatch = {"max_logprob_mismatch": 1e-3}
    return Policy(folder, LearnerConfig(**config), PolicySettings(**mismatch | (settings or {})), 2)


def infer(policy: Policy, batch: TrainBatch) -> list[torch.Tensor]:
    (shard,) = shard_batch(batch, policy.settings, 1)
    policy.load_images(shard.image_files)
    rows = build_rows(shard.rows, batch.owners)
    return policy.engine.infer([rows[index] for index in range(len(batch.rows))])


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_vl", "gemma3"),
        *(
            pytest.param(family, marks=pytest.mark.slow("two families show the update and the saved files"))
            for family in ("qwen2_5_vl", "internvl", "qwen3_5", "llava_onevision")
        ),
    ],
)
def test_logprobs_are_those_of_plain_transformers_before_and_after_an_update(
    family: str, folders: dict[str, str], tmp_path: Path
) -> None:
    check_model(folders[family])
    _, images, exact = load_plain(folders[family])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    policy = build_policy(folders[family], {"lr": 1e-2})
    assert_equal(infer(policy, batch), exact)
    before = policy.export()
    metrics = policy.update(batch)
    assert metrics["mismatch/logprob_abs_max"] < 1e-5
    assert metrics["learner/grad_norm"] > 0
    after = policy.export()
    changed = {name for name in before if (before[name] != after[name]).any()}
    vision = {name for name in before if "vis" in name or "projector" in name or "newline" in name}
    assert changed
    assert vision
    assert not changed & vision, "the vision part is frozen"

    saved = str(tmp_path / "saved")
    save_model(policy.engine, saved)
    assert read_shapes(saved) == read_shapes(folders[family])
    source = WeightSource(policy.engine.module, torch.float32, tied=False)
    assert {param.name: param.shape for param in source.metadata()} == read_shapes(saved)
    _, _, trained = load_plain(saved)
    assert_equal(infer(policy, batch), trained)


@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("qwen3_vl", False),
        ("qwen3_vl", True),
        *(
            pytest.param(*given, marks=pytest.mark.slow("the other family shows both forms"))
            for given in [("gemma3", False), ("qwen2_5_vl", True)]
        ),
    ],
)
def test_gradients_are_those_of_plain_transformers(
    family: str, packed: bool, folders: dict[str, str]
) -> None:
    model, images, exact = load_plain(folders[family])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    settings = {"lr": 1e-3, "loss_agg_mode": "token-mean", "grad_clip": 1e9}
    policy = build_policy(folders[family], settings, train_vision=True, packed=packed)
    metrics = policy.update(batch)
    rewards = torch.tensor(batch.rewards)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    logprobs = plain_logprobs(model, images)
    tokens = sum(map(len, ANSWERS))
    loss = -sum(each.sum() * own for each, own in zip(logprobs, advantages, strict=True)) / tokens
    loss.backward()
    expected = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert metrics["learner/grad_norm"] == pytest.approx(float(expected), rel=1e-4)
    tower = [param for name, param in model.named_parameters() if "vis" in name]
    assert sum(param.grad is not None and bool(param.grad.any()) for param in tower) > len(tower) / 2


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2_5_vl", "qwen3_vl"),
        *(
            pytest.param(family, marks=pytest.mark.slow("two families show it"))
            for family in ("internvl", "llava_onevision")
        ),
    ],
)
def test_packed_rows_are_computed_alike(family: str, folders: dict[str, str]) -> None:
    _, images, exact = load_plain(folders[family])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    assert_equal(infer(build_policy(folders[family], packed=True), batch), exact)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_images_of_other_models_are_not_packed(family: str, folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"{family}.*set learner\.packed=False"):
        build_policy(folders[family], packed=True)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_critic_of_a_model_that_reads_images_is_refused(family: str, folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"read text alone; choose an algorithm without a critic"):
        build_policy(folders[family], {"critic": CriticSettings(), "adv_estimator": "gae"})


def test_another_image_is_another_context(folders: dict[str, str]) -> None:
    _, images, exact = load_plain(folders["qwen3_vl"])
    policy = build_policy(folders["qwen3_vl"])
    logprobs = [logprobs.tolist() for logprobs in exact]
    own = infer(policy, make_batch(images, logprobs))
    for other in (make_image("white"), mirror(SQUARE)):
        found = infer(policy, make_batch(images, logprobs, other))
        alike = [bool((a == b).all()) for a, b in zip(own, found, strict=True)]
        assert alike == [False, False, True, True, False]


def test_a_sampled_image_token_is_text(folders: dict[str, str]) -> None:
    """It is one that the model may sample by chance, to which no image belongs."""
    _, images, exact = load_plain(folders["qwen3_vl"])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    ids = batch.rows[0].token_ids.copy()
    ids[-2] = images.token_id
    object.__setattr__(batch.rows[0], "token_ids", ids)
    policy = build_policy(folders["qwen3_vl"])
    found = infer(policy, batch)
    torch.testing.assert_close(found[0][:2], exact[0][:2], atol=1e-5, rtol=0)
    assert_equal(found[1:], exact[1:])


def test_an_image_is_computed_once_an_update(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, images, exact = load_plain(folders["qwen2_5_vl"])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    policy = build_policy(
        folders["qwen2_5_vl"], {"ppo_epochs": 2, "mini_batches": 2}, max_tokens_per_micro_batch=64
    )
    vision: Any = policy.engine._vision
    computed: list[list[str]] = []
    own = vision._compute
    monkeypatch.setattr(
        vision, "_compute", lambda shown, device: computed.append(shown) or own(shown, device)
    )
    policy.update(batch)
    assert sorted(computed) == sorted([sha256] for sha256 in batch.image_digests)


@pytest.mark.parametrize(
    ("family", "images_kept"), [("qwen3_vl", 1), pytest.param("internvl", 0, marks=pytest.mark.slow)]
)
def test_features_of_images_are_kept_up_to_a_number_of_bytes(
    family: str, images_kept: int, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass has all its images nevertheless."""
    _, images, exact = load_plain(folders[family])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    shape = read_shape(folders[family])
    wide = 40 * shape.features * 4  # the larger image, of 40 tokens at most
    monkeypatch.setattr(raylight.learner.model.vision, "FEATURE_BYTES", images_kept * wide)
    policy = build_policy(folders[family], max_tokens_per_micro_batch=200)
    assert_equal(infer(policy, batch), exact)
    vision: Any = policy.engine._vision
    assert len(vision._known) == images_kept
    sizes = {found.size for found in vision._known.values()}
    assert sizes <= {tokens * shape.features * 4 for tokens in (16, 40)}


def test_an_adapter_adapts_the_language_part(folders: dict[str, str], tmp_path: Path) -> None:
    """The layers of Gemma's tower have the same names."""
    _, images, exact = load_plain(folders["gemma3"])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    for number, lora in enumerate([LORA, {"rank": 4}, LORA | {"exclude_modules": ["v_proj"]}]):
        policy = build_policy(folders["gemma3"], {"lr": 1e-2, "kl_coef": 0.01}, lora=lora)
        assert policy.update(batch)["learner/grad_norm"] > 0
        _, weights = policy.export_adapter() or (None, {})
        assert weights
        assert all(".language_model.layers." in name for name in weights)
        assert ("v_proj" in str(list(weights))) == (number < 2)
        folder = str(tmp_path / str(number))
        save_model(policy.engine, folder)
        _, _, merged = load_plain(folder)
        assert_equal(infer(policy, batch), merged)
        assert (Path(folder) / "adapter" / "adapter_config.json").exists()


@pytest.mark.slow(parts=4)
@pytest.mark.parametrize(
    ("family", "config", "settings"),
    [
        ("gemma3", {}, {}),
        ("qwen2_5_vl", {"max_tokens_per_micro_batch": 64}, {}),
        ("qwen3_vl", {"lora": LORA}, {}),
        *((family, VISION, {}) for family in FAMILIES),
        ("qwen2_5_vl", PACKED, {"mini_batches": 2}),
        ("qwen3_vl", PACKED | {"gradient_checkpointing": True}, {"mini_batches": 2}),
    ],
)
def test_two_ranks_are_as_one(
    family: str, config: dict[str, Any], settings: dict[str, Any], folders: dict[str, str]
) -> None:
    given = folders[family], config, settings
    one = vision_ranks.main(0, 1, *given)
    two, _ = run_ranks(vision_ranks.main, 2, *given)
    for metrics, _ in (one, two):
        assert metrics["mismatch/logprob_abs_max"] < 1e-5
    assert two[0]["learner/grad_norm"] == pytest.approx(one[0]["learner/grad_norm"], rel=1e-4)
    if "lora" not in config:  # whose matrices are random; the gradients of biases of keys are rounding
        assert two[1] == pytest.approx(one[1], rel=1e-4, abs=1e-4)


def test_the_initial_model_beside_a_trained_vision_part_is_frozen(folders: dict[str, str]) -> None:
    policy = build_policy(folders["gemma3"], {"kl_coef": 0.01}, train_vision=True)
    visions: list[Any] = [engine._vision for engine in (policy.engine, policy._reference)]
    assert [vision._trained for vision in visions] == [True, False]


def test_a_model_that_needs_its_processor_names_one_remedy(folders: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(folders["internvl"], tmp_path, dirs_exist_ok=True)
    for name in PROCESSOR_FILES:
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=r"takes none: its processor .* \(\w+: [^.;]+\); copy [^;]+$"):
        check_model(str(tmp_path))


def test_a_module_that_an_engine_shares_computes_alike(folders: dict[str, str]) -> None:
    """The engine's passes get the features of their own pixels."""
    model, images, exact = load_plain(folders["qwen3_vl"])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    settings = PolicySettings(lr=1e-2, max_logprob_mismatch=1e-3)
    policy = Policy(folders["qwen3_vl"], LearnerConfig(kind="local"), settings, 2, model)
    assert policy.update(batch)["mismatch/logprob_abs_max"] < 1e-5
    with torch.no_grad():
        sampled = plain_logprobs(model.eval(), images)
    assert_equal(infer(policy, batch), sampled)


def test_a_vision_part_is_trained_in_whole_models() -> None:
    with pytest.raises(ConfigError, match="leave out train_vision"):
        LearnerConfig(train_vision=True, lora=LORA)


def test_a_model_of_text_alone_is_given_no_images(folders: dict[str, str], tmp_path: Path) -> None:
    _, images, exact = load_plain(folders["qwen3_vl"])
    batch = make_batch(images, [logprobs.tolist() for logprobs in exact])
    policy = build_policy(build_model("qwen3", tmp_path, vocab_size=1000))
    with pytest.raises(ConfigError, match=r"rows have images, and .* reads text alone"):
        policy.update(batch)
