"""Images in the transformers engine, against plain passes of the whole model."""

import asyncio
import inspect
import threading
from importlib.util import find_spec
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from image_helpers import data_url, image_file, make_image, mirror
from tiny_vlms import FAMILIES, WITH_TORCHVISION, build_vlm
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers_helpers import MakeEngine, client_of, open_context
from unit_helpers import within
from weight_loading import load_weights

from raylight.engines.capture_context import Sample
from raylight.engines.protocol import LoraAdapter
from raylight.engines.transformers import prompt
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.vision import VisionPart
from raylight.errors import EngineStartError
from raylight.images.image import Image
from raylight.types.images import compared_ids

RED, BLUE, WIDE = make_image("red"), make_image("blue"), make_image("green", (64, 40))
SAMPLED, GREEDY = SamplingParams(8, ignore_eos=True), SamplingParams(8, temperature=0.0, ignore_eos=True)
TOLERANCE = 1e-5
PART = {"type": "image_url", "image_url": {"url": data_url(image_file("red")), "detail": "low"}}
BASIC = "qwen3_vl"
"""Family of the tests that are the same for all: with positions in two dimensions and deep features."""
ALL = [
    family if family in (BASIC, "gemma3") else pytest.param(family, marks=pytest.mark.slow("two show it"))
    for family in FAMILIES
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    built: dict[str, str] = {}

    def build(family: str) -> str:
        if family not in built:
            built[family] = build_vlm(family, tmp_path_factory.mktemp(family))
        return built[family]

    return build


def whole_model(path: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def shown(*images: Image) -> list[Any]:
    """Return a message's content: each image after a word."""
    parts = [[{"type": "text", "text": "see"}, {"type": "image"}] for _ in images]
    return [{"role": "user", "content": [part for pair in parts for part in pair]}]


def prompt_of(engine: TransformersEngine, *images: Image) -> list[int]:
    assert engine.images is not None
    text = engine.tokenizer.apply_chat_template(shown(*images), tokenize=False, add_generation_prompt=True)
    return engine.images.encode(text, images)[0]


async def sample(
    engine: TransformersEngine,
    ids: list[int],
    images: tuple[Image, ...] = (),
    params: SamplingParams = SAMPLED,
    adapter: str | None = None,
) -> Sample:
    places = engine.images.place(ids, images)
    async with within(60):
        with engine.begin([ids], [params], adapter, images=images, places=places) as choices:
            (sequence,) = await choices.end()
    return sequence.sample


@torch.inference_mode()
def plain_logprobs(module: Any, engine: TransformersEngine, found: Sample, *images: Image) -> list[float]:
    """Return the log-probs of a response by the model's own forward pass, without cache and batch."""
    assert engine.images is not None
    ids = torch.from_numpy(found.token_ids).long()[None]
    kinds = torch.zeros_like(ids)
    for place in found.images:
        kinds[0, place.start : place.stop] = 1
    names = "mm_token_type_ids", "token_type_ids"
    taken = inspect.signature(type(module).forward).parameters
    inputs = engine.images.inputs(images) | {name: kinds for name in names if images and name in taken}
    count = len(found.output_ids)
    logits = module(input_ids=ids, **inputs).logits[0, -count - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, -count:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "family",
    [
        *ALL,
        pytest.param(
            WITH_TORCHVISION,
            marks=pytest.mark.skipif(
                find_spec("torchvision") is None, reason="its processor needs torchvision"
            ),
        ),
    ],
)
async def test_logprobs_are_those_of_the_plain_model(
    make_engine: MakeEngine, folders: Any, family: str
) -> None:
    engine, module = make_engine(folders(family)), whole_model(folders(family))
    assert engine.images is not None

    async def check(ids: list[int], *images: Image, params: SamplingParams = SAMPLED) -> Sample:
        found = await sample(engine, ids, images, params)
        assert found.logprobs == pytest.approx(plain_logprobs(module, engine, found, *images), abs=TOLERANCE)
        return found

    both = prompt_of(engine, RED, WIDE)
    await check(both, RED, WIDE, params=GREEDY)
    text = engine.tokenizer.encode("no image here")
    first, *_ = await asyncio.gather(  # one batch: equal tokens of other images, text, another length
        check(both, RED, WIDE),
        check(both, BLUE, WIDE),
        check(text),
        check(prompt_of(engine, BLUE), BLUE),
        check(both, RED, WIDE),
    )
    later = engine.tokenizer.encode("<|im_end|>\n") + prompt_of(engine, BLUE)
    await check([*first.token_ids.tolist(), *later], RED, WIDE, BLUE)
    for other in (BLUE, mirror(RED)):
        found = plain_logprobs(module, engine, first, other, WIDE)
        assert max(np.abs(np.subtract(found, first.logprobs))) > 0.005


async def test_no_prefix_is_shared_by_different_images(make_engine: MakeEngine, folders: Any) -> None:
    engine = make_engine(folders(BASIC))
    ids = prompt_of(engine, RED)
    found = await sample(engine, ids, (RED,))
    (place,) = found.images
    for image, known in ((RED, len(ids) - 1), (BLUE, place.start)):
        compared = compared_ids(np.array(ids, np.int32), [place._replace(sha256=image.sha256)])
        assert engine._decoder.prefixes.find(None, compared)[1] in (known, 0)
    assert engine._decoder.prefixes.find(None, compared_ids(np.array(ids, np.int32), found.images))[1]


async def test_features_are_computed_once_until_the_tower_changes(
    make_engine: MakeEngine, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, module = make_engine(folders(BASIC)), whole_model(folders(BASIC))
    ids, model = prompt_of(engine, RED, RED), type(engine._decoder.module.model)
    passes, compute = [], model.get_image_features

    def count(own: Any, *args: Any, **given: Any) -> Any:
        passes.append(own)
        return compute(own, *args, **given)

    monkeypatch.setattr(model, "get_image_features", count)

    async def check() -> None:
        found = await sample(engine, ids, (RED, RED))
        expected = plain_logprobs(module, engine, found, RED, RED)
        assert found.logprobs == pytest.approx(expected, abs=TOLERANCE)

    def engine_passes() -> int:
        return sum(own is engine._decoder.module.model for own in passes)

    await check()
    await check()
    assert engine_passes() == 1
    for version, part, expected in ((1, "lm_head", 1), (2, "visual", 2)):
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if part in name:
                    weight += 0.05 * torch.randn_like(weight)
        await load_weights(engine, version, {n: t.numpy() for n, t in module.state_dict().items()})
        await check()
        assert engine_passes() == expected


async def test_an_adapter_of_the_language_part(make_engine: MakeEngine, folders: Any) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    engine, module = make_engine(folders("gemma3")), whole_model(folders("gemma3"))
    config = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)", init_lora_weights=False)
    adapted = get_peft_model(module, config).eval()
    weights = {name: t.numpy() for name, t in get_peft_model_state_dict(adapted).items()}
    await engine.load_adapter("policy", 1, LoraAdapter(config.to_dict(), weights))
    ids = prompt_of(engine, RED)
    adapted_found, found = await asyncio.gather(
        sample(engine, ids, (RED,), adapter="policy"), sample(engine, ids, (RED,))
    )
    expected = plain_logprobs(module, engine, adapted_found, RED)
    assert adapted_found.logprobs == pytest.approx(expected, abs=TOLERANCE)
    with adapted.disable_adapter():
        assert found.logprobs == pytest.approx(plain_logprobs(module, engine, found, RED), abs=TOLERANCE)


def test_a_model_of_another_layout() -> None:
    one = {"num_hidden_layers": 1}
    config = AutoConfig.for_model("smolvlm", text_config=one, vision_config=one)
    with torch.device("meta"):
        module = AutoModelForImageTextToText.from_config(config)
    images: Any = None
    with pytest.raises(EngineStartError, match=r"SmolVLM\w+ has no language_model; .*preprocessor_config"):
        VisionPart(module, images)


class TestRequests:
    async def ask(self, engine: TransformersEngine, *messages: Any, **more: Any) -> Any:
        async with within(60):
            client = await client_of(engine)
            return await client.chat.completions.create(
                model="policy", messages=list(messages), max_tokens=4, **more
            )

    @pytest.mark.parametrize("family", ALL)
    async def test_images_of_users_and_tools(
        self, make_engine: MakeEngine, folders: Any, family: str
    ) -> None:
        engine, context = make_engine(folders(family)), open_context()
        called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [
            {"role": "system", "content": "Say what you see."},
            {"role": "user", "content": [{"type": "text", "text": "This?"}, PART]},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c", "content": [PART]},
        ]
        answer = await self.ask(engine, *messages, n=2)
        for found in context.samples.values():
            assert [place.sha256 for place in found.images] == [RED.sha256] * 2
            assert engine.images.place(found.prompt_ids, [RED, RED]) == found.images
        assert answer.usage.prompt_tokens == len(context.samples[0].prompt_ids)
        in_tokens = {"prompt_token_ids": [*context.samples[0].token_ids.tolist(), 1, 2]}
        again = open_context()
        await self.ask(engine, *messages, extra_body={"kv_transfer_params": in_tokens})
        assert again.samples[0].images == context.samples[0].images

    @pytest.mark.parametrize(
        ("content", "error"),
        [
            (
                [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}],
                r"\.image_url: the",
            ),
            ([{"type": "input_audio", "input_audio": {}}], "accepts text and images, not audio"),
            ([PART, {"type": "text", "text": "<|image_pad|>"}], "2 times the text .*, and 1 images"),
        ],
    )
    async def test_rejected_content(
        self, make_engine: MakeEngine, folders: Any, content: Any, error: str
    ) -> None:
        with pytest.raises(openai.BadRequestError, match=error):
            await self.ask(make_engine(folders(BASIC)), {"role": "user", "content": content})

    async def test_tokens_of_another_image(self, make_engine: MakeEngine, folders: Any) -> None:
        engine = make_engine(folders(BASIC))
        in_tokens = {"prompt_token_ids": prompt_of(engine, WIDE)}
        with pytest.raises(openai.BadRequestError, match=r"prompt_token_ids: .* image 1 of 1"):
            await self.ask(
                engine,
                {"role": "user", "content": [PART]},
                extra_body={"kv_transfer_params": in_tokens},
            )

    async def test_images_are_read_in_a_thread(
        self, make_engine: MakeEngine, folders: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: list[int] = []
        read = prompt.read_images
        monkeypatch.setattr(
            prompt, "read_images", lambda *given: threads.append(threading.get_ident()) or read(*given)
        )
        body = {"model": "policy", "messages": [{"role": "user", "content": [PART]}]}
        transport = httpx.ASGITransport(await make_engine(folders(BASIC)).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            answer = await client.post("/tokenize", json=body)
        assert answer.status_code == 200
        assert len(threads) == 1
        assert threads[0] != threading.get_ident()

    async def test_model_without_a_vision_part(self, make_engine: MakeEngine) -> None:
        with pytest.raises(openai.BadRequestError, match=r"content\[0\]: this model accepts text only"):
            await self.ask(make_engine(), {"role": "user", "content": [PART]})
