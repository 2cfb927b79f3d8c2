"""Rows with images for a tiny vision-language model, and their log-probs by plain transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from answer_rows import answer_row
from image_helpers import make_image

from raylight.experience.batches.batch import TrainBatch
from raylight.images.image import Image
from raylight.images.model_inputs import ModelImages
from raylight.types import PlacedImage

SQUARE, WIDE = make_image("red"), make_image("blue", (64, 40))
SHOWN: list[list[Image]] = [[SQUARE], [WIDE, SQUARE], [], [WIDE], [SQUARE]]
"""Images of each row."""
TEXT_ROW = 2
ANSWERS = [[20, 21, 22, 256], [20, 24, 256], [30, 31, 32, 33, 256], [40, 256], [20, 21, 23, 256]]


def make_prompts(images: ModelImages) -> list[tuple[list[int], tuple[PlacedImage, ...]]]:
    """Return the tokens and the placed images of each row's prompt."""
    shown = images._placeholder
    if "vision_start" in images._tokenizer.get_added_vocab().__str__():
        shown = f"<|vision_start|>{shown}<|vision_end|>"
    return [images.encode("see " + f"{shown} " * len(given) + "it:", given) for given in SHOWN]


def plain_logprobs(model: Any, images: ModelImages) -> list[torch.Tensor]:
    """Return the log-probs of the answers' tokens by plain transformers."""
    arguments = inspect.signature(type(model.model).forward).parameters
    found = []
    for (prompt, places), given, answer in zip(make_prompts(images), SHOWN, ANSWERS, strict=True):
        ids = torch.tensor([prompt + answer])
        types = torch.zeros_like(ids)
        for place in places:
            part = slice(place.start, place.stop)
            types[0, part] = ids[0, part] == images.token_id
        names = {"mm_token_type_ids", "token_type_ids"} & arguments.keys() if given else ()
        logits = model(ids, **images.inputs(given), **dict.fromkeys(names, types)).logits
        logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(-1, torch.tensor(answer)[:, None])[:, 0])
    return found


def make_batch(images: ModelImages, logprobs: list[list[float]], shown: Any = None) -> TrainBatch:
    """Return a batch of these rows.

    Args:
        logprobs: of the answers' tokens.
        shown: image in place of the red one, of the same size.
    """
    rows = []
    for number, ((prompt, places), answer) in enumerate(zip(make_prompts(images), ANSWERS, strict=True)):
        if shown is not None:
            own = {SQUARE.sha256: shown.sha256}
            places = tuple(place._replace(sha256=own.get(place.sha256, place.sha256)) for place in places)
        rows.append(answer_row(str(number), prompt, answer, logprobs[number], images=places))
    files = {image.sha256: image.data for image in (SQUARE, WIDE, shown) if image is not None}
    return TrainBatch([1.0, 0.0, 0.5, 0.2, 0.1], ["g"] * 5, rows, list(range(5)), image_files=files)
