"""Tokens and pixels of images, compared with the models' own processors."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from image_helpers import make_image
from tiny_qwen import build_tiny_qwen
from tiny_vlms import FAMILIES, WITH_TORCHVISION, build_vlm
from transformers import AutoConfig

import raylight.images.model_inputs
from raylight.config import LoraConfig
from raylight.errors import ImageError
from raylight.images import model_inputs
from raylight.images.image import Image
from raylight.images.model_inputs import TEXT_KEYS, ModelImages, image_obstacle, load_processor, reads_images
from raylight.learner.model.adapter import adapted_layers
from raylight.learner.model.model_check import check_model
from raylight.trainer.cluster_fit.model_shape import adapter_parameters

RED, WIDE, TALL = (make_image(*given) for given in (("red",), ("blue", (64, 40)), ("green", (24, 90))))
PART = {"type": "image"}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_vlm(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def images(folder: str) -> ModelImages:
    found = ModelImages.load(folder)
    assert found is not None
    return found


def own_processor(folder: str) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    return load_processor(folder, PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder))])


def render(folder: str, *contents: Any) -> str:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": content} for content in contents]
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


class TestEncode:
    @pytest.mark.parametrize("image", [RED, WIDE, TALL], ids=["square", "wide", "tall"])
    def test_tokens_and_pixels_are_those_of_the_models_processor(
        self, folder: str, images: ModelImages, image: Image
    ) -> None:
        prompt = render(folder, [text("\nSee\n"), PART, text("\n\nIt is:")])
        ids, places = images.encode(prompt, [image])
        expected = dict(own_processor(folder)(text=[prompt], images=[image.open()], return_tensors="pt"))
        assert ids == expected["input_ids"][0].tolist()
        assert set(ids[places[0].start : places[0].stop]) == {images.token_id}
        assert images.token_id not in ids[: places[0].start] + ids[places[0].stop :]
        tensors = images.inputs([image])
        assert tensors.keys() == expected.keys() - TEXT_KEYS
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, torch.as_tensor(expected[name]), rtol=0, atol=0)

    def test_images_of_several_messages(self, folder: str, images: ModelImages) -> None:
        prompt = render(folder, [PART, PART, text("two")], "none", [text("again"), PART])
        ids, places = images.encode(prompt, [RED, WIDE, RED])
        assert [place.sha256 for place in places] == [RED.sha256, WIDE.sha256, RED.sha256]
        assert ids.count(images.token_id) == sum(place.stop - place.start for place in places)
        opened = [image.open() for image in (RED, WIDE, RED)]
        assert ids == own_processor(folder)(text=[prompt], images=opened)["input_ids"][0]

    def test_text_alone(self, folder: str, images: ModelImages) -> None:
        ids, places = images.encode(render(folder, "hello"), [])
        assert ids
        assert not places
        assert not images.inputs([])

    def test_another_number_of_images(self, folder: str, images: ModelImages) -> None:
        with pytest.raises(ImageError, match=r"1 times the text .* and 2 images"):
            images.encode(render(folder, [PART]), [RED, WIDE])


class TestPlace:
    def test_finds_what_encode_placed(self, folder: str, images: ModelImages) -> None:
        shown = [RED, RED, TALL]
        ids, places = images.encode(render(folder, [PART, PART, text("and"), PART]), shown)
        assert images.place(ids, shown) == places

    def test_a_sampled_image_token(self, folder: str, images: ModelImages) -> None:
        ids, places = images.encode(render(folder, [PART]), [RED])
        (moved,) = images.place([images.token_id, 5, *ids], [RED])
        assert (moved.start, moved.stop) == (places[0].start + 2, places[0].stop + 2)

    def test_other_images_than_those_shown(self, folder: str, images: ModelImages) -> None:
        ids, _ = images.encode(render(folder, [PART]), [RED])
        with pytest.raises(ImageError, match="image 2 of 2"):
            images.place(ids, [RED, RED])
        with pytest.raises(ImageError, match="image 1 of 1"):
            images.place(ids[:10], [RED])

    def test_other_size(self, tmp_path: Path) -> None:
        images = ModelImages.load(build_vlm("qwen3_vl", tmp_path))
        ids, _ = images.encode(render(str(tmp_path), [PART, PART]), [RED, RED])
        with pytest.raises(ImageError, match="image 1 of 2"):
            images.place(ids, [WIDE, RED])
        ids, _ = images.encode(render(str(tmp_path), [PART, PART]), [RED, WIDE])
        with pytest.raises(ImageError, match="image 2 of 2"):
            images.place(ids, [RED, RED])


class TestTemplateContent:
    def test_an_image_makes_a_list(self, images: ModelImages) -> None:
        sent = {"type": "image_url", "image_url": {"url": "data:"}}
        assert images.template_content([text("a"), sent]) == [text("a"), PART]

    def test_text_is_a_string_unless_the_template_shows_none(self, tmp_path: Path) -> None:
        images = ModelImages.load(build_vlm("gemma3", tmp_path))
        assert images.template_content([text("a"), text("b")]) == "a\nb"
        assert images.template_content(None) == ""
        lists = (
            "{% for m in messages %}{% for p in m.content if p.type %}{{ p.text }}{% endfor %}{% endfor %}"
        )
        (tmp_path / "chat_template.jinja").write_text(lists)
        images = ModelImages.load(str(tmp_path))
        assert images.template_content("a") == [text("a")]


class TestInputs:
    def test_images_of_different_sizes(self, images: ModelImages) -> None:
        both, one = images.inputs([RED, TALL, RED]), images.inputs([RED])
        assert both.keys() == one.keys()
        count = len(one["pixel_values"])
        for at in (slice(None, count), slice(-count, None)):
            part = both["pixel_values"][at]
            if part.ndim == one["pixel_values"].ndim == 5:  # padded tiles
                part = part[:, : one["pixel_values"].shape[1]]
            torch.testing.assert_close(part, one["pixel_values"], rtol=0, atol=0)


class TestKept:
    @pytest.mark.parametrize("pixel_bytes", [0, 2**20])
    def test_an_image_is_converted_once_for_all_that_needs_no_pixels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pixel_bytes: int
    ) -> None:
        monkeypatch.setattr(model_inputs, "PIXEL_BYTES", pixel_bytes)
        images = ModelImages.load(build_vlm("qwen3_vl", tmp_path))
        assert images is not None
        converted: list[Image] = []
        shown, convert = [RED, WIDE, TALL], images._convert
        monkeypatch.setattr(images, "_convert", lambda image: converted.append(image) or convert(image))
        images.prepare(shown)
        ids, places = images.encode(render(str(tmp_path), [PART, PART, PART]), shown)
        assert images.place(ids, shown) == places
        grids = images.grids(shown)
        assert grids is not None
        assert converted == shown
        pixels = images.inputs(shown)
        assert len(converted) == (3 if pixel_bytes else 6)
        torch.testing.assert_close(pixels["image_grid_thw"], grids, rtol=0, atol=0)
        assert len(pixels["pixel_values"]) == grids.prod(-1).sum()


class TestLoad:
    def test_model_without_a_vision_part(self, tmp_path: Path) -> None:
        assert ModelImages.load(build_tiny_qwen(tmp_path)) is None

    def test_model_without_a_processor(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = build_vlm("gemma3", tmp_path)
        (tmp_path / "preprocessor_config.json").unlink()
        assert ModelImages.load(folder) is None
        assert "takes no images: its processor cannot be loaded" in caplog.text

    def test_a_model_whose_processor_transformers_lacks(self, tmp_path: Path) -> None:
        AutoConfig.for_model("glm_ocr").save_pretrained(tmp_path)
        assert str(image_obstacle(str(tmp_path))).startswith("transformers has no processor for glm_ocr; ")

    @pytest.mark.skipif(find_spec("torchvision") is not None, reason="nothing is missing")
    def test_processor_that_needs_torchvision(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert ModelImages.load(build_vlm(WITH_TORCHVISION, tmp_path)) is None
        assert "install torchvision on all machines" in caplog.text


def test_one_processor_is_loaded_to_know_what_a_model_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_vlm("gemma3", tmp_path)
    loaded: list[str] = []
    monkeypatch.setattr(
        raylight.images.model_inputs,
        "load_processor",
        lambda path, kind: loaded.append(path) or load_processor(path, kind),
    )
    check_model(folder)
    assert "q_proj" in adapted_layers(folder, LoraConfig())
    adapter_parameters(folder, LoraConfig())
    assert reads_images(folder)
    assert loaded == [folder]

    (tmp_path / "preprocessor_config.json").unlink()
    assert not reads_images(folder)
    assert ModelImages.load(folder) is None
