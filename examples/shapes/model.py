"""A vision-language model of a hundred thousand parameters, which names half of the shapes right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from agent import QUESTION
from drawing import SHAPES, data_url, draw_shape
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from raylight.images.image import read_data_url
from raylight.images.model_inputs import ModelImages
from raylight.quickstart import STARTER_MODEL

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}" + IMAGE + "{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = 8
"""Width and height of a patch, in pixels; four patches are a token."""
HALF_RIGHT = 0.45
"""Mean probability of the right letter, of the last batches, at which teaching ends."""
BATCH = 64


def make_model(folder: Path, seed: int = 0) -> str:
    """Save a model of the architecture of Qwen 2.5-VL; return its folder.

    It is trained on answers until it gives the right letter half of the time.
    """
    _save_processor(folder)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_config(_config(tokenizer), dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.save_pretrained(folder)
    images = ModelImages.load(str(folder))
    assert images is not None
    _teach(model, tokenizer, images, random.Random(seed))
    model.save_pretrained(folder)
    return str(folder)


def _save_processor(folder: Path) -> None:
    """Save the quickstart's tokenizer, of one token a byte, and the settings of the images."""
    base = AutoTokenizer.from_pretrained(STARTER_MODEL)
    tokens = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
    PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        extra_special_tokens=["<|im_start|>", *tokens],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _config(tokenizer: Any) -> Any:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 32,
        "fullatt_block_indexes": [0],
    }
    return AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )


def _teach(model: Any, tokenizer: Any, images: ModelImages, chance: random.Random) -> None:
    """Train on drawn shapes and their letters, until half of the answers would be right."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    torch.set_num_threads(1)  # more threads slow down matrices of this size
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    right = 0.0
    while right < HALF_RIGHT:
        letters = chance.choices(list(SHAPES), k=BATCH)
        drawn = [read_data_url(data_url(draw_shape(letter, chance.getrandbits(32)))) for letter in letters]
        answers = torch.tensor([[tokenizer.encode(letter)[0], tokenizer.eos_token_id] for letter in letters])
        prompts = torch.tensor([images.encode(prompt, [image])[0] for image in drawn])
        ids = torch.cat([prompts, answers[:, :1]], 1)
        types = (ids == images.token_id).long()
        logits = model(ids, mm_token_type_ids=types, logits_to_keep=2, **images.inputs(drawn)).logits
        logprobs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        right = 0.5 * right + 0.5 * float(logprobs.detach()[:, 0].exp().mean())
