"""Images as a model takes them: tokens that stand for them in a prompt, and pixels."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import (
    AutoImageProcessor,
)  # the package's own needs torchvision
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from raylight.errors import ImageError
from raylight.images.image import Image, read_image
from raylight.types import IntArray, Tokenizer
from raylight.types.chat_messages import join_parts
from raylight.types.images import PlacedImage

Tensors = dict[str, torch.Tensor]
logger = logging.getLogger(__name__)
PIXEL_BYTES = 256 * 2**20
"""Size of the pixels that are kept: ten screenshots for Qwen."""
SHOWN_BYTES = 64 * 2**20
"""Size of the other inputs kept, for thousands of images, because agents send earlier turns again."""
GRID = "image_grid_thw"
"""Name of the tensor with the patches of each image, from which the positions of tokens are computed."""
TEXT_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of processors that belong to the text."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a model's processor, of which one is enough; transformers 5 writes the second."""
PLACEHOLDERS = {"Gemma3Processor": "boi_token"}
"""Attribute with the text that a processor replaces by an image's tokens, where it is not `image_token`."""


@dataclass(frozen=True)
class ShownImage:
    """An image in a prompt of one model.

    Attributes:
        text: text that replaces its placeholder in a prompt.
        ids: tokens that stand for it, from the first to the last token of its features.
        tensors: what the model needs with its pixels.
    """

    text: str
    ids: IntArray
    tensors: Tensors

    @property
    def size(self) -> int:
        """Bytes of these."""
        return len(self.text) + self.ids.nbytes + _size(self.tensors)


