"""Tiny vision-language models of several families, with random weights, processor and chat template."""

import json
from pathlib import Path
from typing import Any

from tiny_models import MOE, SMALL

PATCH = 4
"""Width and height of a patch, in pixels."""
SIDE = 32
"""Width and height of the images of towers with one size."""
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}IMAGE{% endif %}{% endfor %}"
    "{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Turns of a chat template; IMAGE stands for what the family writes for an image."""
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_TOWER = {
    "depth": 2,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SIGLIP_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": SIDE,
    "vision_use_head": False,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
WITH_TORCHVISION = "gemma4"
"""Family whose processor needs torchvision, which is not among the tests' packages."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "internvl", "llava_onevision")


def build_vlm(family: str, folder: Path, *, text: Any = None, vision: Any = None, seed: int = 0) -> str:
    """Save a tiny vision-language model in the form of its published checkpoints; return its folder.

    Its tokenizer has one token a byte. An image of 32 x 32 pixels is 16 tokens, and 136 of LLaVA-OneVision.

    Args:
        family: one of `FAMILIES`, or `WITH_TORCHVISION`.
        text: settings of the language part in place of the defaults.
        vision: settings of the vision tower in place of the defaults.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokens, image, processor, image_processor = _processing(family)
    vocabulary = _save_tokenizer(folder, tokens, image)
    ids = {name: vocabulary[token] for name, token in tokens.items()}
    config = AutoConfig.for_model(family, **_settings(family, ids, len(vocabulary), text or {}, vision or {}))
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    if family == "gemma3":  # its own initial value is zero
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 256, 257
    model.save_pretrained(folder)
    if model.config.vision_config.model_type == "siglip_vision_model":
        _publish_siglip(folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    if processor:
        (folder / "processor_config.json").write_text(json.dumps(processor))
    return str(folder)


def _publish_siglip(file: Path) -> None:
    """Rename the weights of a SigLIP tower as in published files; transformers loads both forms."""
    from safetensors.torch import load_file, save_file

    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _processing(family: str) -> tuple[dict[str, str], str, dict[str, Any], dict[str, Any]]:
    """Return the family's special tokens by name, what its template writes for an image, and the settings of
    its processor and image processor."""
    square = {"height": SIDE, "width": SIDE}
    match family:
        case "gemma3":
            tokens = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>"}
            tokens |= {"eoi_token": "<end_of_image>"}
            processor = {"processor_class": "Gemma3Processor", "image_seq_length": 16}
            return tokens, "<start_of_image>", processor, _pixels("Gemma3", square)
        case "gemma4":
            tokens = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
            tokens |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
            tokens |= {"video_token": "<|video|>"}
            patches = {"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70}
            pixels = {"image_processor_type": "Gemma4ImageProcessor"} | patches
            return tokens, "<|image|>", {"processor_class": "Gemma4Processor"}, pixels
        case "internvl":
            tokens = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
            tokens |= {"context_image_token": "<IMG_CONTEXT>"}
            processor = {"processor_class": "InternVLProcessor", "image_seq_length": 16}
            return tokens, "<IMG_CONTEXT>\n", processor, _pixels("GotOcr2", square)
        case "llava_onevision":
            tokens = {"image_token": "<image>", "video_token": "<video>"}
            processor = {
                "processor_class": "LlavaOnevisionProcessor",
                "num_image_tokens": (SIDE // PATCH) ** 2,
                "vision_feature_select_strategy": "full",
            }
            pinpoints = {"image_grid_pinpoints": _pinpoints()}
            return tokens, "<image>\n", processor, _pixels("LlavaOnevision", square) | pinpoints
    tokens = {name: f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    patches = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    return tokens, QWEN_IMAGE, {}, _pixels("Qwen2VL", sizes) | patches


def _pixels(name: str, size: dict[str, int]) -> dict[str, Any]:
    return {
        "image_processor_type": f"{name}ImageProcessor",
        "size": size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _pinpoints() -> list[list[int]]:
    """Return the sizes in pixels of the tiles that LLaVA-OneVision cuts an image into."""
    return [[SIDE * rows, SIDE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]


def _save_tokenizer(folder: Path, tokens: dict[str, str], image: str) -> dict[str, int]:
    """Save the quickstart's tokenizer with a family's special tokens; return its vocabulary."""
    from engine_server import TOOLS
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from raylight.quickstart import STARTER_MODEL

    base = AutoTokenizer.from_pretrained(STARTER_MODEL)
    named = {name: token for name, token in tokens.items() if name.endswith("_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        extra_special_tokens=named or ["<|im_start|>", *tokens.values()],
        chat_template=TOOLS + TURNS.replace("IMAGE", image),
    )
    if "boi_token" in tokens:  # Gemma's tokenizer has tokens of several line breaks, which vLLM looks up
        tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    tokenizer.save_pretrained(folder)
    return tokenizer.get_vocab()


def _settings(
    family: str, ids: dict[str, int], size: int, text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings of a family's configuration.

    Args:
        ids: ids of its special tokens by name.
        size: number of tokens.
    """
    text = SMALL | {"vocab_size": size, "max_position_embeddings": 2048} | text
    width = text["hidden_size"]
    match family:
        case "gemma3":
            layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
            return {
                "text_config": layers | {"query_pre_attn_scalar": 32} | text,
                "vision_config": SIGLIP_TOWER | vision,
                "mm_tokens_per_image": 16,
                "boi_token_index": ids["boi_token"],
                "eoi_token_index": ids["eoi_token"],
                "image_token_index": ids["image_token"],
                "eos_token_id": 256,
            }
        case "gemma4":
            layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
            layers |= {"vocab_size_per_layer_input": size, "hidden_size_per_layer_input": 8}
            layers |= {"global_head_dim": 32, "use_bidirectional_attention": "vision"}
            tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
            tower |= {"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": PATCH}
            return {
                "text_config": layers | text,
                "vision_config": tower | {"pooling_kernel_size": 2, "position_embedding_size": 64} | vision,
                "boi_token_id": ids["boi_token"],
                "eoi_token_id": ids["eoi_token"],
                "image_token_id": ids["image_token"],
                "video_token_id": ids["video_token"],
                "audio_token_id": ids["audio_token"],
            }
        case "internvl":
            tower = SIGLIP_TOWER | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]} | vision
            tower.pop("vision_use_head")
            return {
                "text_config": {"model_type": "qwen2"} | text,
                "vision_config": tower,
                "image_token_id": ids["context_image_token"],
                "image_seq_length": 16,
                "tie_word_embeddings": False,
            }
        case "llava_onevision":
            return {
                "text_config": {"model_type": "qwen2"} | text,
                "vision_config": {"model_type": "siglip_vision_model"} | SIGLIP_TOWER | vision,
                "image_token_index": ids["image_token"],
                "video_token_index": ids["video_token"],
                "image_grid_pinpoints": _pinpoints(),
            }
        case "qwen2_5_vl":
            text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0} | {
                "mrope_section": [4, 6, 6]
            }
            tower = {"hidden_size": 32, "out_hidden_size": width, "window_size": 16}
            tower |= {"fullatt_block_indexes": [1]}
        case "qwen3_vl":
            text["rope_parameters"] = MROPE
            tower = {"hidden_size": 32, "out_hidden_size": width, "num_position_embeddings": 64}
            tower |= {"deepstack_visual_indexes": [0]}
        case _:
            linear = {name: value for name, value in MOE["qwen3_next"].items() if "linear" in name}
            text = linear | {"layer_types": ["linear_attention", "full_attention"]} | text
            text["rope_parameters"] = MROPE | {"partial_rotary_factor": 1.0}
            tower = {"hidden_size": 32, "out_hidden_size": width, "num_position_embeddings": 64}
    return {
        "text_config": text,
        "vision_config": QWEN_TOWER | tower | vision,
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "tie_word_embeddings": False,
    }
