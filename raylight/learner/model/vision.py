"""Vision part of a trained model: an image's features in the place of the tokens that stand for it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cachetools import LRUCache
from transformers import PreTrainedModel

from raylight.errors import ConfigError
from raylight.images.image import Image, read_image
from raylight.images.model_inputs import GRID, PROCESSOR_FILES, ModelImages, blank_image
from raylight.learner.tokens.micro_batch import MicroBatch

LANGUAGE = "language_model"
"""Name of a vision-language model's language part in its transformer, in transformers."""
TYPE_IDS = ("mm_token_type_ids", "token_type_ids")
"""Names of the argument that marks the tokens of images."""
FEATURE_BYTES = 512 * 2**20
"""Size of the features that a frozen part keeps on the device during an update."""


class ImageFeatures(NamedTuple):
    """Features of one image, as the model's own code returns them."""

    pooled: Any
    deepstack: Any
    """Features that are added within the language part; None for most models."""

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in [*self.pooled, *(self.deepstack or ())])


class ModelVision:
    """Gives a model the images of its rows.

    The model computes features and puts them in place with its own code, of which two functions of this
    object alone are replaced: the latest features of a frozen part are kept, and sampled tokens that
    equal an image's by chance remain text.

    Args:
        model: image-text model of transformers, before FSDP wraps it.
        images: conversion of images for it.
        trained: train the vision part; False freezes it.

    Raises:
        ConfigError: transformers' class has another layout.
    """

    def __init__(self, model: PreTrainedModel, images: ModelImages, trained: bool) -> None:
        self._base: Any = model.model
        self._images, self._trained = images, trained
        functions = "get_image_features", "get_placeholder_mask", LANGUAGE
        if missing := [name for name in functions if not hasattr(self._base, name)]:
            raise ConfigError(
                f"{type(model).__name__} cannot be trained with images: {type(self._base).__name__} has no "
                f"{missing[0]}; choose a model of an architecture of docs/models.md, or remove "
                f"{' and '.join(PROCESSOR_FILES)} from the folder to train it on text"
            )
        if not trained:
            freeze_vision(self._base)
        self._own_features, self._own_mask = self._base.get_image_features, self._base.get_placeholder_mask
        self._base.get_image_features, self._base.get_placeholder_mask = self._features, self._find_images
        arguments = inspect.signature(type(self._base).forward).parameters
        self._type_ids = next((name for name in TYPE_IDS if name in arguments), None)
        self._files: Mapping[str, bytes] = {}
        self._read: dict[str, Image] = {}
        self._known: LRUCache[str, ImageFeatures] = LRUCache(FEATURE_BYTES, getsizeof=lambda it: it.size)
        self._shown: list[str] | None = None
        """Images of the pass that begins."""
        self._inside: torch.Tensor | None = None
        """True for tokens of images in this pass."""
        self._is_shared = trained and dist.get_world_size() > 1
        self._is_idle = False
        """True if the pass that begins has no images, in a mini-batch with some."""
        if self._is_shared:
            language = getattr(self._base, LANGUAGE)
            language.register_forward_pre_hook(self._join_other_ranks, with_kwargs=True)

    def load(self, files: Mapping[str, bytes]) -> None:
        """Take the images of an update.

        Args:
            files: by digest.
        """
        self._files = files
        for cache in (self._read, self._known):
            cache.clear()

    def inputs(self, batch: MicroBatch, ids: torch.Tensor) -> dict[str, object]:
        """Return the arguments of a pass that its images need; none if its rows have no images.

        Args:
            ids: the model's input, shape (1, all tokens) if packed, else (rows, longest row).
        """
        shown = [image.sha256 for row in batch.rows for image in row.images]
        self._shown = self._inside = None
        self._is_idle = self._is_shared and batch.has_images and not shown
        if not shown:
            return {}
        self._shown, self._inside = shown, batch.image_tokens().to(ids.device)
        found: dict[str, object] = {"pixel_values": torch.zeros(1, device=ids.device)}  # see `_features`
        if self._type_ids is not None:
            found[self._type_ids] = (self._inside & (ids == self._images.token_id)).long()
        grids = self._images.grids([self._image(sha256) for sha256 in shown])
        if grids is not None:
            found[GRID] = grids.to(ids.device)
        if grids is not None and batch.packed:
            found["position_ids"] = self._packed_positions(batch, ids.cpu()).to(ids.device)
        return found

    def _packed_positions(self, batch: MicroBatch, ids: torch.Tensor) -> torch.Tensor:
        """Return the positions of the tokens of packed rows, shape (4, 1, tokens): in their row, and the
        three that the model's own code gives a row, of time, height and width."""
        found, start = [], 0
        for row in batch.rows:
            own = ids[:, start : start + row.tokens]
            start += row.tokens
            positions = torch.arange(row.tokens).expand(4, 1, -1).clone()
            if row.images:
                kinds = torch.zeros_like(own, dtype=torch.int)
                for image in row.images:
                    kinds[0, image.start : image.stop] = 1
                grids = self._images.grids([self._image(image.sha256) for image in row.images])
                positions[1:], _ = self._base.get_rope_index(
                    own, mm_token_type_ids=kinds, image_grid_thw=grids
                )
            found.append(positions)
        return torch.cat(found, -1)

    def _join_other_ranks(
        self, module: object, args: tuple[object, ...], arguments: dict[str, Any]
    ) -> tuple[object, dict[str, object]]:
        """Compute a blank image in a pass without images, whose features change nothing: the ranks gather the
        parameters of the vision part, and reduce their gradients, together. Without images in the mini-batch,
        those gradients are None on all ranks, and the optimizer leaves these parameters alone."""
        is_idle, self._is_idle = self._is_idle, False
        if is_idle:
            embeddings = arguments["inputs_embeds"]
            found = self._convert_and_compute([self._blank], embeddings.device)
            features = [*found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
            nothing = sum((feature.sum() for feature in features), start=torch.zeros(()))
            arguments = arguments | {"inputs_embeds": embeddings + 0 * nothing.to(embeddings.dtype)}
        return args, arguments

    @functools.cached_property
    def _blank(self) -> Image:
        return blank_image()

    @contextlib.contextmanager
    def left_whole(self) -> Iterator[None]:
        """Context in which a frozen vision part is not part of the model, so that FSDP leaves it whole. Ranks
        can then compute different numbers of images at the same time."""
        if self._trained:
            yield
            return
        modules, every = self._base._modules, dict(self._base._modules)
        for name in every.keys() - {LANGUAGE}:
            del modules[name]
        try:
            yield
        finally:
            modules.clear()
            modules.update(every)

    def place(self, device: torch.device) -> None:
        """Move a vision part that FSDP left whole to the device, with the values of rank 0. A collective."""
        if self._trained:
            return
        for name, part in self._base.named_children():
            if name == LANGUAGE:
                continue
            is_empty = any(param.is_meta for param in part.parameters())
            part.to_empty(device=device) if is_empty else part.to(device)
            for _, tensor in sorted(itertools.chain(part.named_parameters(), part.named_buffers())):
                dist.broadcast(tensor.data, src=0)

    def _image(self, sha256: str) -> Image:
        if sha256 not in self._read:
            self._read[sha256] = read_image(self._files[sha256])
        return self._read[sha256]

    def _features(self, pixel_values: torch.Tensor, *args: object, **options: object) -> object:
        """Return the features of the pass's images. An engine that shares the module gets its own pixels'
        features."""
        shown, self._shown = self._shown, None
        if shown is None:
            return self._own_features(pixel_values, *args, **options)
        device = pixel_values.device
        if self._trained:
            return self._compute(shown, device)
        features = {sha256: self._find(sha256, device) for sha256 in dict.fromkeys(shown)}
        return _join([features[sha256] for sha256 in shown])

    def _find(self, sha256: str, device: torch.device) -> ImageFeatures:
        """Return the features of an image by a frozen part."""
        features = self._known.get(sha256)
        if features is None:
            with torch.no_grad():
                found = self._compute([sha256], device)
            features = ImageFeatures(found.pooler_output, getattr(found, "deepstack_features", None))
            if features.size <= self._known.maxsize:
                self._known[sha256] = features
        return features

    def _compute(self, shown: list[str], device: torch.device) -> Any:
        return self._convert_and_compute([self._image(sha256) for sha256 in shown], device)

    def _convert_and_compute(self, images: list[Image], device: torch.device) -> Any:
        tensors = self._images.inputs(images)
        return self._own_features(
            **{name: tensor.to(device) for name, tensor in tensors.items()}, return_dict=True
        )

    def _find_images(self, input_ids: torch.Tensor | None = None, *args: object, **options: object) -> object:
        """Return the model's masks of the tokens of images, without tokens outside of them."""
        inside, self._inside = self._inside, None
        if inside is not None and input_ids is not None:
            input_ids = input_ids.where(inside | (input_ids != self._images.token_id), -1)
        return self._own_mask(input_ids, *args, **options)


def freeze_vision(base: torch.nn.Module) -> None:
    """Freeze all parameters of a transformer outside of its language part."""
    for name, param in base.named_parameters():
        param.requires_grad_(param.requires_grad and name.startswith(f"{LANGUAGE}."))


def _join(features: list[ImageFeatures]) -> object:
    """Return the features of several images, as the model's own code would."""
    pooled = [each.pooled for each in features]
    deepstack = None
    if features[0].deepstack is not None:
        levels = zip(*(each.deepstack for each in features), strict=True)
        deepstack = [torch.cat(level) for level in levels]
    whole = torch.cat(pooled) if isinstance(pooled[0], torch.Tensor) else [*itertools.chain(*pooled)]
    return SimpleNamespace(pooler_output=whole, deepstack_features=deepstack)