class ModelImages:
    """Conversion of images for one model, by its own processor.

    An image is processed by itself, so that its tokens and pixels do not depend on what other images there
    are. (LLaVA-OneVision's processor cuts no image into tiles if it receives a prompt's images as one list.)

    Args:
        processor: processor of the model, which needs no part for videos.
    """

    def __init__(self, processor: Any) -> None:
        self._processor, self._tokenizer = processor, processor.tokenizer
        self.token_id: int = processor.image_token_id
        """Token whose embeddings an image's features replace."""
        attribute = PLACEHOLDERS.get(type(processor).__name__)
        self._placeholder: str = getattr(
            processor.tokenizer if attribute else processor, attribute or "image_token"
        )
        self._shows_strings = _shows_strings(self._tokenizer)
        self._shown: LRUCache[str, ShownImage] = LRUCache(SHOWN_BYTES, getsizeof=lambda it: it.size)
        self._pixels: LRUCache[str, Tensors] = LRUCache(PIXEL_BYTES, getsizeof=_size)
        self._lock = Lock()

    @classmethod
    def load(cls, model_path: str) -> ModelImages | None:
        """Load the processor in a model's folder; None for a model without a vision part, or without a
        processor that can be loaded, which is logged."""
        try:
            return cls._load(model_path)
        except ImageError as error:
            logger.warning("%s takes no images: %s", model_path, error)
            return None

    @classmethod
    def _load(cls, model_path: str) -> ModelImages | None:
        """Load the processor in a model's folder; None for a model without a vision part.

        Raises:
            ImageError: transformers has no processor for it, or cannot load it.
        """
        config = AutoConfig.from_pretrained(model_path)
        if getattr(config, "vision_config", None) is None:
            return None
        if type(config) not in PROCESSOR_MAPPING:
            raise ImageError(
                f"transformers has no processor for {config.model_type}; choose an architecture of "
                "docs/models.md"
            )
        try:
            return cls(load_processor(model_path, PROCESSOR_MAPPING[type(config)]))
        except (OSError, ImportError, ValueError, KeyError) as error:
            sentence = " ".join(str(error).split()).partition(". ")[0].removesuffix(".")
            raise ImageError(
                f"its processor cannot be loaded ({type(error).__name__}: {sentence}); "
                f"{_loading_advice(error)}"
            ) from error

    def template_content(self, content: object) -> object:
        """Return the content of a message as the chat template takes it.

        Args:
            content: text, or parts of the types `text`, `image_url` and `image`; None: no text.
        """
        if isinstance(content, list):
            content = join_parts(content)
        if isinstance(content, list):
            return [part if part["type"] == "text" else {"type": "image"} for part in content]
        text = content or ""
        return text if self._shows_strings else [{"type": "text", "text": text}]

    def encode(self, text: str, images: Sequence[Image]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the tokens of a rendered prompt, and the places of its images.

        Raises:
            ImageError: the text has another number of placeholders than there are images.
        """
        parts = text.split(self._placeholder)
        if len(parts) - 1 != len(images):
            raise ImageError(
                f"the prompt has {len(parts) - 1} times the text {self._placeholder}, which stands for an "
                f"image, and {len(images)} images; remove it from the messages' text, or use a chat template "
                "that shows the images of all messages"
            )
        texts = [self._show(image).text for image in images]
        whole = parts[0] + "".join(shown + part for shown, part in zip(texts, parts[1:], strict=True))
        ids: list[int] = self._tokenizer.encode(whole, add_special_tokens=False)
        return ids, self.place(ids, images)

    def place(self, ids: Sequence[int] | IntArray, images: Sequence[Image]) -> tuple[PlacedImage, ...]:
        """Find images in `ids`, shape (tokens,), by the tokens that stand for them, in order.

        Raises:
            ImageError: one has no tokens, or another image's.
        """
        tokens = np.asarray(ids, np.int32)
        is_image = tokens == self.token_id
        runs = np.flatnonzero(is_image[1:] & ~is_image[:-1]) + 1
        places: list[PlacedImage] = []
        for image in images:
            own = self._show(image).ids
            after = places[-1].stop if places else 0
            # a model may have sampled the token that stands for images
            starts = [after, *runs[runs > after].tolist()]
            start = next((s for s in starts if np.array_equal(tokens[s : s + len(own)], own)), None)
            if start is None:
                raise _not_shown(len(places), images)
            places.append(PlacedImage(image.sha256, start, start + len(own)))
        following = {place.start for place in places} | {len(tokens)}
        for index, place in enumerate(places):
            if place.stop not in following and is_image[place.stop]:  # a larger image's
                raise _not_shown(index, images)
        return tuple(places)

    def inputs(self, images: Sequence[Image]) -> Tensors:
        """Return the pixel tensors of images, concatenated in order, by the model's names."""
        tensors = [self._tensors(image) for image in images]
        return (
            {name: _concatenate([each[name] for each in tensors]) for name in tensors[0]} if tensors else {}
        )

    def grids(self, images: Sequence[Image]) -> torch.Tensor | None:
        """Return the images' patches, (images, 3); None for a model whose positions do not depend on them."""
        shown = [self._show(image).tensors for image in images]
        return torch.cat([each[GRID] for each in shown]) if shown and GRID in shown[0] else None

    def prepare(self, images: Iterable[Image]) -> None:
        """Convert images, so that `encode`, `place` and `grids` find them converted."""
        for image in images:
            self._show(image)

    def token_bytes(self) -> int:
        """Return the bytes of the pixels for which a token stands, in an image of usual size."""
        image = blank_image(448)
        return _size(self._tensors(image)) // len(self._show(image).ids)

    def _show(self, image: Image) -> ShownImage:
        with self._lock:
            shown = self._shown.get(image.sha256)
        return self._convert(image)[0] if shown is None else shown

    def _tensors(self, image: Image) -> Tensors:
        with self._lock:
            shown, pixels = self._shown.get(image.sha256), self._pixels.get(image.sha256)
        if shown is None or pixels is None:
            shown, pixels = self._convert(image)
        return shown.tensors | pixels

    def _convert(self, image: Image) -> tuple[ShownImage, Tensors]:
        """Convert an image, and keep the results that fit."""
        found = dict(
            self._processor(
                text=[self._placeholder],
                images=[image.open()],
                add_special_tokens=False,
                return_tensors="pt",
            )
        )
        ids = found["input_ids"][0].numpy().astype(np.int32)
        places = np.flatnonzero(ids == self.token_id)
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not len(places) or self._tokenizer.encode(text, add_special_tokens=False) != ids.tolist():
            raise ImageError(
                f"the tokens of an image cannot be written as text ({text[:80]!r}); use another tokenizer"
            )
        pixels = {name: value for name, value in found.items() if name.startswith("pixel")}
        others = {name: value for name, value in found.items() if name not in TEXT_KEYS | pixels.keys()}
        shown = ShownImage(text, ids[places[0] : places[-1] + 1], others)
        with self._lock, suppress(ValueError):  # one is larger than its cache
            self._shown[image.sha256] = shown
            self._pixels[image.sha256] = pixels
        return shown, pixels


def blank_image(side: int = 32) -> Image:
    """Return a black image of this width and height."""
    from PIL import Image as pillow

    file = BytesIO()
    pillow.new("RGB", (side, side)).save(file, "PNG")
    return read_image(file.getvalue())


def auto_class(reads_images: bool) -> Any:
    """Return the class of transformers that loads a model, with its vision part or without."""
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def reads_images(model_path: str) -> bool:
    """Return True if `ModelImages.load` returns a conversion for a model."""
    return image_obstacle(model_path) is None


def image_obstacle(model_path: str) -> str | None:
    """Return why a model takes no images, and what to do; None if `ModelImages.load` returns a conversion.

    Only the first call loads one, until files of the folder change.
    """
    files = frozenset((file.name, file.lstat().st_mtime_ns) for file in Path(model_path).glob("*"))
    return _image_obstacle(model_path, files)


@functools.lru_cache(maxsize=8)
def _image_obstacle(model_path: str, files: frozenset[tuple[str, int]]) -> str | None:
    try:
        return "it has no vision part" if ModelImages._load(model_path) is None else None
    except ImageError as error:
        return str(error)


def load_processor(model_path: str, kind: Any) -> object:
    """Load a model's processor without the parts for other inputs, which may need further packages.

    Args:
        kind: class of the processor.
    """
    settings, _ = kind.get_processor_dict(model_path)
    loaders: dict[str, Any] = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
    parts = [
        loaders[name].from_pretrained(model_path) if name in loaders else None
        for name in kind.get_attributes()
    ]
    # only the class's own check rejects a part that is missing
    partial: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    return partial.from_args_and_dict(parts, settings)


def _loading_advice(error: BaseException) -> str:
    """Return the advice for a processor that cannot be loaded. transformers names a missing package only in
    the cause of the error."""
    while error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return f"copy the files of its processor ({' or '.join(PROCESSOR_FILES)}) into the model's folder"
    return f"install {error.name.partition('.')[0]} on all machines of the run"


def _size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _not_shown(index: int, images: Sequence[Image]) -> ImageError:
    return ImageError(
        f"the prompt's tokens do not show image {index + 1} of {len(images)}; send the images of all "
        "messages, in order"
    )


def _shows_strings(tokenizer: Tokenizer) -> bool:
    """Return True if a chat template shows a content that is a string, and not only lists of parts."""
    probe = "a content"
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": probe}], tokenize=False)
    except Exception:  # a template is the model authors' program and may raise anything
        return False
    return probe in text


def _concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of images by rows; images with fewer tiles (dimension 1) are padded with zeros."""
    if len(tensors) == 1:
        return tensors[0]
    most = max(tensor.shape[1] for tensor in tensors) if tensors[0].ndim > 1 else 0
    padded = [
        torch.cat([t, t.new_zeros(len(t), most - t.shape[1], *t.shape[2:])], 1) if t.ndim > 1 else t
        for t in tensors
    ]
    return torch.cat(padded)
