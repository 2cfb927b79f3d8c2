"""Images in vLLM: places, log-probs, conversations in tokens, and weights, against plain transformers."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from image_helpers import data_url, image_file, make_image
from tiny_vlms import build_vlm
from vllm_bench import Bench, open_bench
from vllm_helpers import TOLERANCE, change
from weight_loading import load_weights

from raylight.engines.protocol import LoraAdapter
from raylight.images.model_inputs import ModelImages

pytest.importorskip("torchvision", reason="vLLM imports image processors that need it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision")
ARCHITECTURE = {"hf_overrides": {"text_config": {"architectures": ["Qwen3ForCausalLM"]}}}
"""Name of the text part, without which vLLM 0.29 does not start Qwen 3-VL on a CPU."""
RED, WIDE = ("red", (32, 32)), ("green", (64, 40))
PAIR = (make_image(*RED), make_image(*WIDE))


def content(*images: Any) -> list[dict[str, Any]]:
    shown = [{"type": "image_url", "image_url": {"url": data_url(image_file(*image))}} for image in images]
    return [{"type": "text", "text": "see"}, *shown]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    folder = build_vlm(request.param, tmp_path_factory.mktemp(request.param))
    more = ARCHITECTURE if request.param == "qwen3_vl" else {}
    adapters = 0 if request.param == "llava_onevision" else 2
    async with open_bench(
        folder, slots=8, max_adapters=adapters, max_model_len=1024, lora_target_modules=None, **more
    ) as bench:
        yield bench


@pytest.fixture(scope="module")
def images(seeing: Bench) -> ModelImages:
    found = ModelImages.load(seeing.path)
    assert found is not None
    return found


def whole_model(path: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


async def ask(bench: Bench, messages: list[Any], ids: list[int] | None = None, model: str = "policy") -> Any:
    extra: dict[str, Any] = {"ignore_eos": True}
    if ids is not None:
        extra["kv_transfer_params"] = {"prompt_token_ids": ids}
    await bench.openai.chat.completions.create(model=model, messages=messages, max_tokens=8, extra_body=extra)
    return bench.sample


@torch.inference_mode()
def difference(module: Any, images: ModelImages, found: Any, *shown: Any) -> float:
    """Return the largest difference of a sample's log-probs from a plain pass."""
    ids = torch.from_numpy(found.token_ids).long()[None]
    kinds = torch.zeros_like(ids)
    for place in found.images:
        kinds[0, place.start : place.stop] = 1
    given = {"qwen": "mm_token_type_ids", "gemm": "token_type_ids"}.get(module.config.model_type[:4])
    inputs = images.inputs(shown) | ({given: kinds} if given and shown else {})
    count = len(found.output_ids)
    logits = module(input_ids=ids, **inputs).logits[0, -count - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, ids[0, -count:, None])[:, 0]
    return float((torch.tensor(found.logprobs) - expected).abs().max())


async def test_places_and_logprobs_in_two_turns(seeing: Bench, images: ModelImages) -> None:
    module = whole_model(seeing.path)
    messages: list[Any] = [{"role": "user", "content": content(RED, WIDE)}]
    first = await ask(seeing, messages)
    assert first.images == images.place(first.prompt_ids, PAIR)
    assert difference(module, images, first, *PAIR) < TOLERANCE
    messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": content(RED)}]
    turn = seeing.engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = [*first.token_ids.tolist(), *images.encode(turn, PAIR[:1])[0]]
    second = await ask(seeing, messages, ids)
    assert second.prompt_ids.tolist() == ids
    assert second.images == images.place(ids, (*PAIR, PAIR[0]))
    assert difference(module, images, second, *PAIR, PAIR[0]) < TOLERANCE
    with pytest.raises(openai.BadRequestError):
        await ask(seeing, messages[:1], ids[:8])


async def test_an_adapter_of_the_language_part(seeing: Bench, images: ModelImages) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    module = whole_model(seeing.path)
    if module.config.model_type == "llava_onevision":
        pytest.skip("vLLM 0.29 serves no adapters of this architecture")
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)", init_lora_weights=False)
    adapted: Any = get_peft_model(module, config).eval()
    weights = {name: tensor.numpy() for name, tensor in get_peft_model_state_dict(adapted).items()}
    await seeing.engine.load_adapter("learner", 1, LoraAdapter(config.to_dict(), weights))
    found = await ask(seeing, [{"role": "user", "content": content(RED, WIDE)}], model="learner")
    assert difference(module, images, found, *PAIR) < TOLERANCE
    with adapted.disable_adapter():
        assert difference(module, images, found, *PAIR) > 10 * TOLERANCE


async def test_new_weights_of_all_parts(seeing: Bench, images: ModelImages) -> None:
    from raylight.weights.source import WeightSource

    messages: list[Any] = [{"role": "user", "content": content(RED, WIDE)}]
    before = await ask(seeing, messages)
    module = whole_model(seeing.path)
    change(module, 1, scale=0.03)
    sent = dict(WeightSource(module, torch.float32))
    await load_weights(seeing.engine, 1, sent)
    after = await ask(seeing, messages)
    assert difference(module, images, after, *PAIR) < TOLERANCE
    assert difference(module, images, before, *PAIR) > 10 * TOLERANCE
