"""The vision part of the engine's model: features of images, and their places in a prefill."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import torch
from cachetools import LRUCache

from raylight.engines.transformers.sequence import Sequence
from raylight.errors import EngineStartError
from raylight.images.image import Image
from raylight.images.model_inputs import PROCESSOR_FILES, ModelImages

CACHE_BYTES = 512 * 2**20
"""Size of the features that are kept on the device. Rollouts of a group, and later turns, show the same
images."""
PARTS = ("get_image_features", "language_model")
"""Names of the members of a vision-language model's transformer that the engine uses, in transformers."""
Features = list[torch.Tensor]
"""Embeddings of an image's tokens, shape (tokens, width), and what is added to them in the first layers."""


class VisionPart:
    """The vision part of a model. All calls must come from the engine's thread.

    Args:
        module: the whole model.
        images: conversion of images for it.

    Raises:
        EngineStartError: transformers' class has another layout.
    """

    def __init__(self, module: Any, images: ModelImages) -> None:
        self._model, self._images = module.base_model, images
        if missing := [name for name in PARTS if not hasattr(self._model, name)]:
            raise EngineStartError(
                f"{type(module).__name__} cannot be served with images: {type(self._model).__name__} has no "
                f"{missing[0]}; choose a model of an architecture of docs/models.md, or remove "
                f"{' and '.join(PROCESSOR_FILES)} from the folder to serve it on text"
            )
        text = module.config.get_text_config()
        # an image's tokens attend to each other in both directions
        self._blockwise = (
            module.config.model_type == "gemma3"
            or getattr(text, "use_bidirectional_attention", None) == "vision"
        )
        self._has_layer_inputs = bool(getattr(text, "hidden_size_per_layer_input", None))
        self._padding: int = getattr(text, "pad_token_id", None) or 0
        self._has_grid_positions = hasattr(self._model, "get_rope_index")
        self._features: LRUCache[str, Features] = LRUCache(
            CACHE_BYTES, getsizeof=lambda found: sum(tensor.nbytes for tensor in found)
        )
        self._added: dict[str, object] = {}
        """Further arguments of the next pass of the language part."""
        self._model.language_model.register_forward_pre_hook(self._add_arguments, with_kwargs=True)

    def embed(self, rows: Rows[Sequence], ids: torch.Tensor, starts: list[int]) -> dict[str, torch.Tensor]:
        """Return what a pass takes in place of tokens: embeddings, with the features of images in their
        places.

        Args:
            ids: shape (rows, tokens).
            starts: index of the first of these tokens in each sequence.
        """
        shown = torch.zeros(ids.shape, dtype=torch.bool)
        parts: list[Features] = []
        for row, (sequence, start) in enumerate(zip(rows, starts, strict=True)):
            for image, place in zip(sequence.images, sequence.sample.images, strict=True):
                first, last = max(place.start, start), min(place.stop, start + ids.shape[1])
                if first < last:
                    shown[row, first - start : last - start] = True
                    own = slice(first - place.start, last - place.start)
                    parts.append([feature[own] for feature in self._find(image)])
        shown = shown.to(ids.device)
        ids = ids.masked_fill(shown, self._padding)
        embeddings: torch.Tensor = self._model.get_input_embeddings()(ids)
        inputs = {"inputs_embeds": embeddings}
        if self._has_layer_inputs:  # Gemma 4
            inputs["per_layer_inputs"] = self._model.language_model.get_per_layer_inputs(ids, embeddings)
        if parts:
            features, *deeper = (torch.cat(level) for level in zip(*parts, strict=True))
            embeddings[shown] = features.to(embeddings.dtype)
            if deeper:  # Qwen 3-VL
                self._added = {"visual_pos_masks": shown, "deepstack_visual_embeds": deeper}
        return inputs

    def positions(self, rows: Rows[Sequence], indices: torch.Tensor) -> torch.Tensor:
        """Return the rotary positions of tokens; `indices` for a model without positions in two dimensions.

        Args:
            indices: index of each token in its sequence, shape (rows, tokens).
        """
        if not self._has_grid_positions:
            return indices
        return torch.stack(
            [
                self._sequence_positions(sequence)[:, own.clamp(max=sequence.length - 1)]
                for sequence, own in zip(rows, indices, strict=True)
            ],
            dim=1,
        )

    def blocks(self, rows: Rows[Sequence], keys: int) -> torch.Tensor | None:
        """Return the number of the image that each key belongs to, shape (rows, keys), or -1; None if that
        does not matter."""
        if not self._blockwise or not any(sequence.images for sequence in rows):
            return None
        blocks = torch.full((len(rows), keys), -1)
        for row, sequence in enumerate(rows):
            for number, place in enumerate(sequence.sample.images):
                blocks[row, place.start : place.stop] = number
        return blocks.to(self._model.device)

    def check_features(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        """Forget all features if a weight of the vision part changes.

        Args:
            name: the weight's name in the whole model.
        """
        is_language = name.startswith(("model.language_model.", "lm_head."))
        if self._features and not is_language and not torch.equal(old, new.to(old.device, old.dtype)):
            self.clear()

    def clear(self) -> None:
        """Forget all features."""
        self._features.clear()

    def _find(self, image: Image) -> Features:
        found = self._features.get(image.sha256)
        if found is None:
            inputs = {
                name: tensor.to(self._model.device) for name, tensor in self._images.inputs([image]).items()
            }
            # the class's own function: a learner that shares the model replaces the model's
            output = type(self._model).get_image_features(self._model, **inputs, return_dict=True)
            pooled = output.pooler_output
            pooled = torch.cat(list(pooled)) if isinstance(pooled, list | tuple) else pooled.flatten(0, -2)
            found = [pooled, *(getattr(output, "deepstack_features", None) or ())]
            if sum(tensor.nbytes for tensor in found) <= CACHE_BYTES:
                self._features[image.sha256] = found
        return found

    def _sequence_positions(self, sequence: Sequence) -> torch.Tensor:
        """Return the positions of all tokens of a sequence, shape (3, tokens), and set its delta."""
        device = self._model.device
        if not sequence.images:
            return torch.arange(sequence.length, device=device).expand(3, -1)
        ids = torch.from_numpy(sequence.ids).long()[None]
        kinds = torch.zeros_like(ids, dtype=torch.int)
        for place in sequence.sample.images:
            kinds[0, place.start : place.stop] = 1
        grids = self._images.grids(sequence.images)
        found, delta = self._model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
        sequence.position_delta = int(delta)
        return found[:, 0].to(device)

    def _add_arguments(
        self, module: object, args: object, arguments: dict[str, object]
    ) -> tuple[object, dict[str, object]]:
        added, self._added = self._added, {}
        return args, arguments | added
