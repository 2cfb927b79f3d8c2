"""The agent: it shows the model an image and asks for a letter, with the OpenAI client."""

from __future__ import annotations

import re
from typing import Any

from drawing import SHAPES, SIDE, data_url, draw_shape
from PIL import Image

import raylight as rl

QUESTION = f"Shape? Answer with one letter: {', '.join(f'{key} {name}' for key, name in SHAPES.items())}."


@rl.rollout
async def name_shape(task: dict[str, Any], llm: rl.LLM) -> float:
    """Return 1 if the first word of the answer is the letter or the name of the drawn shape, and 0 otherwise.

    Args:
        task: the letter, the seed of the drawing, and `blank` to show a white image in its place.
    """
    shown = draw_shape(task["shape"], task["seed"])
    if task.get("blank"):
        shown = Image.new("RGB", (SIDE, SIDE), "white")
    content = [
        {"type": "image_url", "image_url": {"url": data_url(shown)}},
        {"type": "text", "text": QUESTION},
    ]
    reply = await llm.client().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": content}], max_tokens=4
    )
    words = re.findall("[a-z]+", (reply.choices[0].message.content or "").lower())
    return float(words[:1] in ([task["shape"]], [SHAPES[task["shape"]]]))
