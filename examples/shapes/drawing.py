"""Drawn shapes, as files of images."""

from __future__ import annotations

import base64
import random
from io import BytesIO

from PIL import Image, ImageDraw

SIDE = 32
"""Width and height of an image, in pixels."""
SHAPES = {"c": "circle", "s": "square", "t": "triangle", "x": "cross"}
"""Names of the shapes by the letters that answer the question."""


def draw_shape(letter: str, seed: int) -> Image.Image:
    """Draw a shape in black on white, at a place and in a size that the seed chooses."""
    chance = random.Random(seed)
    radius = chance.randint(11, 13)
    x, y = (chance.randint(radius + 1, SIDE - radius - 2) for _ in range(2))
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    match SHAPES[letter]:
        case "circle":
            pen.ellipse((left, top, right, bottom), fill="black")
        case "square":
            pen.rectangle((left, top, right, bottom), outline="black", width=3)
        case "triangle":
            pen.polygon([(x, top), (right, bottom), (left, bottom)], fill="black")
        case _:
            pen.line((left, top, right, bottom), fill="black", width=4)
            pen.line((left, bottom, right, top), fill="black", width=4)
    return image


def data_url(image: Image.Image) -> str:
    """Return an image as the URL that a client sends."""
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
